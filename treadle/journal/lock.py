"""One live run per directory.

Owns the file `lock`, which names the process that holds it. Knows nothing of what the directory holds.
Invariant: the lock goes with its process: when that dies, by whatever means, the next run takes the directory over.
"""

import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from treadle.errors import RunError

FILE_NAME = "lock"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that holds a run directory."""

    pid: int
    host: str
    since: float

    @property
    def may_be_alive(self) -> bool:
        """Whether the process could still run: another host's always could."""
        if self.host != socket.gethostname():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


class RunLock:
    """The held lock of a run directory."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, run_dir: Path, now: float) -> "RunLock":
        """Hold the directory, or raise RunError that names who does."""
        path = run_dir / FILE_NAME
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _hold(descriptor, path)
            _sign(descriptor, Owner(os.getpid(), socket.gethostname(), now))
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def release(self) -> None:
        """Let the next run in."""
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def forget(self) -> None:
        """Close a forked child's copy: the parent goes on holding the lock, and its death must free it."""
        os.close(self._descriptor)


def _hold(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _refusal(_read(descriptor), path) from None
    except OSError:
        # A file system without locks: what the file says is all there is to go by.
        owner = _read(descriptor)
        if owner is not None and owner.may_be_alive:
            raise _refusal(owner, path) from None


def _refusal(owner: Owner | None, path: Path) -> RunError:
    holder = f"pid {owner.pid} on {owner.host}" if owner else "another process"
    return RunError(
        f"the run directory {path.parent} is in use by {holder}: end that run, or choose another logging.run_dir "
        f"(if no such process runs, delete {path})"
    )


def _sign(descriptor: int, owner: Owner) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(owner)).encode(), 0)


def _read(descriptor: int) -> Owner | None:
    try:
        return Owner(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return None
