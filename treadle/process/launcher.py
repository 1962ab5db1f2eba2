"""Launcher of processes on this machine: started, watched, ended; with an asyncio end or a blocking one.

`Launcher` is what a cluster implements, too.
Waits: a launch waits for the child's first message, until a deadline. Where a channel closes, the exit of its child is
waited for, and a child that goes on without it is killed.
Invariant: a launch returns a process that serves, or raises and leaves none; after `end` nothing of the tree is left.
When this process dies, by SIGKILL too, the kernel kills the children that have a lifeline.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from treadle.errors import ConfigError, DeadlineError, RunError, TreadleError
from treadle.process.channel import RAW, BlockingChannel, Channel, ChannelClosed
from treadle.process.child_handle import END_S, ChildProcess, DiedWhileStarting, ProcessSpec
from treadle.process.child_main import STARTED, read_started
from treadle.process.rpc import Handler, RpcPeer, ThreadPeer

log = logging.getLogger(__name__)


PROBE_S = 0.5
"""How long a process of this machine has to write down where it is."""


class RemoteProcess(Protocol):
    """A process from its first message to its end, wherever it runs."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def started(self) -> Any:
        """The value of its first message."""
        ...

    @property
    def peer(self) -> RpcPeer: ...

    @property
    def over(self) -> bool:
        """Whether it serves no more."""
        ...

    async def gone(self) -> str:
        """Wait until it serves no more, without a deadline; why. An error in our own answers to it is raised."""
        ...

    async def cause(self) -> str:
        """Why it is over."""
        ...

    @property
    def probe_s(self) -> float:
        """How long that may take, before it is killed."""
        ...

    def probe(self) -> None:
        """Have it write down where it is, if it can."""
        ...

    def kill(self) -> str:
        """Kill it at once; where it was, as the end of a sentence, if that is known."""
        ...

    async def end(self, timeout_s: float | None = None) -> None:
        """Close its channel, give it time to end in order (None: the spec's), and kill what is left of it.

        Ending twice is harmless.
        """
        ...


class Launcher(Protocol):
    """Starts processes somewhere."""

    async def launch(self, spec: ProcessSpec, handle: Handler, expected: type[Exception]) -> RemoteProcess:
        """A process that serves, or an error within its deadline. `handle` and `expected`: see `RpcPeer`."""
        ...


class SubprocessLauncher:
    """A `Launcher` for this machine."""

    async def launch(
        self,
        spec: ProcessSpec,
        handle: Handler,
        expected: type[Exception] = TreadleError,
        numbers: Iterator[int] | None = None,
    ) -> "LocalProcess":
        """`numbers` of requests: see `RpcPeer`."""
        ours, theirs = socket.socketpair()
        with theirs:
            child = ChildProcess(spec, theirs)
        channel = await Channel.open(ours, RAW, STARTED)
        try:
            started = await self._handshake(spec, child, channel)
        except BaseException:
            channel.close()
            child.kill()
            await asyncio.shield(asyncio.wrap_future(child.exited))
            child.release()
            raise
        channel.use(spec.codec.to_child, spec.codec.to_parent)
        peer = RpcPeer(channel, handle, expected, name=spec.name, numbers=numbers)
        return LocalProcess(spec, child, channel, peer, started)

    async def _handshake(self, spec: ProcessSpec, child: ChildProcess, channel: Channel) -> Any:
        """Tell the child what to serve, and wait until it does."""
        channel.send(child.head(spec))
        channel.send(spec.packed())
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                return read_first(spec.name, await channel.receive())
        except TimeoutError:
            raise late(spec, child) from None
        except ChannelClosed:
            raise await asyncio.to_thread(died, child, channel.problem) from None


def read_first(name: str, data: bytes) -> Any:
    """The value of a child's first message; its error, or RunError for what is no first message."""
    try:
        return read_started(data)
    except ConfigError:
        raise
    except TreadleError as error:
        kind = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
        raise RunError(f"{name}: {kind}{error}") from None
    except ValueError as error:
        raise RunError(f"{name} sent what is no answer while it started") from error


def late(spec: ProcessSpec, child: ChildProcess) -> DeadlineError:
    """The error of a child that did not start in time."""
    limit = f"{spec.start_timeout_key} = {spec.start_timeout_s:g}"
    return DeadlineError(f"{spec.name} did not start within {limit}{child.last_output()}")


def died(child: ChildProcess, problem: str | None) -> DiedWhileStarting:
    """The error of a child whose channel closed before its first message."""
    return DiedWhileStarting(f"{child.name} died while it started: {child.describe(problem)}", child.status())


