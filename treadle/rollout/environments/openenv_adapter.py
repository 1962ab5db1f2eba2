"""OpenEnv adapter: a session on an OpenEnv server, `openenv:http://localhost:8000`; standard library alone.

`openenv:PACKAGE` starts the server of an installed package, `PACKAGE.server.app:app` or what is named in that form, on
a loopback port: one for all sessions of this process, started again where it has ended, and killed with this process.
`environment_kwargs`: `seed` and whatever the server's `reset` takes; `action_field`, the field of an action that the
model's turn is (null: the only one that is a text); `observation_field`, the field of an observation that the model is
shown (null: the only text, else the whole observation as JSON); `capacity_timeout_s`, how long a session waits for a
server whose sessions are all taken. A server that cannot be reached, or that breaks off, is a failure.
"""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from typing import Any

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
_ANSWER_S = 10.0
_OWN = ("done", "reward", "metadata")
_SCHEMES = ("http://", "https://", "ws://", "wss://")
_APPLICATION = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?")
_START_S = 300.0
"""For a package to be imported and its server to answer."""

_SERVE = """
import fcntl, importlib, os, signal, socket, sys, threading

def end_with_parent():
    os.read(0, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)

if sys.platform == "linux":
    fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(0, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    try:
        end_with_parent()
    except BlockingIOError:
        pass
else:
    threading.Thread(target=end_with_parent, daemon=True).start()
import uvicorn
module, _, name = sys.argv[2].partition(":")
application = getattr(importlib.import_module(module), name)
config = uvicorn.Config(application, log_level="warning")
uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
"""
"""Leads a process group of its own, which ends when its standard input does: by the kernel, where that can do it."""


def check(name: str) -> None:
    """LookupError where no server answers."""
    import openenv  # noqa: F401  the client

    _get(_find_address(name), "/health")


class OpenEnvSession:
    """One session: a connection of its own."""

    def __init__(
        self,
        url: str,
        action_field: str | None = None,
        observation_field: str | None = None,
        capacity_timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        self._url, self._options = _find_address(url), options
        self._action_field = action_field or _only_text_field(self._url)
        self._observation_field = observation_field
        self._capacity_timeout_s = capacity_timeout_s
        self._client: Any = None

    def reset(self, task: Any) -> dict[str, Any]:
        deadline, wait_s = time.monotonic() + self._capacity_timeout_s, _FIRST_WAIT_S
        while True:
            try:
                return {"messages": self._text(self._connect().reset(**self._options).observation)}
            except Exception as error:
                self.close()
                if not _is_full(error):
                    raise
                if time.monotonic() + wait_s > deadline:
                    full = f"all sessions of {self._url} were taken for {self._capacity_timeout_s:g} s"
                    raise TimeoutError(f"{full} (environment_kwargs.capacity_timeout_s)") from error
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def step(self, action: Any) -> dict[str, Any]:
        result = self._client.step({self._action_field: action.text})
        done = bool(result.done)
        messages = [] if done else [{"role": "user", "content": self._text(result.observation)}]
        reward = None if result.reward is None else float(result.reward)
        return {"messages": messages, "reward": reward, "done": done}

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self) -> Any:
        from openenv import GenericEnvClient

        self._client = GenericEnvClient(base_url=self._url).sync()
        self._client.connect()
        return self._client

    def _text(self, observation: Any) -> str:
        fields = {name: value for name, value in observation.items() if name not in _OWN}
        if self._observation_field is not None:
            if self._observation_field not in fields:
                raise KeyError(f"an observation has no {self._observation_field!r}: {sorted(fields)}")
            return str(fields[self._observation_field]) or "Go on."
        texts = [value for value in fields.values() if isinstance(value, str)]
        return (texts[0] if len(texts) == 1 else json.dumps(fields)) or "Go on."


class _PackageServer:
    """The server of a package, in a process of its own."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._lines: Any = deque(maxlen=5)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.address = f"http://127.0.0.1:{listening.getsockname()[1]}"
            number = listening.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, str(number), application],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[number],
                start_new_session=True,
            )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> str:
        """Its address, when it answers; LookupError where it ends first, or takes longer than `_START_S`."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                _get(self.address, "/health")
                return self.address
            except LookupError:
                if self.over:
                    self._reading.join(1.0)
                    said = f": {' | '.join(self._lines)}" if self._lines else ""
                    raise LookupError(
                        f"the server of {self._application} ended with status {self._process.returncode}{said}"
                    ) from None
                if time.monotonic() > deadline:
                    self._process.kill()
                    raise
            time.sleep(_FIRST_WAIT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip():
                self._lines.append(line.decode(errors="replace").strip()[:200])


_SERVERS: dict[str, _PackageServer] = {}
_STARTING = threading.Lock()


def _find_address(name: str) -> str:
    """The address of a server: the one that is given, or that of a package's, which is started unless it runs."""
    if name.startswith(_SCHEMES):
        return name
    application = name if ":" in name else f"{name}.server.app:app"
    if _APPLICATION.fullmatch(name) is None or not _is_there(application.partition(":")[0]):
        raise LookupError(
            f"{name!r} is no address, and no package here has {application}: write openenv:http://host:port, or the "
            "name of a package"
        )
    with _STARTING:
        if application in _SERVERS:
            try:
                return _SERVERS[application].wait()
            except LookupError:
                if not _SERVERS[application].over:
                    raise
        server = _SERVERS[application] = _PackageServer(application)
        return server.wait()


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _is_full(error: BaseException) -> bool:
    return "CAPACITY_REACHED" in str(error)


def _only_text_field(url: str) -> str:
    """The field of an action that is a text, from the server's own schema."""
    properties = _get(url, "/schema")["action"].get("properties", {})
    texts = [name for name, field in properties.items() if field.get("type") == "string" and name != "metadata"]
    if len(texts) != 1:
        raise ValueError(
            f"an action of {url} has the fields {sorted(properties)}: say which is the model's turn, as "
            "environment_kwargs.action_field"
        )
    return str(texts[0])


def _get(url: str, path: str) -> Any:
    address = url.rstrip("/").replace("ws", "http", 1) if url.startswith("ws") else url.rstrip("/")
    try:
        with urllib.request.urlopen(f"{address}{path}", timeout=_ANSWER_S) as answer:
            return json.loads(answer.read())
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise LookupError(f"no OpenEnv server answers at {address}{path}: {error}") from error
