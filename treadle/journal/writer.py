"""Journal writer: the one thread that writes, and the queue in front of it.

    caller        waits for                       woken by
    put           nothing: it appends and returns
    the thread    a first record                  put
                  then a full batch, or 0.2 s     put, mark, stop
    room()        the queue to be half empty      the thread, after a batch
    mark()        all that was put before it      the thread, after the batch that holds it

Owns the queue and the thread. Knows nothing of what it writes.
Invariant: what was put is written in order, or `error` says why not and how much was lost; once the thread has ended,
no call waits for it.
"""

import errno
import os
import threading
from collections import Counter, deque
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

from treadle.disk import explain_disk_error
from treadle.errors import MisuseError, RunError
from treadle.journal.records import Stamped
from treadle.journal.store import JournalStore

MAX_PENDING = 4096
_BATCH = 256
_BATCH_S = 0.2
_OVERRUN = 4
_GONE = "the run directory was deleted, moved or unmounted while the run wrote to it"

WriteMark = Future[None]


class JournalWriter:
    """Takes records from any thread, and writes them in batches of its own."""

    def __init__(self, store: JournalStore, path: Path, max_pending: int = MAX_PENDING) -> None:
        self._store = store
        self._path = path
        self._max_pending = max_pending
        self._queue: deque[Stamped | WriteMark] = deque()
        self._room: deque[WriteMark] = deque()
        self._waiters: deque[WriteMark] = deque()
        self._writing: list[Stamped] = []
        self._releasing = threading.Lock()
        self._some = threading.Event()
        self._flush_now = threading.Event()
        self._stopping = False
        self._num_written = 0
        self.error: RunError | None = None
        self.ended: WriteMark = Future()
        self._file = _identify(path)
        self._thread = threading.Thread(target=self._run, name="treadle-journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def full(self) -> bool:
        return len(self._queue) >= self._max_pending

    @property
    def num_pending(self) -> int:
        return len(self._queue)

    def put(self, record: Stamped) -> None:
        """Hand a record over. Never waits; a caller that never lets the queue drain is refused at last."""
        num_pending = len(self._queue)
        if num_pending >= _OVERRUN * self._max_pending:
            raise MisuseError(f"{num_pending} records wait for the journal: `await journal.drain()` where it is full")
        self._queue.append(record)
        if not self._some.is_set():
            self._some.set()
        if num_pending >= _BATCH and not self._flush_now.is_set():
            self._flush_now.set()

    def mark(self) -> WriteMark:
        """Done once everything put so far is written."""
        mark: WriteMark = Future()
        self._queue.append(mark)
        self._wake()
        if self.ended.done():
            self._release()
        return mark

    def room(self) -> WriteMark:
        """Done once the queue is half empty."""
        room: WriteMark = Future()
        self._room.append(room)
        self._wake()
        if self.ended.done():
            self._release()
        return room

    def stop(self) -> None:
        """Write what is left and end; then `ended` is done, and `error` says how it went."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        self._flush_now.set()
        self._some.set()

    def _run(self) -> None:
        try:
            with closing(self._store):
                self._write_until_stopped()
        except Exception as error:  # noqa: BLE001 - whatever it is, every waiter must get it
            self._end(error)
        else:
            self._end(None)

    def _write_until_stopped(self) -> None:
        while not (self._stopping and not self._queue):
            self._some.wait()
            if not self._stopping:
                self._flush_now.wait(_BATCH_S)
            self._some.clear()
            self._flush_now.clear()
            while self._queue:
                self._write(min(len(self._queue), _BATCH))
            self._make_room()

    def _write(self, size: int) -> None:
        """Write the next `size` things of the queue, and release those that wait for them."""
        taken = [self._queue.popleft() for _ in range(size)]
        self._writing = [thing for thing in taken if isinstance(thing, Stamped)]
        marks = [thing for thing in taken if isinstance(thing, Future)]
        self._waiters.extend(marks)
        if self._writing:
            self._store.write(self._writing)
        self._check_file()  # after the write: what is deleted or unmounted still takes it
        self._num_written += len(self._writing)
        self._writing = []
        while self._waiters:
            self._waiters.popleft().set_result(None)
        self._make_room()

    def _check_file(self) -> None:
        """Raise where the journal is no longer at its path: a file without a name takes writes, and keeps nothing."""
        if _identify(self._path) != self._file:
            raise FileNotFoundError(errno.ENOENT, _GONE)

    def _make_room(self) -> None:
        while self._room and len(self._queue) <= self._max_pending // 2:
            self._room.popleft().set_result(None)

    def _end(self, cause: BaseException | None) -> None:
        if cause is not None:
            self.error = RunError(self._describe_failure(cause))
            self.error.__cause__ = cause
        self.ended.set_result(None)
        self._release()

    def _describe_failure(self, cause: BaseException) -> str:
        """What went wrong, what was lost, and what was not."""
        unwritten = [*self._writing, *(thing for thing in self._queue.copy() if isinstance(thing, Stamped))]
        kinds = Counter(type(thing.record).__name__ for thing in unwritten)
        lost = ", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "nothing"
        if _identify(self._path) != self._file:
            return f"the journal {self._path} is gone: {_GONE}. What it held went with it"
        disk = explain_disk_error(cause, self._path)
        problem, fix = (disk.problem, disk.fix) if disk else (cause, "see the cause")
        file = f" ({cause.filename})" if isinstance(cause, OSError) and cause.filename else ""
        return (
            f"the journal {self._path} cannot be written{file}: {problem}. Lost: {lost}. "
            f"The {self._num_written} records before are safe and readable; {fix} and start again to continue"
        )

    def _release(self) -> None:
        """Release all waiters: the thread has ended."""
        with self._releasing:
            for waiting in (self._waiters, self._queue, self._room):
                while waiting:
                    thing = waiting.popleft()
                    if isinstance(thing, Future):
                        thing.set_exception(self.error or MisuseError(f"the journal {self._path} is closed"))


def _identify(path: Path) -> tuple[int, int] | None:
    """Which file is at a path, if one is."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
