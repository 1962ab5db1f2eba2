"""Launcher of processes on this machine: started, watched, ended; with an asyncio end or a blocking one.

Owns a child's environment, its lifeline, its output and what its end means. A child leads a session of its own: Ctrl-C
does not reach it, and what it started is killed with it. `Launcher` is what a cluster implements, too.
Waits: a launch waits for the child's first message, until a deadline; one thread for each child waits for its exit.
Invariant: a launch returns a process that serves, or raises and leaves none; after `end` nothing of the tree is left.
When this process dies, by SIGKILL too, the kernel kills the children that have a lifeline.
"""

import asyncio
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import IO, Any, Protocol

from treadle.aio import is_user_file
from treadle.errors import ConfigError, DeadlineError, RunError, TreadleError
from treadle.exit_status import describe_exit
from treadle.process.channel import PICKLES, RAW, BlockingChannel, Channel, ChannelClosed, ChannelCodec
from treadle.process.main import STARTED, ChildHead, read_started
from treadle.process.rpc import Handler, RpcPeer, ThreadPeer
from treadle.process.tree import kill_group, kill_tree
from treadle.terminal import printable, warn

log = logging.getLogger(__name__)

END_S = 5.0
"""How long a killed process may take to be gone."""

_OUTPUT_S = 0.5
"""How long what it printed may take to be read, where something that it started still holds its output open."""

_KEPT_LINES = 20
_SHOWN_LINES = 5
_SHOWN_CHARS = 400
_CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
_FRAME = re.compile(r'File "(.+)", line (\d+) in ')


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to be started."""

    name: str
    """In errors, reports and `ps`."""
    serve: str
    """`module:function`, called as `serve(parent, setup)` over there."""
    setup: Any
    """Travels as a pickle."""
    start_timeout_s: float
    start_timeout_key: str = "launch_timeout_s"
    """The config key that says how long."""
    codec: ChannelCodec = PICKLES
    environment: Mapping[str, str] | None = None
    """All of it; None: that of this process."""
    end_timeout_s: float = 0.0
    """How long it may take to end in order, once its channel is closed."""
    kill_with_parent: bool = True
    """By the kernel, at once. Without it the process sees its channel close, and ends in order."""
    reap: bool = False
    """It adopts what its descendants leave behind, and kills that at its end."""
    trace: bool = False
    """`probe` has it write down where its threads are."""
    output: Callable[[bytes], None] | None = None
    """Takes what it prints, from a thread of its own; empty at the end. None: standard error is passed on, line by
    line, and standard output is that of this process."""
    quiet: bool = False
    """Standard error goes to the log alone, and standard output nowhere."""


class DiedWhileStarting(RunError):
    """The process ended before its first message. `status`: its exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


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


class ChildOutput:
    """Standard error of a child: passed on line by line, logged, and the last lines kept."""

    def __init__(self, name: str, quiet: bool) -> None:
        self._name, self._quiet = name, quiet
        self._rest = b""
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def __call__(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > 1 << 16):
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            if not self._quiet:
                warn(text)
            log.debug("%s: %s", self._name, printable(text))

    def last_lines(self) -> str:
        """As the end of a sentence; empty where there are none."""
        text = " | ".join([line.strip() for line in self._lines if line.strip()][-_SHOWN_LINES:])[-_SHOWN_CHARS:]
        return f"; its last words: {text}" if text else ""


