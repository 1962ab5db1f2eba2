"""The processes a process has started, and how to end them.

Owns reading the process tree and killing it. Used by the parent on its workers, and by a worker on what a score left.
Invariant: only ever signals descendants of a process that the caller started, and that process's own group.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path


def list_children(pid: int) -> set[int]:
    """Direct children of `pid`; empty where it is gone, or where the system does not tell."""
    children: set[int] = set()
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread ended meanwhile
            children.update(map(int, listing.read_text().split()))
    return children


def cpu_time_s(pid: int) -> float:
    """CPU time of `pid` and everything below it so far; 0 where the system does not tell."""
    ticks = 0
    for member in _list_tree(pid):
        with suppress(OSError):  # it ended meanwhile
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # user and system time, its own and that of children it waited for
    return ticks / os.sysconf("SC_CLK_TCK")


def kill_tree(pid: int) -> None:
    """Kill `pid` and everything below it, with the process groups they lead, in sessions of their own too."""
    for member in _list_tree(pid):
        kill_group(member)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads or led; safe when `pid` itself is gone and its number given away."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _list_tree(pid: int) -> list[int]:
    """All of it before the first dies: a dead parent no longer knows its children."""
    return [pid, *(member for child in list_children(pid) for member in _list_tree(child))]
