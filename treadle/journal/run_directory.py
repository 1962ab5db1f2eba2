"""Run directory: its lock and its plain files, `config.yaml`, `run.json`, `run.log` and `metrics.jsonl`.

Owns their form, and the handlers of Python's `logging` while a run goes on. Knows nothing of SQLite or of what the
config says.
Invariant: one live run per directory; the lock goes with its process, so when that dies, by whatever means, the next
run takes the directory over. `config.yaml` and `run.json` are replaced whole, never half written; every start stays
listed in `run.json`, and a config that differs from the last one does not overwrite it. Each line of `metrics.jsonl`
is whole; the journal's table is the truth, and after a crash the file may hold a last line that the table does not.
Every message of treadle's loggers from INFO on, and every other warning, is a line of `run.log`; warnings still reach
standard error, and a log file that cannot be written never ends a run.
"""

import fcntl
import json
import logging
import os
import platform
import shlex
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from treadle.errors import RunError
from treadle.journal.records import RunStatus
from treadle.terminal import printable

log = logging.getLogger(__name__)

DIRECTORY_MODE = 0o700
"""Of what a run makes: trajectories may hold what only its user should read. Files are 0600."""

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
DIED = "it died without a word"
"""Cause of a start that was killed before it could write one."""
_PACKAGES = ("treadle", "torch", "transformers", "vllm", "ray", "openai", "mcp")


@dataclass(frozen=True, slots=True)
class RunStart:
    """One start of a run in this directory."""

    started_at: float
    command: tuple[str, ...]
    pid: int
    host: str
    versions: dict[str, str]
    status: RunStatus = RunStatus.RUNNING
    ended_at: float | None = None
    cause: str | None = None
    """Why it ended, where it did not finish."""


class RunFile:
    """`run.json`, of which this process is the last start."""

    def __init__(self, path: Path, starts: tuple[RunStart, ...]) -> None:
        self._path = path
        self._starts = starts

    @classmethod
    def open(cls, run_dir: Path, command: Sequence[str], now: float) -> "RunFile":
        """List this start. Earlier ones that still read as running were killed: no other process holds the lock."""
        earlier = tuple(
            replace(start, status=RunStatus.CRASHED, cause=DIED) if start.status is RunStatus.RUNNING else start
            for start in read_starts(run_dir)
        )
        start = RunStart(now, tuple(command), os.getpid(), socket.gethostname(), _versions())
        opened = cls(run_dir / RUN_FILE, (*earlier, start))
        opened._write()
        return opened

    @property
    def num_starts(self) -> int:
        return len(self._starts)

    def note(self, status: RunStatus, cause: str | None) -> None:
        """Record how this start is about to end, in case it is killed before `end`."""
        self._starts = (*self._starts[:-1], replace(self._starts[-1], status=status, cause=cause))
        self._write()

    def end(self, status: RunStatus, now: float, cause: str | None = None) -> None:
        """Record how this start ended, and why."""
        last = replace(self._starts[-1], status=status, ended_at=now, cause=cause)
        self._starts = (*self._starts[:-1], last)
        self._write()

    def _write(self) -> None:
        last = self._starts[-1]
        content = {
            "status": last.status,
            "cause": last.cause,
            "starts": [asdict(start) for start in self._starts],
        }
        replace_text(self._path, json.dumps(content, indent=2) + "\n")


def read_starts(run_dir: Path) -> tuple[RunStart, ...]:
    """Every start in this directory, oldest first."""
    path = run_dir / RUN_FILE
    try:
        return tuple(_read_start(**found) for found in json.loads(path.read_text())["starts"])
    except FileNotFoundError:
        return ()
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} cannot be read ({error}): mend or delete it, or choose another logging.run_dir"
        ) from error


def _read_start(status: str, command: list[str], **fields: Any) -> RunStart:
    return RunStart(status=RunStatus(status), command=tuple(command), **fields)


