"""OpenEnv adapter: a session on an OpenEnv server, `openenv:http://localhost:8000`; standard library alone.

`environment_kwargs`: `seed` and whatever the server's `reset` takes; `action_field`, the field of an action that the
model's turn is (null: the only one that is a text); `observation_field`, the field of an observation that the model is
shown (null: the only text, else the whole observation as JSON); `capacity_timeout_s`, how long a session waits for a
server whose sessions are all taken. A server that cannot be reached, or that breaks off, is a failure.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
_ANSWER_S = 10.0
_OWN = ("done", "reward", "metadata")


def check(name: str) -> None:
    """LookupError where no server answers."""
    import openenv  # noqa: F401  the client

    if not name.startswith(("http://", "https://", "ws://", "wss://")):
        raise LookupError(f"{name!r} is no address: write openenv:http://host:port")
    _get(name, "/health")


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
        self._url, self._options = url, options
        self._action_field = action_field or _only_text_field(url)
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
