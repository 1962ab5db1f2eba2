"""Reaper: ends what a killed process leaves behind. `python -m treadle.cluster.ray.reaper FD PID …`, never by hand.

Most processes end with the one that started them, but some take their time: two helpers of Ray notice a minute later,
and an engine's server holds the memory that its replacement needs. The reaper holds on to them from the start, so that
no other process can be mistaken for them, and waits for the other end of a pipe to close. Linux only.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from treadle.process.tree import list_tree


@contextmanager
def reaping(pids: Sequence[int]) -> Iterator[None]:
    """Inside, these processes end soon after this one, however it ends; and with the block."""
    if not pids or not hasattr(os, "pidfd_open"):
        yield
        return
    theirs, ours = os.pipe()
    command = (sys.executable, "-m", "treadle.cluster.ray.reaper", str(theirs), *map(str, pids))
    reaper = subprocess.Popen(command, pass_fds=[theirs], stdin=subprocess.DEVNULL, start_new_session=True)
    os.close(theirs)
    try:
        yield
    finally:
        os.close(ours)
        reaper.wait()


def descendants(pid: int) -> list[int]:
    """Every process below one."""
    return list_tree(pid)[1:]


def reap(pipe: int, pids: Sequence[int]) -> None:
    """Wait for the driver to go, then end these processes."""
    held = []
    for pid in pids:
        with suppress(ProcessLookupError):
            held.append(os.pidfd_open(pid))
    os.read(pipe, 1)
    for process in held:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reap(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
