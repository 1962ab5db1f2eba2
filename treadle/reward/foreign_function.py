"""Foreign reward function: one that is imported and called in another interpreter, beside the worker that asks it.

    reward worker ─► JSON over a socket ─► foreign_main.py in the other Python ─► the function, in a thread of its own

Owns that process, one for each interpreter of a worker. It is the worker's child: its memory and CPU time count as the
worker's, what kills the worker's tree kills it, and a worker whose interpreter ended ends in the same way. Blocking, as
a worker is: it has one score at a time, and its parent keeps the deadline.
Invariant: what comes back is JSON, read as a score like any other result.
"""

import inspect
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from treadle.errors import ConfigError, Mistake
from treadle.process.foreign import SHIM, ForeignError, find_python, import_mistake
from treadle.process.tree import kill_tree, list_children
from treadle.reward.result import Fault, ScoreFailure

_HEADER = struct.Struct("!Q")
_MAX_BYTES = 64 << 20
_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)
_RUNNING: "dict[str, ForeignFunctions]" = {}
"""By the path of the interpreter."""


class ForeignFunctions:
    """A process of another Python, asked one thing at a time."""

    def __init__(self, python: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            words = (python, "-E", "-u", str(SHIM), str(theirs.fileno()), "-1", "reward functions")
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        self._channel = ours.makefile("rwb")
        ours.close()
        self._numbers = itertools.count()
        self._kept: set[int] = set()
        self._send(None)
        self._send(None)
        self._receive()

    def request(self, body: Mapping[str, Any]) -> Any:
        """What the process answers; ForeignError where its code raises. EOFError where it has ended."""
        number = next(self._numbers)
        self._send({"kind": "request", "number": number, "body": body})
        reply = self._receive()
        if not isinstance(reply, dict) or reply.get("number") != number:
            raise EOFError("it answered what was not asked")
        if (raised := reply["body"].get("raised")) is None:
            return reply["body"].get("value")
        raise ForeignError(tuple(raised["kinds"]), raised["text"], raised["where"], raised["name"])

    def keep_children(self) -> None:
        """What imports have started lives on, beside what a score starts."""
        self._kept = set(list_children(self._process.pid))

    def end_leftovers(self) -> None:
        """End what a score has started and left behind."""
        for left in set(list_children(self._process.pid)) - self._kept:
            kill_tree(left)

    def end_alike(self) -> None:
        """End this process as the other one has ended: its parent says of both what became of them."""
        self._process.kill()
        status = self._process.wait()
        if status < 0:
            if -status != signal.SIGKILL:
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status)

    def _send(self, message: Any) -> None:
        data = json.dumps(message, default=_as_plain).encode()
        self._channel.write(_HEADER.pack(len(data)) + data)
        self._channel.flush()

    def _receive(self) -> Any:
        (size,) = _HEADER.unpack(self._read(_HEADER.size))
        if size > _MAX_BYTES:
            raise EOFError("its answer is too long")
        return json.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        data = self._channel.read(size)
        if len(data) < size:
            raise EOFError("it has ended")
        return data


def load_foreign_function(
    name: str, path: str, python: str
) -> tuple[Callable[..., Any], Mapping[str, inspect.Parameter]]:
    """A function that calls the one at `path`, and its parameters; a ConfigError where it cannot be had."""
    found = find_python(python, "python")
    try:
        if found not in _RUNNING:
            _RUNNING[found] = ForeignFunctions(found)
        process = _RUNNING[found]
        known = process.request({"do": "check", "path": path, "describe": True})
        process.request({"do": "open", "object": name, "path": path, "as_found": True})
        process.keep_children()
    except ForeignError as error:
        raise ConfigError([import_mistake(error, path, "path", python, f"reward.functions.{name}.python")]) from error
    except (OSError, EOFError, ValueError) as error:
        fix = "give the path of an interpreter, such as /path/to/venv/bin/python (3.8 or later)"
        raise ConfigError([Mistake("python", f"does not start: {error}", python, fix=fix)]) from error
    if "parameters" not in known:
        raise ConfigError([Mistake("path", f"{path!r} is no function, or has no signature to read", path)])
    bound = known["bound"]  # by functools.partial: no column of a row takes their place
    parameters = {one: _parameter(one, kind, needed) for one, kind, needed in known["parameters"] if one not in bound}
    return _Call(process, name), parameters


def _parameter(name: str, kind: int, needed: bool) -> inspect.Parameter:
    return inspect.Parameter(name, _KINDS[kind], default=inspect.Parameter.empty if needed else None)


class _Call:
    """One function over there."""

    def __init__(self, process: ForeignFunctions, name: str) -> None:
        self._process, self._name = process, name

    def __call__(self, **values: Any) -> Any:
        body = {"do": "call", "object": self._name, "method": "__call__", "keywords": values}
        try:
            return self._process.request(body)
        except ForeignError as error:
            raise _as_failure(error) from error
        except (EOFError, ConnectionError):
            return self._process.end_alike()
        finally:
            self._process.end_leftovers()


def _as_failure(error: ForeignError) -> ScoreFailure:
    """What the function raised, as the same in this interpreter would be."""
    where = f" ({error.where})" if error.where else ""
    if "MemoryError" in error.kinds:
        return ScoreFailure(Fault.MEMORY, "ran out of memory (reward.memory_mb)")
    if "SystemExit" in error.kinds:
        return ScoreFailure(Fault.CRASH, f"called sys.exit({error.text[:80]})")
    fault = Fault.TIMEOUT if "TimeoutError" in error.kinds else Fault.EXCEPTION
    return ScoreFailure(fault, f"raised {error}{where}")


def _as_plain(value: Any) -> Any:
    """Values of rows that JSON has by another name: maps of any kind, tuples, numbers of numpy."""
    if isinstance(value, Mapping):
        return dict(value)
    for convert in ("tolist", "isoformat"):
        if callable(getattr(value, convert, None)):
            return getattr(value, convert)()
    raise TypeError(f"{type(value).__name__} cannot be sent to another interpreter: give JSON values")
