"""Processes of this machine, as /proc lists them."""

from collections.abc import Iterator
from pathlib import Path


def children(pid: int) -> Iterator[tuple[int, str]]:
    """The processes that a process started, and their command lines."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(tasks).split():
            yield int(child), _read(Path(f"/proc/{child}/cmdline")).replace("\0", " ")


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """All that is below a process, with command lines."""
    for child, words in children(pid):
        yield child, words
        yield from descendants(child)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be collected does not."""
    status = _read(Path(f"/proc/{pid}/stat"))
    return bool(status) and status.rpartition(")")[2].split()[0] != "Z"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # the process has gone