def write_config(run_dir: Path, text: str, num_starts: int) -> None:
    """Store the resolved config; one of an earlier start that differs is kept beside it, numbered by that start."""
    path = run_dir / CONFIG_FILE
    if path.exists() and path.read_text() != text:
        os.replace(path, run_dir / f"config.{num_starts - 1}.yaml")
    replace_text(path, text)


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, meets the old text or the new."""
    draft = path.with_name(f"{path.name}.tmp")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


LOCK_FILE = "lock"


@dataclass(frozen=True, slots=True)
class LockOwner:
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
        """Hold the directory, or raise RunError that names the process that does."""
        path = run_dir / LOCK_FILE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _lock_refusal(_read_owner(descriptor), path) from None
            except OSError:  # a file system without locks: only the file's content says that a run holds it
                owner = _read_owner(descriptor)
                if owner is not None and owner.may_be_alive:
                    raise _lock_refusal(owner, path) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(LockOwner(os.getpid(), socket.gethostname(), now))).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def release(self) -> None:
        """Release the directory for the next run."""
        with suppress(OSError):  # it was closed behind our back, by a tool in this process, and holds nothing any more
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)

    def forget(self) -> None:
        """Close a forked child's copy: the parent goes on holding the lock, and its death must free it."""
        os.close(self._descriptor)


def _lock_refusal(owner: LockOwner | None, path: Path) -> RunError:
    holder = f"pid {owner.pid} on {owner.host}" if owner else "another process"
    return RunError(
        f"the run directory {path.parent} is in use by {holder}: end that run, or choose another logging.run_dir "
        f"(if no such process runs, delete {path})"
    )


def read_owner(run_dir: Path) -> LockOwner | None:
    """The process that wrote its name into the lock and has not released it; takes no lock, for readers of a run."""
    try:
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _read_owner(descriptor)
    finally:
        os.close(descriptor)


def _read_owner(descriptor: int) -> LockOwner | None:
    try:
        return LockOwner(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return None


def make_run_directory(run_dir: Path) -> None:
    """Make a run directory that its user alone can open. One that was there keeps its mode; a wider one is logged."""
    run_dir.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    mode = stat.S_IMODE(run_dir.stat().st_mode)
    if mode & ~DIRECTORY_MODE & 0o777:
        log.warning(
            "the run directory %s was there, and other users can open it (mode %04o): they see the names in it, and "
            "what others than treadle write there; to close it: chmod 700 %s",
            *(run_dir, mode, shlex.quote(str(run_dir))),
        )


LOG_FILE = "run.log"
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def logging_to(run_dir: Path) -> Iterator[None]:
    """Append what is logged to the run directory, which is made if it is not there."""
    run_dir.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    descriptor = os.open(run_dir / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    root, own = logging.getLogger(), logging.getLogger("treadle")
    with os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace") as stream:
        file = _QuietHandler(stream)
        file.setFormatter(_PrintableFormatter(_LOG_FORMAT))
        file.addFilter(lambda record: record.name.startswith("treadle") or record.levelno >= logging.WARNING)
        handlers: list[logging.Handler] = [file]
        if not root.handlers:
            handlers.append(_to_standard_error())
        level = own.level
        own.setLevel(min(level or logging.INFO, logging.INFO))
        for handler in handlers:
            root.addHandler(handler)
        try:
            yield
        finally:
            own.setLevel(level)
            for handler in handlers:
                root.removeHandler(handler)


class _PrintableFormatter(logging.Formatter):
    """Messages and tracebacks may quote models, rows and servers: control characters are written out."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _QuietHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler whose stream may break: a full disk is the journal's to report."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore it: there is no stream left to report it on."""


def _to_standard_error() -> logging.Handler:
    """The handler that Python uses while none is set."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_PrintableFormatter("%(message)s"))
    return handler


METRICS_FILE = "metrics.jsonl"
_BLOCK = 65536


class MetricsFile:
    """An append-only file of lines."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def open(cls, run_dir: Path) -> "MetricsFile":
        """Open for appending, and cut off an unfinished last line."""
        path = run_dir / METRICS_FILE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, _end_of_last_line(descriptor))
        return cls(path, descriptor)

    def append(self, lines: Sequence[str]) -> None:
        """Write lines that hold no line break of their own."""
        rest = memoryview("".join(f"{line}\n" for line in lines).encode())
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            error.filename = str(self._path)  # a write knows no name, and the journal has other files
            raise

    def rewind(self, step: int) -> None:
        """Take away what was measured after `step`; lines that are not ours stay."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            draft = self._path.with_name(f"{self._path.name}.tmp")
            descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.close(self._descriptor)
            self._descriptor = descriptor
            self.append(kept)
            os.replace(draft, self._path)

    def close(self) -> None:
        os.close(self._descriptor)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1.0


def _end_of_last_line(descriptor: int) -> int:
    end = os.fstat(descriptor).st_size
    while end:
        start = max(end - _BLOCK, 0)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
