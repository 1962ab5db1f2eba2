"""Guard of a program that is not ours: a small process around it, which ends everything that it has started.

    guard.py PROGRAM ...               an MCP server: in the guard's process group, ended by the signals of its client
    guard.py --channel=FD PROGRAM ...  an agent program or a grader, in a session of its own; FD is a socket to the
                                       worker, and descriptors after a comma are held until all has ended

Owns what the program starts: on Linux orphans come to the guard, so that a process which has left its group and its
session (`setsid`, a daemon's double `fork`) is found too; elsewhere only the group is. Standard input, output and
error are the program's.
Invariant: where the worker is told a status, nothing that the program started is left (Linux). A guard that is killed
tells none.
Waits: for the program, and for the worker, which writes a byte to end it: TERM, and KILL `TERM_S` later. A worker that
is gone ends it with KILL at once.
Run by its path, without our package: it starts in milliseconds.
"""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

TERM_S = 2.0
"""Between TERM and KILL."""

KILL_S = 10.0
"""How long killed processes may take to end, and to be found, while they start others."""

ENDED, BROKEN, LEFT = "ended", "broken", "left"
"""The last word to a worker: with the exit status, with why nothing could be started, or with processes that are left.
The first is `STARTED`, with the program's id."""
STARTED = "started"

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_ON_LINUX = sys.platform == "linux"

