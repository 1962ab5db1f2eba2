"""A fence around code that evaluates model text: no new processes, no network, no writing, no native calls.

Owns the list of refused actions. They are seen through the interpreter's audit events, which Python code cannot take
away once they are on. It stops what a model is likely to write; it is no proof against code made to break out.
Invariant: refused actions raise PermissionError in the code that tried; reading files and importing stay possible.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

REFUSED = (
    "os.",
    "subprocess.",
    "pty.",
    "resource.",
    "signal.",
    "ctypes.",
    "socket.",
    "shutil.",
    "tempfile.",
    "sqlite3.",
)
HARMLESS = frozenset(("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr"))
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Fence:
    """The hook stays for the life of the process; `up` says whether it refuses anything just now."""

    def __init__(self) -> None:
        self.up = False
        self.built = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.up:
            return
        writes = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & WRITING)
        if writes or (event.startswith(REFUSED) and event not in HARMLESS):
            raise PermissionError(f"a reward function that evaluates model text may not do this: {event}")


_FENCE = _Fence()


@contextmanager
def fence(up: bool) -> Iterator[None]:
    """Refuse those actions inside, if `up`."""
    if up and not _FENCE.built:
        sys.addaudithook(_FENCE.hook)
        _FENCE.built = True
    _FENCE.up = up
    try:
        yield
    finally:
        _FENCE.up = False
