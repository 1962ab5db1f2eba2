"""Process trees: list one, kill one, adopt what it leaves behind, end with the parent.

Invariant: only descendants of a process that the caller started, that process's own group, and what inherited its mark
are ever signalled.
"""

import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

MARK = "TREADLE_PROCESS"
"""A variable that leads from what a process started to that process."""

_PR_SET_CHILD_SUBREAPER = 36


def list_children(pid: int) -> set[int]:
    """Direct children of `pid`; empty where it is gone, or where the system does not tell."""
    children: set[int] = set()
    threads: list[str] = []
    with suppress(OSError):  # it is gone
        threads = os.listdir(f"/proc/{pid}/task")
    for thread in threads:
        with suppress(OSError):  # the thread ended meanwhile
            children.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return children


def list_tree(pid: int) -> list[int]:
    """`pid` and everything below it, each after its parent. A tool's chain of children may be longer than our stack."""
    members, known = [pid], {pid}
    for member in members:  # which grows meanwhile
        found = list_children(member) - known
        members += found
        known |= found
    return members


def kill_tree(pid: int) -> None:
    """Kill `pid` and everything below it, with the process groups they lead, in sessions of their own too."""
    for member in list_tree(pid):  # all of it before the first dies: a dead parent no longer knows its children
        kill_group(member)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads or led; safe when `pid` itself is gone and its number given away."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_marked(variable: str, value: str) -> None:
    """Kill every process that started with this in its environment, whichever its parent is now; Linux only.

    For what a process started in a session of its own before it died: nothing else leads there any more.
    """
    mark = f"{variable}={value}".encode()
    for listing in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it ended meanwhile, or is not ours
            if mark in listing.read_bytes().split(b"\0"):
                os.kill(int(listing.parent.name), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of what descendants leave behind, so that it can be found; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_children(spare: Set[int] = frozenset(), limit_s: float = 10.0) -> None:
    """Kill every child of this process with its tree, adopted ones too, and wait for them; `spare` lives on.

    One that cannot be killed, as another user's, is left behind after `limit_s`.
    """
    deadline = monotonic() + limit_s
    while (children := list_children(os.getpid()) - spare) and monotonic() < deadline:
        for child in children:
            kill_tree(child)
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        sleep(0.005)


def die_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process group when the parent's end of the pipe `lifeline` closes.

    A death signal tied to the parent process would fire when the thread that started us ends, and miss our children.
    """
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        with suppress(BlockingIOError):  # a parent that died before this point shows as end of file
            if os.read(lifeline, 1) == b"":
                kill_tree(os.getpid())
    else:
        Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: int) -> None:
    """Where the kernel does not do it: wait for the end of the pipe, then end this process."""
    while os.read(lifeline, 1):
        continue
    os._exit(1)