_CHANGED_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""What Python or we handle otherwise than a program expects."""


class Guard:
    """One program and its descendants. Built where nothing has been started yet."""

    def __init__(self, environment: dict[bytes, bytes], *, own_session: bool) -> None:
        self._environment = environment
        self._own_session = own_session
        self._program = 0
        self.status: int | None = None
        """Of the program, negative for a signal, when it has ended."""
        self._woken, woken = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake)

    def start(self, command: list[str], tell: Callable[[int], None] = lambda _: None) -> None:
        """Start the program, which waits until `tell` has been given its process id; OSError where it cannot."""
        ready, go = os.pipe()
        failed, fail = os.pipe()
        self._program = os.fork()
        if self._program == 0:
            os.close(go)
            self._become(command, ready, fail)
        os.close(ready)
        os.close(fail)
        tell(self._program)
        with suppress(BrokenPipeError):
            os.write(go, b".")
        os.close(go)
        said = os.read(failed, 4096)  # nothing: it was closed when the program began
        os.close(failed)
        if said:
            raise OSError(said.decode())

    def _become(self, command: list[str], ready: int, fail: int) -> NoReturn:
        try:
            for number in _CHANGED_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            if self._own_session:
                os.setsid()
            if os.read(ready, 1):
                os.execvpe(command[0], command, self._environment)
        except OSError as error:
            os.write(fail, (error.strerror or str(error)).encode())
        finally:
            os._exit(127)

    def reap(self) -> bool:
        """Take the status of what has ended; whether there are children still, adopted ones among them."""
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if child == 0:
                return True
            if child == self._program:
                self.status = os.waitstatus_to_exitcode(status)

    def wait(self, channel: socket.socket | None, timeout_s: float | None = None) -> bytes | None:
        """Until a child ends, a signal comes, or the worker says something: what it says, b"" if it is gone."""
        watched: list[int | socket.socket] = [self._woken] if channel is None else [self._woken, channel]
        heard, _, _ = select.select(watched, [], [], timeout_s)
        if self._woken in heard:
            os.read(self._woken, 4096)
        if channel is None or channel not in heard:
            return None
        try:
            return channel.recv(1)
        except OSError:
            return b""

    def end(self, channel: socket.socket | None, term_s: float) -> bool:
        """TERM and, after a while, KILL for everything that is left; whether all of it has ended."""
        deadline = time.monotonic() + term_s
        if term_s and self._lives():
            self._signal(signal.SIGTERM)
            while self._lives() and (left := deadline - time.monotonic()) > 0:
                if self.wait(channel, min(left, 0.05)) == b"":
                    break
        deadline = time.monotonic() + KILL_S
        while self._lives() and time.monotonic() < deadline:
            self._signal(signal.SIGKILL)
            self.wait(None, 0.01)
        return not self._lives()

    def _lives(self) -> bool:
        """Whether anything is left: a child on Linux, where orphans are children; else a member of the group."""
        has_children = self.reap()
        if _ON_LINUX or not self._own_session:
            return has_children
        try:
            os.killpg(self._program, 0)
        except (ProcessLookupError, PermissionError):
            return has_children
        return True

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            if self._own_session and (self.status is None or not _ON_LINUX):
                os.killpg(self._program, number)
        for child in _list_children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, number)


def _wake(number: int, frame: FrameType | None) -> None:
    """A signal that `Guard.wait` hears of."""


def _list_children() -> list[int]:
    """Direct children, adopted ones too; none where the system does not tell."""
    pid = os.getpid()
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as listing:
            return [int(child) for child in listing.read().split()]
    except OSError:
        return []


def _read_environment() -> dict[bytes, bytes]:
    """What this process was started with: Python adds a locale to what it finds, which the program is not to see."""
    try:
        with open("/proc/self/environ", "rb") as listing:
            entries = (entry.partition(b"=") for entry in listing.read().split(b"\0") if b"=" in entry)
            return {name: value for name, _, value in entries}
    except OSError:
        return dict(os.environb)


def guard_program(channel: socket.socket, command: list[str]) -> None:
    """Run an agent program to its end, or until the worker wants it to end; then tell how it ended."""
    guard, stopped = Guard(_read_environment(), own_session=True), list[bool]()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.append(True))
    _adopt_orphans(_PR_SET_DUMPABLE)  # else a program of the same user could take over this process, and answer for it
    try:
        guard.start(command, lambda program: _tell(channel, STARTED, str(program)))
    except OSError as error:
        _tell(channel, BROKEN, str(error))
        return
    heard: bytes | None = None
    while guard.reap() and guard.status is None and heard is None and not stopped:
        heard = guard.wait(channel)
    if not guard.end(channel, 0.0 if heard == b"" else TERM_S):
        _tell(channel, LEFT, " ".join(map(str, _list_children())))
    elif guard.status is not None:
        _tell(channel, ENDED, str(guard.status))


def _tell(channel: socket.socket, word: str, more: str) -> None:
    with suppress(OSError):  # the worker is gone
        channel.sendall(f"{word} {more}\n".encode())


def guard_server(command: list[str]) -> int:
    """Run an MCP server as a member of this group, to its end and that of the group."""
    guard = Guard(_read_environment(), own_session=False)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, _wake)  # the server has this signal too, and may end in order
    parent, orphaned = os.getppid(), list[bool]()
    signal.signal(signal.SIGUSR1, lambda *_: orphaned.append(True))
    _adopt_orphans(_PR_SET_PDEATHSIG)
    if os.getppid() == parent:  # else it has ended before we asked to hear of it
        try:
            guard.start(command)
        except OSError as error:
            sys.stderr.write(f"{command[0]}: {error}\n")
            return 127
    while guard.reap() and guard.status is None and not orphaned:
        guard.wait(None)
    guard.end(None, 0.0)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    return 0


def _adopt_orphans(*options: int) -> None:
    if _ON_LINUX:
        import ctypes

        libc = ctypes.CDLL(None)
        values = {_PR_SET_PDEATHSIG: signal.SIGUSR1, _PR_SET_DUMPABLE: 0, _PR_SET_CHILD_SUBREAPER: 1}
        for option in (*options, _PR_SET_CHILD_SUBREAPER):
            libc.prctl(option, int(values[option]), 0, 0, 0)


def main(arguments: list[str]) -> int:
    if not arguments[0].startswith("--channel="):
        return guard_server(arguments)
    given, *held = map(int, arguments[0].partition("=")[2].split(","))
    for descriptor in held:
        os.set_inheritable(descriptor, False)
    with socket.socket(fileno=os.dup(given)) as channel:  # of a low number, which `select` takes, and not inherited
        os.close(given)
        guard_program(channel, arguments[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