class ChildProcess:
    """A process of this machine, without its channel: its exit, its output, its end."""

    def __init__(self, spec: ProcessSpec, end: socket.socket) -> None:
        """Start it, with `end` as its end of the channel."""
        self.name = spec.name
        self.exited: Future[int] = Future()
        """Its exit status."""
        self._output = spec.output or ChildOutput(spec.name, spec.quiet)
        self._killed = False
        self._exit: str | None = None
        self._trace: IO[bytes] | None = tempfile.TemporaryFile(buffering=0) if spec.trace else None  # noqa: SIM115
        theirs, self._lifeline = os.pipe() if spec.kill_with_parent else (-1, -1)
        passed = [end.fileno(), *([theirs] if theirs >= 0 else []), *([self._trace.fileno()] if self._trace else [])]
        stdout: int | None = None
        if spec.output is not None:
            stdout = subprocess.PIPE
        elif spec.quiet:
            stdout = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "treadle.process", str(end.fileno()), str(theirs), spec.name),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT if spec.output is not None else subprocess.PIPE,
                pass_fds=passed,
                start_new_session=True,
                env=spec.environment,
            )
        except BaseException:
            self._close_lifeline()
            raise
        finally:
            if theirs >= 0:
                os.close(theirs)
        self.pid = self._process.pid
        self._reading = self._start_thread(self._read)
        self._start_thread(self._wait)

    def head(self, spec: ProcessSpec) -> bytes:
        """What it is told first."""
        trace = -1 if self._trace is None else self._trace.fileno()
        return ChildHead(list(sys.path), spec.name, spec.serve, spec.reap, trace).to_json()

    @property
    def killed(self) -> bool:
        """Whether it was killed from here."""
        return self._killed

    def kill(self) -> None:
        """Kill its whole tree now."""
        self._killed = True
        if not self.exited.done():
            kill_tree(self.pid)

    def describe(self) -> str:
        """How it ended. Once it has."""
        if self._exit is None:
            status = self.exited.result()
            self._reading.join(_OUTPUT_S)
            crashed = status > 0 or -status in _CRASHES
            words = self._output.last_lines() if crashed and isinstance(self._output, ChildOutput) else ""
            self._exit = f"{describe_exit(status)}{words}"
        return self._exit

    def last_words(self) -> str:
        """What it printed last, as the end of a sentence."""
        return self._output.last_lines() if isinstance(self._output, ChildOutput) else ""

    def probe(self) -> None:
        """Python's fault handler writes where every thread is, also while one of them holds the interpreter."""
        if not self.exited.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def where(self) -> str:
        """The user's lines that it was at when it was probed, as the end of a sentence."""
        if self._trace is None or self._trace.closed:
            return ""
        self._trace.seek(0)
        found = _FRAME.findall(self._trace.read().decode(errors="replace"))
        places = dict.fromkeys(f"{file}:{line}" for file, line in found if is_user_file(file))
        return f" ({', '.join(list(places)[:3])})" if places else ""

    def release(self) -> None:
        """Once it has exited: let go of what is kept for it."""
        self._reading.join(_OUTPUT_S)
        if self._trace is not None:
            self._trace.close()

    def _start_thread(self, target: Callable[[], None]) -> Thread:
        thread = Thread(target=target, name=self.name, daemon=True)
        thread.start()
        return thread

    def _read(self) -> None:
        stream = self._process.stdout or self._process.stderr
        assert stream is not None
        with stream:
            while data := os.read(stream.fileno(), 1 << 16):
                self._output(data)
        self._output(b"")

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        kill_group(self.pid)  # what it left there; before its number can be given away
        status = self._process.wait()
        self._close_lifeline()
        self.exited.set_result(status)

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)


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
            started = await self._meet(spec, child, channel)
        except BaseException:
            channel.close()
            child.kill()
            await asyncio.shield(asyncio.wrap_future(child.exited))
            child.release()
            raise
        channel.use(spec.codec.to_child, spec.codec.to_parent)
        peer = RpcPeer(channel, handle, expected, name=spec.name, numbers=numbers)
        return LocalProcess(spec, child, channel, peer, started)

    async def _meet(self, spec: ProcessSpec, child: ChildProcess, channel: Channel) -> Any:
        """Tell the child what to serve, and wait until it does."""
        channel.send(child.head(spec))
        channel.send(pickle.dumps((spec.setup, spec.codec), pickle.HIGHEST_PROTOCOL))
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                return read_first(spec.name, await channel.receive())
        except TimeoutError:
            raise late(spec, child) from None
        except ChannelClosed:
            if channel.problem is not None:
                child.kill()
            status = await asyncio.wrap_future(child.exited)
            raise DiedWhileStarting(f"{spec.name} died while it started: {child.describe()}", status) from None


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
    return DeadlineError(f"{spec.name} did not start within {limit}{child.last_words()}")


class LocalProcess:
    """A `RemoteProcess` of this machine."""

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
        if self._channel.problem is not None:
            return f"killed, because it sent what is no message ({self._channel.problem})"
        await asyncio.shield(asyncio.wrap_future(self.child.exited))
        return await asyncio.to_thread(self.child.describe)

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
    """A process of this machine, for threads: started by `launch_blocking`."""

    def __init__(self, child: ChildProcess, channel: BlockingChannel, started: Any) -> None:
        self.name, self.pid = child.name, child.pid
        self.started = started
        self.child = child
        self.peer = ThreadPeer(channel, child.name)

    def cause(self) -> str:
        """Why it is over; for when its peer has gone."""
        if self.peer.problem is not None:
            self.child.kill()
            return f"killed, because it sent what is no message ({self.peer.problem})"
        self.child.exited.result()
        return self.child.describe()

    def kill(self) -> None:
        self.child.kill()

    def hang_up(self) -> None:
        """Let it see the end of its channel, and end in order."""
        self.peer.hang_up()

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
            launch.channel.send(pickle.dumps((spec.setup, spec.codec), pickle.HIGHEST_PROTOCOL))
        return launch

    def ready(self, deadline: float | None = None) -> BlockingProcess:
        """The process once it serves; an error, and no process, where it does not by `deadline` (monotonic)."""
        timeout_s = self.spec.start_timeout_s if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            started = read_first(self.spec.name, self.channel.receive(timeout_s))
        except TimeoutError:
            error: Exception = late(self.spec, self.child)
        except ChannelClosed:
            status = self.child.exited.result()
            error = DiedWhileStarting(f"{self.spec.name} died while it started: {self.child.describe()}", status)
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
