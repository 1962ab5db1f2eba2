"""Disk errors in words: what keeps a file from being written, and what to do about it.

Owns the meaning of ENOSPC, EDQUOT, EFBIG, EROFS and EIO, whichever library met them: Python's own calls, SQLite, or
safetensors, whose errors hold the number as text. Knows nothing of what was being written.
"""

import os
import re
import shutil
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from errno import EDQUOT, EFBIG, EIO, ENOSPC, EROFS
from pathlib import Path
from typing import Final

_NUMBER = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]|(No space left on device)")
_PROBE = b"\0" * 4096
_GROWTH = 1 << 16
"""By as much as SQLite's files grow at once, at most."""
_SQLITE: Final = {sqlite3.SQLITE_FULL: ENOSPC, sqlite3.SQLITE_READONLY: EROFS, sqlite3.SQLITE_IOERR: EIO}


@dataclass(frozen=True, slots=True)
class DiskError:
    """Why a file cannot be written."""

    problem: str
    fix: str
    """What to do, as the beginning of "… and start again"."""


def explain_disk_error(error: BaseException, path: Path) -> DiskError | None:
    """What an error says about the disk that `path` is on; None where it is about something else."""
    number = _number(error, path)
    if number == ENOSPC:
        return DiskError(f"no space left on the disk ({_free_mb(path):,} MB free)", "free some space")
    if number == EDQUOT:
        return DiskError("the disk quota of this user is used up", "free some space, or ask for more,")
    if number == EFBIG:
        return DiskError(f"no file may grow beyond {_size_limit()} (RLIMIT_FSIZE)", "raise the limit with `ulimit -f`")
    if number == EROFS:
        return DiskError("the file system is read-only", "make it writable, or choose another logging.run_dir,")
    if number == EIO:
        return DiskError("the disk reports an I/O error", "move the run directory to a disk that works")
    return None


def _number(error: BaseException, path: Path) -> int | None:
    """The errno behind an error."""
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, sqlite3.Error):
        number = _SQLITE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
        return _probe(path) or number if number == EIO else number
    if found := _NUMBER.search(str(error)):
        return ENOSPC if found[3] else int(found[1] or found[2])
    return None


def _probe(path: Path) -> int | None:
    """SQLite's I/O error has lost its number: write a little further into a file beside it, and see."""
    files = [path, path.with_name(f"{path.name}-wal")]
    size = max((file.stat().st_size for file in files if file.is_file()), default=0)
    beside = path.with_name(f".{path.name}.probe")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, _PROBE, size + _GROWTH)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            with suppress(OSError):
                beside.unlink()
    except OSError as error:
        return error.errno
    return None


def _free_mb(path: Path) -> int:
    place = next((parent for parent in (path, *path.parents) if parent.is_dir()), None)
    return shutil.disk_usage(place).free >> 20 if place else 0


def _size_limit() -> str:
    import resource  # of Unix alone, as the limit is

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return "what its file system allows" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
