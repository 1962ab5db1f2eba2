"""Reaper: ends what a killed process leaves behind. `python -m treadle.cluster.ray.reaper`, never by hand.

Most processes end with the one that started them, but some take their time: two helpers of Ray notice a minute later,
and an engine's server holds the memory that its replacement needs. The reaper holds on to them from the start, so that
no other process can be mistaken for them. What is started later, by tools of an agent worker, carries a mark in its
environment. It waits for the process that it follows to end, or to close its end of a pipe. Linux only.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from treadle.process.tree import MARK, kill_marked, list_tree


@contextmanager
def reaping(pids: Sequence[int], mark: str = "") -> Iterator[None]:
    """Inside, these processes end soon after this one, however it ends; and with the block.

    So does what has `mark` in its environment, as the value of MARK.
    """
    if not (pids or mark) or not hasattr(os, "pidfd_open"):
        yield
        return
    theirs, ours = os.pipe()
    words = (theirs, os.getpid(), mark, *pids)
    reaper = subprocess.Popen(
        (sys.executable, "-m", "treadle.cluster.ray.reaper", *map(str, words)),
        pass_fds=[theirs],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != MARK},
    )
    os.close(theirs)
    try:
        yield
    finally:
        os.close(ours)
        reaper.wait()


def descendants(pid: int) -> list[int]:
    """Every process below one."""
    return list_tree(pid)[1:]


def reap(pipe: int, followed: int, mark: str, pids: Sequence[int]) -> None:
    """Wait until `followed` has ended or closed the pipe, then end these processes and those with the mark."""
    held = []
    for pid in pids:
        with suppress(ProcessLookupError):
            held.append(os.pidfd_open(pid))
    with suppress(ProcessLookupError):  # what it forked without a mark may hold the pipe open
        waiting = select.poll()  # `select` takes no descriptor from 1,024 on
        for descriptor in (pipe, os.pidfd_open(followed)):
            waiting.register(descriptor, select.POLLIN)
        waiting.poll()
    for process in held:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    if mark:
        kill_marked(MARK, mark)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reap(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], [int(word) for word in sys.argv[4:]])
