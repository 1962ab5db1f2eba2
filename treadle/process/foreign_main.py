"""Child process entry point in another interpreter, any Python from 3.8: builds, calls and closes objects by path.

Run by its path (`PYTHON -E foreign_main.py CHANNEL LIFELINE NAME`), with the standard library alone: nothing of treadle
need be installed there. Speaks the frames and first messages of `child_main`, with JSON in the place of pickles.
Each object has a thread of its own, which builds it, runs every call of it and closes it, so that code which is bound
to a thread works; async methods run on an event loop of that thread. A call that was cancelled at the other end is
left to its thread, which closes the object when it returns; with `MAX_STUCK` of them the process ends, and the parent
starts the next.
Waits: the main thread waits for messages until the channel closes, and then ends the process at once. It answers the
parent's `answer` itself: where it cannot, a call holds the interpreter, and the parent kills the process.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import importlib.util
import inspect
import json
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from dataclasses import fields, is_dataclass
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

HEADER = struct.Struct("!Q")
MAX_STUCK = 64
RECORD = "$record"
"""A map with this one key is a record: its fields are attributes here."""


class ForeignChannel:
    """Frames over a socket: eight bytes of length, then JSON."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    def receive(self) -> bytes:
        """The next frame; EOFError when there will be none."""
        (size,) = HEADER.unpack(self._read(HEADER.size))
        return self._read(size)

    def send(self, message: Any) -> None:
        body = json.dumps(message).encode()
        with self._lock:
            self._end.sendall(HEADER.pack(len(body)) + body)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._end.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


class ForeignObject:
    """An object and its thread. Jobs are (number, function); None ends it."""

    def __init__(self, server: ForeignServer, number: str) -> None:
        self.jobs: SimpleQueue[Any] = SimpleQueue()
        self.value: Any = None
        self.is_stuck = False
        """Whether a call of it was cancelled: it takes no more, and is closed when that returns."""
        self._server, self._number = server, number
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._work, name=f"object {number}", daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                break
            number, function = job
            self._server.answer(number, self._run, function)
            if self.is_stuck:
                self._server.answer(None, self._run, self.close)
                break
        if self._loop is not None:
            self._loop.close()
        self._server.forget(self._number)

    def _run(self, function: Any) -> Any:
        value = function()
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(value))

    def build(self, build: Any, arguments: Any, keywords: Any) -> None:
        async def keep(made: Any) -> None:
            self.value = await made

        made = build(*arguments, **keywords)
        if inspect.isawaitable(made):
            return keep(made)  # type: ignore[return-value]
        self.value = made
        return None

    def keep(self, found: Any) -> None:
        """Hold what was found as it is, such as a function."""
        self.value = found

    def call(self, method: str, arguments: Any, keywords: Any) -> Any:
        return getattr(self.value, method)(*arguments, **keywords)

    def close(self) -> Any:
        close = getattr(self.value, "close", None)
        return close() if close is not None else None


async def _awaited(value: Any) -> Any:
    return await value


class ForeignServer:
    """Handles the parent's requests until its channel closes."""

    def __init__(self, channel: ForeignChannel) -> None:
        self._channel = channel
        self._objects: dict[str, ForeignObject] = {}
        self._running: dict[int, ForeignObject] = {}
        self._lock = threading.Lock()

    def serve(self) -> None:
        while True:
            message = json.loads(self._channel.receive())
            if message["kind"] == "cancel":
                self._cancel(message["number"])
            elif message["kind"] == "request":
                self._start(message["number"], message["body"])

    def _start(self, number: int, body: Any) -> None:
        name, do = body.get("object", ""), body["do"]
        if do == "check":
            thread = threading.Thread(target=self.answer, args=(number, check, body), daemon=True)
            return thread.start()
        if do == "answer":
            return self._channel.send({"number": number, "body": {"value": None}})
        with self._lock:
            held = self._objects.get(name)
            if do == "open":
                held = self._objects[name] = ForeignObject(self, name)
            if held is None or held.is_stuck:
                return self._channel.send({"number": number, "body": {"value": None}})  # it has been closed, or will be
            self._running[number] = held
        arguments, keywords = as_records(body.get("arguments", [])), as_records(body.get("keywords", {}))
        if do == "open" and body.get("as_found"):
            held.jobs.put((number, lambda: held.keep(find(body))))
        elif do == "open":
            held.jobs.put((number, lambda: held.build(find(body), arguments, keywords)))
        elif do == "call":
            held.jobs.put((number, lambda: held.call(body["method"], arguments, keywords)))
        elif do == "has":
            held.jobs.put((number, lambda: hasattr(held.value, body["method"])))
        else:
            held.jobs.put((number, held.close))
            held.jobs.put(None)
        return None

    def _cancel(self, number: int) -> None:
        with self._lock:
            held = self._running.get(number)
            if held is None:
                return
            held.is_stuck = True
            stuck = sum(one.is_stuck for one in self._objects.values())
        if stuck >= MAX_STUCK:
            sys.stderr.write(f"{stuck} calls outlived their deadlines\n")
            sys.stderr.flush()
            os._exit(70)

    def forget(self, name: str) -> None:
        with self._lock:
            self._objects.pop(name, None)

    def answer(self, number: int | None, run: Any, argument: Any) -> None:
        """Run something and send what it came to; with no number, it is only printed where it breaks."""
        try:
            reply = {"value": as_plain(run(argument))}
        except BaseException as error:  # noqa: BLE001  whatever it is, it is the parent's to judge
            reply = {"raised": describe(error)}
            if number is None:
                traceback.print_exc()
        if number is not None:
            with self._lock:
                self._running.pop(number, None)
            self._channel.send({"number": number, "body": reply})


