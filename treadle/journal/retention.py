"""How a journal stays within its size: the bodies of the oldest trajectories go first, and their pages are used again.

Parts of sessions go with the bodies that were written after them: a session that never came back has left them behind.
Where no body is left to drop, the oldest headlines go, then metrics (`metrics.jsonl` keeps them) and the events that no
resume needs. Each such drop is an event, so that a reader knows that the record is no longer complete.

Owns what is dropped and when. Knows nothing of what the bodies mean.
Invariant: after `tend` the file has room for a batch as large as the largest so far, unless what a resume needs alone
takes more, which is then said in an event.
"""

import sqlite3
import time

from treadle.journal import schema
from treadle.journal.codec import sealed
from treadle.journal.text import encode

_START_AT = 0.95
_STOP_AT = 0.90
_CHECKS_PER_SIZE = 64
_MAX_DROP = 4096
_NONE_KEPT = 1 << 62
_NEEDED = ("resume", "inputs", "saved", "checkpoint", "dropped", "dropped_headlines", "dropped_events", "over_size")
"""Events that stay: what a resume, and a reader of an incomplete record, must know."""


class Retention:
    """Drops bodies, oldest first, when the file nears `max_bytes`."""

    def __init__(self, connection: sqlite3.Connection, max_bytes: int, start: int) -> None:
        self._connection = connection
        self._start = start
        self._max_bytes = max_bytes
        self._page_bytes = schema.pragma(connection, "page_size")
        self._unchecked = max_bytes  # a journal may be opened again with a smaller size
        self._room = 0
        self._complained = False

    def tend(self, num_bytes: int) -> bool:
        """Take note of a batch of so many bytes, and leave room for another; whether any body had to be dropped."""
        self._unchecked += num_bytes
        self._room = min(max(self._room, num_bytes), self._max_bytes // 4)
        if self._unchecked * _CHECKS_PER_SIZE < self._max_bytes:
            return False
        self._unchecked = 0
        if self._used() + self._room <= _START_AT * self._max_bytes:
            return False
        dropped = self._drop_until(_STOP_AT * self._max_bytes - self._room)
        self._give_back()
        return dropped

    def _used(self) -> int:
        pages = schema.pragma(self._connection, "page_count") - schema.pragma(self._connection, "freelist_count")
        return pages * self._page_bytes

    def _drop_until(self, target: float) -> bool:
        dropped = False
        while (used := self._used()) > target:
            oldest, newest = self._connection.execute("SELECT min(trajectory), max(trajectory) FROM texts").fetchone()
            if oldest is None:
                if not (self._drop_older_parts() or self._drop_headlines() or self._drop_events()):
                    self._complain(used)
                    break
                dropped = True
                continue
            share = (newest - oldest + 1) * (used - target) / used
            self._drop(oldest, oldest + min(int(share), _MAX_DROP))
            dropped = True
        return dropped

    def _drop(self, oldest: int, last: int) -> None:
        """Drop the bodies of these trajectories, and the prompts that no kept body starts with."""
        execute = self._connection.execute
        execute("BEGIN")
        try:
            execute("DELETE FROM rows WHERE trajectory <= ?", (last,))
            execute("DELETE FROM texts WHERE trajectory <= ?", (last,))
            execute(
                "DELETE FROM prompts WHERE uid IN (SELECT uid FROM trajectories WHERE id BETWEEN ? AND ?) AND id < "
                "ifnull((SELECT min(prompt) FROM trajectories t WHERE t.uid = prompts.uid AND t.id > ?), ?)",
                (oldest, last, last, _NONE_KEPT),
            )
            execute(
                "DELETE FROM parts WHERE written_at < (SELECT written_at FROM trajectories WHERE id <= ? "
                "ORDER BY id DESC LIMIT 1)",
                (last,),
            )
            self._note("dropped", count=last - oldest + 1, through=last)
            execute("COMMIT")
        except sqlite3.Error:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise

    def _drop_older_parts(self) -> bool:
        """Where parts are all there is, drop the older half; whether there were any."""
        dropped = self._connection.execute("DELETE FROM parts WHERE id <= (SELECT (min(id) + max(id)) / 2 FROM parts)")
        return dropped.rowcount > 0

    def _drop_headlines(self) -> bool:
        """Drop the older half of the headlines, and the tasks that only they name; whether there were any."""
        execute = self._connection.execute
        with self._connection:
            execute("BEGIN")
            last, newest = execute("SELECT (min(id) + max(id)) / 2, max(id) FROM trajectories").fetchone()
            if last is None or last == newest:
                return False
            count = execute("DELETE FROM trajectories WHERE id <= ?", (last,)).rowcount
            execute("DELETE FROM tasks WHERE uid NOT IN (SELECT uid FROM trajectories)")
            self._note("dropped_headlines", count=count, through=last)
        return True

    def _drop_events(self) -> bool:
        """Drop the older half of the metrics and of the events that no resume needs; whether there were any."""
        execute = self._connection.execute
        free = f"kind NOT IN ({','.join(repr(kind) for kind in _NEEDED)})"
        with self._connection:
            execute("BEGIN")
            metrics = execute("DELETE FROM metrics WHERE id <= (SELECT (min(id) + max(id)) / 2 FROM metrics)").rowcount
            events = execute(
                f"DELETE FROM events WHERE {free} AND id <= (SELECT (min(id) + max(id)) / 2 FROM events WHERE {free})"
            ).rowcount
            if events or metrics:
                self._note("dropped_events", count=events, metrics=metrics)
        return bool(events or metrics)

    def _complain(self, used: int) -> None:
        """Say once that nothing is left to drop."""
        if not self._complained:
            self._complained = True
            self._note("over_size", used_bytes=used, max_bytes=self._max_bytes)

    def _note(self, kind: str, **fields: int) -> None:
        self._connection.execute(schema.EVENTS.insert(1), sealed((self._start, time.time(), kind, encode(fields))))

    def _give_back(self) -> None:
        """Return free pages to the file system where the file itself is too long; others are used again."""
        spare = schema.pragma(self._connection, "page_count") - int(self._max_bytes // self._page_bytes)
        if spare > 0:
            # As a script: `execute` would stop after the first page.
            self._connection.executescript(f"PRAGMA incremental_vacuum({spare})")
