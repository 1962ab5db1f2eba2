"""Left children: what tools and loops started in the process of a command, and did not end, ends with it.

Workers do the same for what runs in them. For commands alone: a Python program that calls treadle has children of its
own, and so may a shell that became this process; those that were there before are spared.
"""

import atexit
import os
import sys
from collections.abc import Callable

from treadle.process.tree import adopt_orphans, kill_children, list_children


def end_children_with_us() -> Callable[[], None]:
    """Adopt what children leave behind, and kill all of it as the last thing of this process; returns what does it."""
    before, us = list_children(os.getpid()), os.getpid()

    def end() -> None:
        if os.getpid() == us:  # a process that was forked from here may end, too
            kill_children(spare=before | _helpers())

    adopt_orphans()
    atexit.register(end)  # the first to be registered is the last to be called: packages end theirs in order
    return end


def _helpers() -> set[int]:
    """The process in which Python keeps what is shared, and which ends by itself: it cleans up after all others."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    pid = tracker._resource_tracker._pid if tracker is not None else None
    return set() if pid is None else {pid}