def check(body: Any) -> Any:
    """Import what is named, and ask its module's `check` about it, where the parent says so."""
    found = find(body)
    if body.get("check") is not None:
        sys.modules[found.__module__].check(body["check"])
    if body.get("describe"):
        return describe_object(found)
    return None


def describe_object(found: Any) -> Any:
    """What the parent must know of an object before it is built or called."""
    known = {"is_class": isinstance(found, type), "has_reset": hasattr(found, "reset")}
    options: dict[str, Any] = {}
    if sys.version_info >= (3, 14):  # an annotation may name what only type checkers import
        options["annotation_format"] = importlib.import_module("annotationlib").Format.FORWARDREF
    try:
        parameters = inspect.signature(found, **options).parameters.values()
    except Exception:  # noqa: BLE001  it runs code that is not ours, and an environment needs no signature
        return known
    described = [[one.name, int(one.kind), one.default is one.empty] for one in parameters]
    return {**known, "parameters": described, "bound": sorted(getattr(found, "keywords", None) or {})}


def find(body: Any) -> Any:
    """The object at `package.module:name` or `path/to/file.py:name`."""
    module_name, _, name = body["path"].rpartition(":")
    if module_name.endswith(".py"):
        module = _import_file(os.path.abspath(os.path.expanduser(module_name)))
    else:
        module = importlib.import_module(module_name)
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


_IMPORTING = threading.Lock()


def _import_file(file: str) -> Any:
    name = f"{os.path.splitext(os.path.basename(file))[0]}_{abs(hash(file)):x}"
    with _IMPORTING:
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, file)
            if spec is None or spec.loader is None:
                raise ImportError(f"{file} is no Python file")
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
    return sys.modules[name]


def as_records(value: Any) -> Any:
    """JSON with records as objects."""
    if isinstance(value, dict):
        if set(value) == {RECORD}:
            return SimpleNamespace(**{name: as_records(item) for name, item in value[RECORD].items()})
        return {name: as_records(item) for name, item in value.items()}
    return [as_records(item) for item in value] if isinstance(value, list) else value


def as_plain(value: Any) -> Any:
    """A value as JSON: records as maps, tuples as lists, numbers of numpy and torch as numbers."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: as_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, SimpleNamespace):
        return as_plain(vars(value))
    if isinstance(value, dict):
        return {str(name): as_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in value]
    for convert in ("tolist", "model_dump"):  # of numpy and torch; of pydantic
        if callable(getattr(value, convert, None)):
            return as_plain(getattr(value, convert)())
    raise TypeError(f"{type(value).__name__} cannot leave its process: return texts, numbers, lists and maps")


def describe(error: BaseException) -> Any:
    """An error as JSON: its class, those it is derived from, its text, and the innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    kinds = [kind.__name__ for kind in type(error).__mro__[:-1]]
    return {"kinds": kinds, "text": " ".join(str(error).split())[:1000], "where": where, "name": _missing(error)}


def _missing(error: BaseException) -> str:
    """The module that was not found, if that is the error."""
    return str(getattr(error, "name", "") or "") if isinstance(error, ModuleNotFoundError) else ""


def end_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process group when the parent's end of the pipe closes; see `tree.die_with_parent`."""
    os.set_inheritable(lifeline, False)
    if sys.platform != "linux":
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    try:
        if os.read(lifeline, 1) == b"":
            os.killpg(os.getpgrp(), signal.SIGKILL)
    except BlockingIOError:
        return


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if int(sys.argv[2]) >= 0:
        end_with_parent(int(sys.argv[2]))
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    sys.path[:1] = []  # the folder of this file
    sys.path.append(os.getcwd())
    channel = ForeignChannel(end)
    try:
        channel.receive()  # the head, which is for our own entry point
        channel.receive()  # the setup; there is none
        channel.send({"value": list(sys.version_info[:3])})
        ForeignServer(channel).serve()
    except (EOFError, OSError):
        pass
    finally:
        sys.stderr.flush()
        os._exit(0)  # threads may be stuck in code that is not ours


if __name__ == "__main__":
    main()
