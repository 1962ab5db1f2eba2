"""Foreign interpreter: user code in a process of another Python, whose packages need not agree with treadle's.

Owns that process and the calls into it: objects by import path, which live in `treadle/process/foreign_main.py` over
there. One process serves all sessions of an agent worker, since the packages in question take seconds to import and
hundreds of megabytes; each object has a thread of its own. JSON travels in both directions, never a pickle.
Waits: a call waits for its reply; the deadline is the caller's. A cancelled call is left to its thread over there.
After one, the process is asked for an answer of its own, for which the next session waits, at most `ANSWER_S`: without
one, the call holds the whole interpreter, and the process is killed.
Invariant: a process that died fails the calls of its sessions, with the cause, and is started again for the next one;
it ends with this process, by SIGKILL too.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from treadle.errors import ConfigError, DeadlineError, Failure, Mistake, RunError, TreadleError, nearest
from treadle.process.channel import ChannelClosed, ChannelCodec, FrameCodec
from treadle.process.child_handle import ProcessSpec
from treadle.process.launcher import LocalProcess, SubprocessLauncher
from treadle.process.rpc import RpcCancel, RpcNotify, RpcReply, RpcRequest, unguessable_numbers
from treadle.process.supervisor import RestartPolicy, Supervisor
from treadle.terminal import warn

SHIM = Path(__file__).with_name("foreign_main.py")
MAX_BYTES = 64 << 20
RECORD = "$record"
ANSWER_S = 10.0
"""For an answer of the main thread over there, which needs nothing but its turn."""
RESTART = RestartPolicy(attempts=3, first_wait_s=0.5)


class ForeignError(Exception):
    """What code in the other interpreter raised."""

    def __init__(self, kinds: tuple[str, ...], text: str, where: str, missing: str) -> None:
        super().__init__(f"{kinds[0]}: {text}" if text else kinds[0])
        self.kinds, self.text, self.where = kinds, text, where
        self.missing = missing
        """The module that was not found, if that is the error."""


@dataclass(frozen=True, slots=True)
class ForeignTarget:
    """Something by import path in the other interpreter."""

    path: str
    """`package.module:name` or `file.py:name`."""
    arguments: tuple[Any, ...] = ()
    """Before those of a session."""
    check: str | None = None
    """What its module's `check` is asked about first."""


class ForeignInterpreter:
    """A process of another Python. Started by `start`; `close` is the last call."""

    def __init__(self, python: str, key: str, start_timeout_s: float) -> None:
        command = (find_python(python, key), "-E", str(SHIM))
        self._spec = ProcessSpec(
            name=f"the process of {python}",
            serve="",
            setup={},
            start_timeout_s=start_timeout_s,
            start_timeout_key="rollout.limits.launch_timeout_s",
            codec=ChannelCodec(_DOWN, _UP),
            quiet=True,
            command=command,
        )
        self._key, self._python = key, python
        self._supervisor = Supervisor(self._launch, RESTART)
        self._asking: set[asyncio.Task[None]] = set()
        self._held: set[LocalProcess] = set()
        """Those that were killed since a call held them."""

    @classmethod
    async def start(cls, python: str, key: str, start_timeout_s: float) -> "ForeignInterpreter":
        """A process that serves; a ConfigError where this is no interpreter."""
        interpreter = cls(python, key, start_timeout_s)
        try:
            await interpreter._supervisor.current()
        except (RunError, OSError) as error:
            fix = "give the path of an interpreter, such as /path/to/venv/bin/python (3.8 or later)"
            raise ConfigError([Mistake(key, f"does not start: {error}", python, fix=fix)]) from error
        return interpreter

    async def _launch(self) -> LocalProcess:
        return await SubprocessLauncher().launch(self._spec, _refuse, numbers=unguessable_numbers())

    async def check(self, target: ForeignTarget) -> Mapping[str, Any]:
        """Import a target and ask its module about it; what is known of it. ForeignError where that fails."""
        process = await self._supervisor.current()
        body = {"do": "check", "path": target.path, "check": target.check, "describe": True}
        found = await self._request(process, body, RunError)
        return found if isinstance(found, Mapping) else {}

    async def open(
        self, target: ForeignTarget, arguments: tuple[Any, ...], keywords: Mapping[str, Any], failure: type[Failure]
    ) -> "ForeignHandle":
        """A new object; `failure` is what the end of its process is."""
        try:
            if self._asking:
                await asyncio.wait(self._asking)
            process = await self._supervisor.current()
        except TreadleError as error:
            raise failure(f"{self._spec.name} cannot be started again: {error}") from error
        handle = ForeignHandle(self, process, uuid4().hex, failure)
        given = [*target.arguments, *arguments]
        await handle.request({"do": "open", "path": target.path, "arguments": given, "keywords": dict(keywords)})
        return handle

    async def _request(self, process: LocalProcess, body: Mapping[str, Any], failure: type[TreadleError]) -> Any:
        try:
            reply = await process.peer.request(body)
        except ChannelClosed:
            held = f"killed, because a call held its interpreter for {ANSWER_S:g} s and more after it was late"
            cause = held if process in self._held else await process.cause()
            raise failure(f"{self._spec.name} ended: {cause}") from None
        except asyncio.CancelledError:
            asking = asyncio.ensure_future(self._ask(process))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
            raise
        if "raised" not in reply:
            return reply.get("value")
        raised = reply["raised"]
        raise ForeignError(
            tuple(map(str, raised["kinds"])) or ("error",),
            str(raised["text"]),
            str(raised["where"]),
            str(raised["name"]),
        )

    async def _ask(self, process: LocalProcess) -> None:
        """Kill a process whose main thread does not get its turn."""
        with suppress(ChannelClosed):  # it has ended
            try:
                await process.peer.request({"do": "answer"}, ANSWER_S)
            except DeadlineError:
                self._held.add(process)
                warn(f"note: {process.name} was killed: a late call held its interpreter")
                process.kill()
                await process.gone()

    @property
    def pid(self) -> int | None:
        """The id of the process that runs, if one does."""
        process = self._supervisor.process
        return None if process is None else process.pid

    async def close(self) -> None:
        """End the process."""
        await self._supervisor.end()


