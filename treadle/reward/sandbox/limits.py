"""Limits of a reward worker: CPU time, memory, and the processes a score starts.

Owns what the kernel enforces on a process that asks for it, and what the parent reads about a tree from outside.
Invariant: nothing here needs the function's help.
"""

import math
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from treadle.process.tree import adopt_orphans, kill_tree, list_children, list_tree

SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
MAX_ROUNDS = 100
MAX_OPEN_FILES = 256


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and everything below it have used: CPU seconds so far, and memory now, shared maps included."""

    cpu_time_s: float = 0.0
    memory_mb: float = 0.0
    processes: int = 0


def bound_memory(memory_mb: int) -> None:
    """Bound this process's private memory, its threads and its core dumps, and adopt what its children leave behind.

    RLIMIT_DATA counts memory that is really writable and private. RLIMIT_AS would also count address space that
    numeric libraries reserve and never use. Shared maps are the parent's to watch: `measure`.
    """
    for variable in SINGLE_THREADED:
        os.environ[variable] = "1"
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()


def bound_score(cpu_time_s: float, memory_mb: int) -> None:
    """Bound this process, which runs one score and ends: CPU time, address space beyond what it has, files.

    Address space counts every map, shared ones too. No file can grow, so none holds memory either.
    """
    seconds = math.ceil(cpu_time_s)
    _lower(resource.RLIMIT_CPU, seconds)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + (memory_mb << 20))
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _lower(resource.RLIMIT_CORE, 0)
    signal.setitimer(signal.ITIMER_PROF, cpu_time_s)  # finer than whole seconds, and what can be undone


def _lower(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


@contextmanager
def limit_cpu(cpu_time_s: float) -> Iterator[None]:
    """End this process when the code inside uses more CPU time, by the signal's default action.

    Code inside could undo it; the parent's watch would end it then.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_time_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def kill_leftovers(kept: set[int]) -> None:
    """Kill what a score started and left running: all children, adopted ones too, except those in `kept`."""
    for _ in range(MAX_ROUNDS):
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        strays = list_children(os.getpid()) - kept
        if not strays:
            return
        for stray in strays:
            kill_tree(stray)
            with suppress(ChildProcessError):
                os.waitpid(stray, 0)
    sys.exit("children come faster than they can be ended")


def measure(pid: int) -> Usage:
    """What `pid` and everything below it have used; zero where the system does not tell."""
    ticks, kilobytes = 0, 0
    tree = list_tree(pid)
    for member in tree:
        with suppress(OSError):  # it ended meanwhile
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # user and system time, its own and that of children it waited for
            for line in Path(f"/proc/{member}/status").read_text().splitlines():
                if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")):
                    kilobytes += int(line.split()[1])
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), kilobytes / 1024, len(tree))