class LocalProcess:
    """A `RemoteProcess` of this machine."""

    probe_s = PROBE_S

    def __init__(self, spec: ProcessSpec, child: ChildProcess, channel: Channel, peer: RpcPeer, started: Any) -> None:
        self.name, self.pid = child.name, child.pid
        self.started = started
        self._end_timeout_s = spec.end_timeout_s
        self.peer = peer
        self.child = child
        self._channel = channel
        self._serving = asyncio.ensure_future(peer.serve())
        self._serving.add_done_callback(self._kill_refused)

    @property
    def over(self) -> bool:
        return self._serving.done()

    @property
    def channel(self) -> Channel:
        """For what it sent that is no message."""
        return self._channel

    def _kill_refused(self, _: "asyncio.Future[None]") -> None:
        """Kill a process that sent something else than messages: code that is not ours has the channel."""
        if self._channel.problem is not None:
            self.child.kill()

    async def gone(self) -> str:
        await asyncio.shield(self._serving)
        return await self.cause()

    async def cause(self) -> str:
        return await asyncio.to_thread(self.child.describe, self._channel.problem)

    def probe(self) -> None:
        self.child.probe()

    def kill(self) -> str:
        self.child.kill()
        return self.child.where()

    async def end(self, timeout_s: float | None = None) -> None:
        self._channel.close()
        exited = asyncio.wrap_future(self.child.exited)
        await asyncio.wait({exited}, timeout=self._end_timeout_s if timeout_s is None else timeout_s)
        self.child.kill()
        await asyncio.wait({exited}, timeout=END_S)
        if not exited.done():
            log.warning("%s (pid %d) was killed, and was not gone after %g s", self.name, self.pid, END_S)
        await asyncio.wait({self._serving})
        await asyncio.to_thread(self.child.release)


class BlockingProcess:
    """A process of this machine, for threads: started by `BlockingLaunch`."""

    def __init__(self, child: ChildProcess, channel: BlockingChannel, started: Any) -> None:
        self.name, self.pid = child.name, child.pid
        self.started = started
        self.child = child
        self.peer = ThreadPeer(channel, child.name)

    def cause(self) -> str:
        """Why it is over; for when its peer has gone."""
        return self.child.describe(self.peer.problem)

    def kill(self) -> None:
        self.child.kill()

    def close_sending(self) -> None:
        """Let it see the end of its channel, and end in order."""
        self.peer.close_sending()

    def end(self, timeout_s: float = 0.0) -> None:
        """Give it so long to end in order, and kill what is left. Ending twice is harmless."""
        with suppress(TimeoutError):
            self.child.exited.result(timeout_s)
        self.child.kill()
        with suppress(TimeoutError):
            self.child.exited.result(END_S)
        self.peer.close()
        self.child.release()


@dataclass(slots=True)
class BlockingLaunch:
    """A process that is starting, for threads: several can start side by side, each waited for with `ready`."""

    spec: ProcessSpec
    child: ChildProcess
    channel: BlockingChannel

    @classmethod
    def begin(cls, spec: ProcessSpec) -> "BlockingLaunch":
        ours, theirs = socket.socketpair()
        with theirs:
            child = ChildProcess(spec, theirs)
        launch = cls(spec, child, BlockingChannel(ours, RAW, STARTED))
        with suppress(ChannelClosed):  # `ready` says how it died
            launch.channel.send(child.head(spec))
            launch.channel.send(spec.packed())
        return launch

    def ready(self, deadline: float | None = None) -> BlockingProcess:
        """The process once it serves; an error, and no process, where it does not by `deadline` (monotonic)."""
        timeout_s = self.spec.start_timeout_s if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            started = read_first(self.spec.name, self.channel.receive(timeout_s))
        except TimeoutError:
            error: Exception = late(self.spec, self.child)
        except ChannelClosed:
            error = died(self.child, self.channel.problem)
        except TreadleError as failed:
            error = failed
        else:
            self.channel.end.settimeout(None)
            channel = BlockingChannel(self.channel.end, self.spec.codec.to_child, self.spec.codec.to_parent)
            return BlockingProcess(self.child, channel, started)
        self.cancel()
        raise error

    def cancel(self) -> None:
        """Kill it, and wait until it is gone."""
        self.child.kill()
        self.channel.close()
        with suppress(TimeoutError):
            self.child.exited.result(END_S)
        self.child.release()
