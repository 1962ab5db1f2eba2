"""Journal: a crash-safe record of everything a run did.

Owns the run directory's lock and files, and the writer behind them. Knows nothing of rollouts or training.
Invariant: `add*` never wait. What `flush` returned for survives `kill -9`; a crash before that loses at most the last
fraction of a second, never part of a record. (A power cut may take the last seconds, never more.)
"""

import asyncio
import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from treadle.disk import explain_disk_error
from treadle.errors import DeadlineError, MisuseError, RunError
from treadle.journal import schema
from treadle.journal.records import (
    AnnotationsAdded,
    JournalEvent,
    Measurement,
    MetricsRewound,
    PartsAdded,
    Record,
    RowAnnotation,
    RunStatus,
    SessionEnded,
    Stamped,
)
from treadle.journal.run_directory import RunFile, RunLock, make_run_directory, write_config
from treadle.journal.store import JournalStore
from treadle.journal.writer import JournalWriter
from treadle.types import RecordedCompletion, Task, Trajectory

log = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 10.0
_MAX_WAITERS = 4
_MAX_CAUSE = 2000
_open_journals: set["Journal"] = set()
_parents_journals: set["Journal"] = set()
_closing = threading.Lock()


class Journal:
    """A started journal. Built by `open`, which holds the directory until `close`."""

    def __init__(self, run_dir: Path, lock: RunLock, run_file: RunFile, writer: JournalWriter) -> None:
        self.run_dir = run_dir
        self._lock = lock
        self._run_file = run_file
        self._writer = writer
        self._refusal = ""
        self._closed = False
        self._interruption: str | None = None
        # A pool of its own: tools that never return may hold every thread of the loop's.
        self._waiters = ThreadPoolExecutor(_MAX_WAITERS, "treadle-journal-wait")
        _open_journals.add(self)

    @classmethod
    def open(
        cls, run_dir: Path, *, max_mb: int, config_yaml: str | None = None, command: Sequence[str] = ()
    ) -> "Journal":
        """Create a run directory, or continue the one there is. Blocks for some milliseconds."""
        now = time.time()
        try:
            with ExitStack() as undo:
                make_run_directory(run_dir)
                lock = RunLock.take(run_dir, now)
                undo.callback(lock.release)
                store = JournalStore.open(run_dir, max_mb << 20)
                undo.callback(store.close)
                run_file = RunFile.open(run_dir, command, now)
                if config_yaml is not None:
                    write_config(run_dir, config_yaml, run_file.num_starts)
                undo.pop_all()
        except OSError as error:
            raise _cannot_write(run_dir, error) from error
        writer = JournalWriter(store, run_dir / schema.FILE_NAME)
        writer.start()
        return cls(run_dir, lock, run_file, writer)

    def add(self, trajectory: Trajectory) -> None:
        """Record a trajectory. A later attempt of the same (uid, sample) supersedes the earlier one; both stay."""
        self._put(trajectory)

    def add_task(self, task: Task) -> None:
        """Record a task as it was given."""
        self._put(task)

    def add_event(self, kind: str, /, **fields: Any) -> None:
        """Record that something happened."""
        self._put(JournalEvent(kind, fields))

    def add_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record what was measured at a step, in the journal and in `metrics.jsonl`."""
        self._put(Measurement(step, values))

    def add_annotations(self, rows: Sequence[RowAnnotation]) -> None:
        """Record what a step computed for the tokens of rows; those of a trajectory that is not here are left out."""
        self._put(AnnotationsAdded(tuple(rows)))

    def add_parts(self, parts: Sequence[RecordedCompletion]) -> None:
        """Record what engines answered to open sessions; a part with the same number replaces the earlier one."""
        self._put(PartsAdded(tuple(parts)))

    def drop_parts(self, uid: str, sample: int) -> None:
        """Delete the parts of a session that has ended: of those added so far, none is left."""
        self._put(SessionEnded(uid, sample))

    def rewind(self, step: int) -> None:
        """The run goes on after `step`: take away the metrics of later steps, which are measured anew."""
        self._put(MetricsRewound(step))

    def interrupt(self, cause: str) -> None:
        """Record in `run.json`, at once, that this start is being interrupted; `close` then keeps that status."""
        self._interruption = cause
        try:
            self._run_file.note(RunStatus.INTERRUPTED, cause)
        except OSError as error:
            log.warning("%s", _cannot_write(self.run_dir, error))

    def _put(self, record: Record) -> None:
        self._check()
        self._writer.put(Stamped(time.time(), record))

    def _check(self) -> None:
        """Raise if nothing can be written any more."""
        if self._writer.error is not None:
            raise RunError(*self._writer.error.args) from self._writer.error
        if self._refusal:
            raise MisuseError(self._refusal)

    @property
    def full(self) -> bool:
        """Whether the queue is full: time to `await drain()` before more work is taken on."""
        return self._writer.full

    async def drain(self, timeout_s: float = 60.0) -> None:
        """Wait until the queue has room; returns at once while it has."""
        if self._writer.full:
            await self._in_thread(self.drain_blocking, timeout_s)

    def drain_blocking(self, timeout_s: float = 60.0) -> None:
        """`drain`, for a thread that may block."""
        if self._writer.full:
            self._wait(self._writer.room(), timeout_s, "room in its queue")

    async def flush(self, timeout_s: float = 30.0) -> None:
        """Wait until everything added so far is in the journal."""
        self._check()
        await self._in_thread(self.flush_blocking, timeout_s)

    def flush_blocking(self, timeout_s: float = 30.0) -> None:
        """`flush`, for a thread that may block."""
        self._check()
        self._wait(self._writer.mark(), timeout_s, "a flush")

    async def watch(self) -> None:
        """Return when the journal is closed; raise, as soon as it is known, the RunError that keeps it from writing."""
        await asyncio.shield(asyncio.wrap_future(self._writer.ended))
        if self._writer.error is not None:
            raise RunError(*self._writer.error.args) from self._writer.error

    async def close(
        self, status: RunStatus = RunStatus.FINISHED, cause: str | None = None, timeout_s: float = 30.0
    ) -> None:
        """Write what is left, record how the run ended, and release the directory. A second call does nothing."""
        if not self._closed:
            await self._in_thread(self.close_blocking, status, cause, timeout_s)

    def close_blocking(
        self, status: RunStatus = RunStatus.FINISHED, cause: str | None = None, timeout_s: float = 30.0
    ) -> None:
        """`close`, for a thread that may block."""
        if not self._closed:
            self._refusal = f"the journal of {self.run_dir} is closed"
            self._writer.stop()
            self._wait(self._writer.ended, timeout_s, "its last records")
            self._release(status, cause)

    def _release(self, status: RunStatus, cause: str | None) -> None:
        with _closing:
            if self._closed:  # by another caller, while this one waited
                return
            self._closed = True
            _open_journals.discard(self)
        error = self._writer.error
        if error is not None:
            status, cause = RunStatus.FAILED, str(error)
        elif status is not RunStatus.FAILED and self._interruption is not None:
            status, cause = RunStatus.INTERRUPTED, self._interruption
        try:
            self._run_file.end(status, time.time(), cause)
        except OSError as full:
            error = error or _cannot_write(self.run_dir, full)
        self._lock.release()
        self._waiters.shutdown(wait=False)
        if error is not None:
            raise RunError(*error.args) from error

    def detach_after_fork(self) -> None:
        """In a forked child: the journal stays the parent's."""
        self._refusal = f"the journal of {self.run_dir} belongs to the process that opened it, not to a fork of it"
        self._closed = True
        self._lock.forget()

    async def _in_thread(self, call: Callable[..., None], *values: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._waiters, call, *values)

    def _wait(self, future: Future[None], timeout_s: float, what: str) -> None:
        try:
            future.result(timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"waited {timeout_s:g} s for the journal of {self.run_dir}: {what}; "
                f"{self._writer.num_pending} records are not written yet (is the disk slow or stuck?)"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_blocking(*_ending(error))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(*_ending(error))


def _ending(error: BaseException | None) -> tuple[RunStatus, str | None]:
    """Status of a run that ended with this error, and the cause in one line."""
    if error is None:
        return RunStatus.FINISHED, None
    cause = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    interrupted = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
    return RunStatus.INTERRUPTED if interrupted else RunStatus.FAILED, cause[:_MAX_CAUSE]


def _cannot_write(run_dir: Path, error: OSError) -> RunError:
    disk = explain_disk_error(error, run_dir)
    problem = f"{disk.problem}: {disk.fix} and start again" if disk else error.strerror or error
    return RunError(f"cannot write to logging.run_dir {run_dir}: {problem}")


def _close_all() -> None:
    """A journal that was not closed: its last records are written before the process ends."""
    for journal in tuple(_open_journals):
        try:
            journal.close_blocking(RunStatus.INTERRUPTED, "the process ended first", _EXIT_TIMEOUT_S)
        except RunError as error:
            log.error("%s", error)  # raised from here it would be a traceback, and change no status


def _disown_all() -> None:
    for journal in tuple(_open_journals):
        journal.detach_after_fork()
    # Kept, not collected: closing SQLite's connection in a fork would upset the parent's.
    _parents_journals.update(_open_journals)
    _open_journals.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)
