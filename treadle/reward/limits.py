"""What a worker process does to itself before and around a score.

Owns the limits that the kernel enforces: memory, CPU time, the end of the parent. The wall clock is the parent's.
Invariant: nothing here needs the function's help; code that never returns to Python is ended all the same.
"""

import ctypes
import fcntl
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from treadle.reward.kin import kill_tree, list_children

PR_SET_CHILD_SUBREAPER = 36
SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
MAX_ROUNDS = 100


def confine(memory_mb: int) -> None:
    """Bound this process's memory, its threads and its core dumps, and adopt what its children leave behind.

    RLIMIT_DATA counts memory that is really writable and private. RLIMIT_AS would also count address space that
    numeric libraries reserve and never use.
    """
    for variable in SINGLE_THREADED:
        os.environ[variable] = "1"
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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


@contextmanager
def limit_cpu(cpu_time_s: float) -> Iterator[None]:
    """End this process when the code inside uses more CPU time: the signal's default action, so nothing can hold it."""
    signal.setitimer(signal.ITIMER_PROF, cpu_time_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def end_strays(kept: set[int]) -> None:
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