class ForeignHandle:
    """An object in the other interpreter."""

    def __init__(
        self, interpreter: ForeignInterpreter, process: LocalProcess, name: str, failure: type[Failure]
    ) -> None:
        self._interpreter, self._process, self._name, self._failure = interpreter, process, name, failure

    async def request(self, body: Mapping[str, Any]) -> Any:
        """Something asked of it; a Failure where it raises, or where its process ends."""
        try:
            return await self._interpreter._request(self._process, {**body, "object": self._name}, self._failure)
        except ForeignError as error:
            raise self._failure(f"{error}{f' ({error.where})' if error.where else ''}") from error

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """What a method returns, as JSON."""
        body = {"do": "call", "method": method, "arguments": list(arguments), "keywords": keywords}
        return await self.request(body)

    async def has(self, method: str) -> bool:
        return bool(await self.request({"do": "has", "method": method}))

    async def close(self) -> None:
        """Call its `close`, if it has one, and let go of it."""
        if not self._process.over:
            await self.request({"do": "close"})


def as_record(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields that are attributes of an object at the other end."""
    return {RECORD: dict(fields)}


def import_mistake(error: ForeignError, target: str, key: str, python: str, python_key: str) -> Mistake:
    """What is wrong with a target, as a mistake in the config."""
    if error.missing:
        fix = f"{python} -m pip install it, or name another interpreter as {python_key}"
        return Mistake(key, f"{python} has no module {error.missing!r}", target, fix=fix, missing="Python module")
    return Mistake(key, str(error) if "LookupError" not in error.kinds else error.text, target)


def find_python(python: str, key: str) -> str:
    """The interpreter at a path, which may begin with ~; a ConfigError where there is none."""
    path = os.path.abspath(os.path.expanduser(python))  # a link is not followed: it is how Python finds its environment
    if os.path.isfile(path) and os.access(path, os.X_OK):
        return path
    inside = Path(path) / "bin" / "python"
    fix = f"give the interpreter itself: {inside}" if inside.is_file() else "give the path of an interpreter"
    near = nearest(Path(path).name, [item.name for item in Path(path).parent.glob("python*")])
    problem = "there is no such program" if not os.path.isdir(path) else "is a directory"
    raise ConfigError([Mistake(key, problem, python, fix=near or fix, missing="program")])


async def _refuse(body: Any) -> Any:
    raise RunError("a foreign interpreter asks for nothing")


def _encode(message: Any) -> bytes:
    if isinstance(message, RpcRequest):
        fields: Mapping[str, Any] = {"kind": "request", "number": message.number, "body": message.body}
    elif isinstance(message, RpcCancel):
        fields = {"kind": "cancel", "number": message.number}
    else:
        assert isinstance(message, RpcNotify)
        fields = {"kind": "notify", "body": message.body}
    return json.dumps(fields, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to another interpreter: give JSON values")


def _decode(data: bytes | memoryview) -> RpcReply:
    """Whatever arrives is a reply with a map, or ValueError: code that is not ours writes to this channel."""
    try:
        fields = json.loads(bytes(data))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if (
        not isinstance(fields, dict)
        or type(fields.get("number")) is not int
        or not isinstance(fields.get("body"), dict)
    ):
        raise ValueError("no reply of a foreign interpreter")
    raised = fields["body"].get("raised")
    if raised is not None and not (isinstance(raised, dict) and {"kinds", "text", "where", "name"} <= raised.keys()):
        raise ValueError("no error of a foreign interpreter")
    if raised is not None and not isinstance(raised["kinds"], list):
        raise ValueError("no error of a foreign interpreter")
    return RpcReply(fields["number"], fields["body"])


_DOWN = FrameCodec(_encode, bytes)
_UP = FrameCodec(bytes, _decode, (ValueError,), MAX_BYTES)
