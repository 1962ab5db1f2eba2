"""Interrupt watcher: a small process that kills this one when code in it holds the interpreter and Ctrl-C is not heard.

A Python signal handler needs the interpreter; a regular expression that backtracks for ever keeps it. Python's C code
writes the number of each signal to a socket all the same (`signal.set_wakeup_fd`), and the watcher reads it:

    the third SIGINT             the second one that was heard restores the system's own handling, so a third is seen
                                 here only where the others were not
    SIGTERM, SIGHUP              and the process still there `grace_s` later

Owns that process, for as long as a `watched_interrupts` block. The file is run by its path and imports nothing of ours.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

MARGIN_S = 15.0
"""After the grace, for the process to end by itself."""
LAST_INTERRUPT = 3
_OURS = b"\0"
"""Sent before a SIGINT that the process sends to itself, which is none of the user's."""

_socket: "socket.socket | None" = None


@contextmanager
def watched_interrupts(grace_s: float | None = None) -> Iterator[None]:
    """Have this process killed where it does not hear its signals. Of the main thread, and not within another."""
    import socket  # not before they are needed: the command's help does without
    import subprocess

    global _socket
    if _socket is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
        if before != -1:  # of an event loop in this thread, which needs it
            signal.set_wakeup_fd(before)
            yield
            return
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), "" if grace_s is None else str(grace_s)]
        try:
            process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
            _socket = ours
            try:
                yield
            finally:
                _socket = None
                process.kill()
                process.wait()
        finally:
            signal.set_wakeup_fd(-1)


def discount_interrupt() -> None:
    """Call before this process sends itself a SIGINT: the user has not asked once more."""
    if _socket is not None:
        with suppress(OSError):
            _socket.send(_OURS)


def _watch(pid: int, grace_s: float | None) -> None:
    """Read signals until the other end closes, as it does when the process ends."""
    interrupts, deadline = 0, None
    while True:
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([0], [], [], wait_s)[0]:
            return _kill(pid, f"still here {grace_s:g} s after the signal to end")
        read = os.read(0, 1024)
        if not read:
            return None
        for number in read:
            interrupts += (number == signal.SIGINT) - (number == _OURS[0])
            if number in (signal.SIGTERM, signal.SIGHUP) and deadline is None and grace_s is not None:
                deadline = time.monotonic() + grace_s + MARGIN_S
        if interrupts >= LAST_INTERRUPT:
            return _kill(pid, f"{interrupts} interrupts were not heard")


def _kill(pid: int, reason: str) -> None:
    fix = "code of yours in this process holds Python's interpreter: rollout.agent.num_workers=1 runs it in another"
    with suppress(OSError):
        os.write(2, f"killed: {reason}; {fix}. The same command goes on from what is saved\n".encode())
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), float(sys.argv[2]) if sys.argv[2] else None)
