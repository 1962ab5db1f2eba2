"""Source tree: the syntax tree of Python source, in a process whose other threads may be reading source as well.

CPython counts the depth of all trees that are being made in one place: where two threads make one each, either may end
with a SystemError that says nothing about its source, and the same source is read well a moment later.
"""

import ast
import threading

_LOCK = threading.Lock()
"""For our own threads; those of other packages do not know it."""
_TRIES = 5


def parse_source(source: str | bytes) -> ast.Module:
    """The tree; SyntaxError or ValueError where it is no Python."""
    with _LOCK:
        for _ in range(_TRIES - 1):
            try:
                return ast.parse(source)
            except SystemError:
                continue
        return ast.parse(source)
