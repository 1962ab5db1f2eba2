"""Handle of a child process on this machine, in its parent: environment, output, exit. Its channel is elsewhere.

Owns the lifeline by which the kernel ends a child with its parent, what the child printed last, and what its exit
status means. A child leads a session of its own: Ctrl-C does not reach it, and what it started is killed with it.
Waits: one thread for each child waits for its exit, and one for each of its outputs reads that.
"""

import json
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import IO, Any
from uuid import uuid4

from treadle.aio import is_user_file
from treadle.errors import RunError
from treadle.exit_status import describe_exit
from treadle.process.channel import PICKLES, ChannelCodec
from treadle.process.child_main import ChildHead
from treadle.process.tree import MARK, kill_group, kill_marked, kill_tree
from treadle.terminal import printable, say, warn

log = logging.getLogger(__name__)

END_S = 5.0
"""How long a process may take to be gone, once it was killed or has closed its channel."""

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
    """It adopts what its descendants leave behind, and kills that at its end; where it is killed itself, its parent
    does."""
    max_stall_s: float = 0.0
    """It ends where its event loop has not run for so long: what holds its interpreter also keeps it from seeing its
    parent go. 0: never."""
    trace: bool = False
    """`probe` has it write down where its threads are."""
    output: Callable[[bytes], None] | None = None
    """Takes what it prints, from a thread of its own; empty at the end. None: both outputs are passed on to those of
    this process, line by line, with control characters written out."""
    quiet: bool = False
    """Standard error goes to the log alone, and standard output nowhere."""
    command: tuple[str, ...] = ()
    """Program in the place of `python -m treadle.process`, such as another interpreter; its setup travels as JSON."""

    def packed(self) -> bytes:
        """Setup and codec, as they travel."""
        if self.command:
            return json.dumps(self.setup).encode()
        return pickle.dumps((self.setup, self.codec), pickle.HIGHEST_PROTOCOL)


class DiedWhileStarting(RunError):
    """The process ended before its first message. `status`: its exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ChildOutput:
    """One output of a child: passed on line by line, logged, and the last lines kept."""

    def __init__(self, name: str, show: Callable[[str], None] | None) -> None:
        """`show`: where lines go beside the log."""
        self._name, self._show = name, show
        self._rest = b""
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def __call__(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > 1 << 16):
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            if self._show is not None:
                with suppress(OSError, ValueError):  # what reads it has gone; the child goes on all the same
                    self._show(text)
            log.debug("%s: %s", self._name, printable(text))

    def last_lines(self) -> str:
        """As the end of a sentence; empty where there are none."""
        text = " | ".join([line.strip() for line in self._lines if line.strip()][-_SHOWN_LINES:])[-_SHOWN_CHARS:]
        return f"; its last output: {text}" if text else ""


class ChildProcess:
    """A process of this machine, without its channel: its exit, its output, its end."""

    def __init__(self, spec: ProcessSpec, end: socket.socket) -> None:
        """Start it, with `end` as its end of the channel."""
        self.name = spec.name
        self.exited: Future[int] = Future()
        """Its exit status."""
        self._output = spec.output or ChildOutput(spec.name, None if spec.quiet else warn)
        self._killed = False
        self._mark = {MARK: uuid4().hex} if spec.reap else {}
        """In its environment and in that of all that it starts."""
        self._end: str | None = None
        self._trace: IO[bytes] | None = tempfile.TemporaryFile(buffering=0) if spec.trace else None  # noqa: SIM115
        theirs, self._lifeline = os.pipe() if spec.kill_with_parent else (-1, -1)
        passed = [end.fileno(), *([theirs] if theirs >= 0 else []), *([self._trace.fileno()] if self._trace else [])]
        words = (end.fileno(), theirs, spec.name)
        try:
            self._process = subprocess.Popen(
                (*(spec.command or (sys.executable, "-m", "treadle.process")), *map(str, words)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if spec.output is None and spec.quiet else subprocess.PIPE,
                stderr=subprocess.STDOUT if spec.output is not None else subprocess.PIPE,
                pass_fds=passed,
                start_new_session=True,
                env={**(os.environ if spec.environment is None else spec.environment), **self._mark},
            )
        except BaseException:
            self._close_lifeline()
            raise
        finally:
            if theirs >= 0:
                os.close(theirs)
        self.pid = self._process.pid
        self._reading = [self._start_thread(partial(_read, *output)) for output in self._outputs()]
        self._start_thread(self._wait)

    def head(self, spec: ProcessSpec) -> bytes:
        """What it is told first."""
        trace = -1 if self._trace is None else self._trace.fileno()
        return ChildHead(list(sys.path), spec.name, spec.serve, spec.reap, trace, spec.max_stall_s).to_json()

    @property
    def killed(self) -> bool:
        """Whether it was killed from here."""
        return self._killed

    def kill(self) -> None:
        """Kill its whole tree now."""
        self._killed = True
        if not self.exited.done():
            kill_tree(self.pid)

    def describe(self, problem: str | None = None) -> str:
        """How it ended, once its channel has closed. It is killed where it sent `problem`, or goes on without one."""
        if self._end is None:
            if problem is not None:
                self.kill()
                self._end = f"killed, because it sent what is no message ({problem})"
            elif not self._is_gone() and not self._killed:
                self.kill()
                self._end = "killed, because it closed its channel and went on"
            else:
                self._end = self._describe_exit()
        return self._end

    def status(self) -> int:
        """Its exit status, once it has ended or was killed."""
        return self.exited.result() if self._is_gone() else -signal.SIGKILL

    def _is_gone(self) -> bool:
        with suppress(TimeoutError):
            self.exited.result(END_S)
        return self.exited.done()

    def _describe_exit(self) -> str:
        status = self.status()
        self._join_readers()
        crashed = status > 0 or -status in _CRASHES
        return f"{describe_exit(status)}{self.last_output() if crashed else ''}"

    def last_output(self) -> str:
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
        return describe_trace(self._trace.read())

    def release(self) -> None:
        """Once it has exited: let go of what is kept for it."""
        self._join_readers()
        if self._trace is not None:
            self._trace.close()

    def _start_thread(self, target: Callable[[], None]) -> Thread:
        thread = Thread(target=target, name=self.name, daemon=True)
        thread.start()
        return thread

    def _outputs(self) -> Iterator[tuple[IO[bytes], Callable[[bytes], None]]]:
        """Each of its outputs, and what takes it."""
        stdout, stderr = self._process.stdout, self._process.stderr
        if stderr is not None:
            yield stderr, self._output
        if stdout is not None:
            yield stdout, self._output if stderr is None else ChildOutput(self.name, say)

    def _join_readers(self) -> None:
        for thread in self._reading:
            thread.join(_OUTPUT_S)

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        kill_group(self.pid)  # what it left there; before its number can be given away
        for variable, value in self._mark.items():
            kill_marked(variable, value)
        status = self._process.wait()
        self._close_lifeline()
        self.exited.set_result(status)

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)


def describe_trace(trace: bytes) -> str:
    """The user's lines in the stack traces of all threads, as the end of a sentence."""
    found = _FRAME.findall(trace.decode(errors="replace"))
    places = dict.fromkeys(f"{file}:{line}" for file, line in found if is_user_file(file))
    return f" ({', '.join(list(places)[:3])})" if places else ""


def _read(stream: IO[bytes], take: Callable[[bytes], None]) -> None:
    with stream:
        while data := os.read(stream.fileno(), 1 << 16):
            take(data)
    take(b"")
