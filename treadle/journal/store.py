"""Journal store: batches of records into SQLite, metrics into JSONL as well, within a bounded file size.

Owns the writing connection, the metrics file, and what is dropped when the file nears its size: the bodies (tokens and
messages) of the oldest trajectories first, whose headlines stay, with the parts of sessions written before them. Where
no body is left, the oldest headlines go, then metrics (`metrics.jsonl` keeps them) and the events that no resume needs.
Each such drop is an event, so that a reader knows that the record is no longer complete. Knows nothing of threads or
queues: one caller at a time.
Invariant: a batch is in the journal whole or not at all. After a write the file has room for a batch as large as the
largest so far, unless what a resume needs alone takes more, which is then recorded as an event.
"""

import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from treadle.errors import RunError
from treadle.journal import schema
from treadle.journal.codec import (
    Values,
    annotation_values,
    decode,
    encode,
    headline_values,
    label,
    pack_ints,
    part_values,
    row_values,
    seal,
    sealed,
    task_values,
    text_values,
)
from treadle.journal.records import (
    AnnotationsAdded,
    JournalEvent,
    Measurement,
    MetricsRewound,
    PartsAdded,
    Record,
    RowAnnotation,
    SessionEnded,
    Stamped,
)
from treadle.journal.run_directory import MetricsFile
from treadle.journal.schema import Table
from treadle.types import Message, RecordedCompletion, Task, Trajectory

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
        self._is_over_size = False

    def enforce(self, num_bytes: int) -> bool:
        """Count a batch of so many bytes, and leave room for another; whether any body had to be dropped."""
        self._unchecked += num_bytes
        self._room = min(max(self._room, num_bytes), self._max_bytes // 4)
        if self._unchecked * _CHECKS_PER_SIZE < self._max_bytes:
            return False
        self._unchecked = 0
        if self._used() + self._room <= _START_AT * self._max_bytes:
            return False
        dropped = self._drop_until(_STOP_AT * self._max_bytes - self._room)
        self._release_pages()
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
                    self._record_over_size(used)
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
            execute("DELETE FROM annotations WHERE trajectory <= ?", (last,))
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
            self._add_event("dropped", count=last - oldest + 1, through=last)
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
            self._add_event("dropped_headlines", count=count, through=last)
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
                self._add_event("dropped_events", count=events, metrics=metrics)
        return bool(events or metrics)

    def _record_over_size(self, used: int) -> None:
        """Record once that nothing is left to drop."""
        if not self._is_over_size:
            self._is_over_size = True
            self._add_event("over_size", used_bytes=used, max_bytes=self._max_bytes)

    def _add_event(self, kind: str, **fields: int) -> None:
        self._connection.execute(schema.EVENTS.insert(1), sealed((self._start, time.time(), kind, encode(fields))))

    def _release_pages(self) -> None:
        """Return free pages to the file system where the file itself is too long; others are used again."""
        spare = schema.pragma(self._connection, "page_count") - int(self._max_bytes // self._page_bytes)
        if spare > 0:
            # As a script: `execute` would stop after the first page.
            self._connection.executescript(f"PRAGMA incremental_vacuum({spare})")


_MAX_PROMPTS = 512
_MAX_ROWS_PER_STATEMENT = 256
_BYTES_PER_ROW = 128  # about what a row takes beside its blobs and long texts

SessionKey = tuple[str, int]
"""uid and sample."""


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt that is in the journal already, for the next sample that starts with it."""

    id: int
    ids: bytes
    opening: tuple[Message, ...]
    text: str
    """The opening as it is stored."""

    def begins(self, ids: bytes, messages: tuple[Message, ...]) -> bool:
        return self.ids == ids and self.opening == messages[: len(self.opening)]


@dataclass(slots=True)
class WriteBatch:
    """The rows of one batch, by table."""

    rows: dict[Table, list[Values]] = field(default_factory=dict)
    parts: dict[SessionKey, list[Values]] = field(default_factory=dict)
    ended: set[SessionKey] = field(default_factory=set)
    """Sessions whose parts in the journal are deleted, before those in `parts` are inserted."""
    annotations: list[Values] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    rewound: int | None = None
    """The step after which everything measured so far is undone."""
    num_bytes: int = 0

    def add(self, table: Table, values: Values) -> None:
        self.num_bytes += _BYTES_PER_ROW
        self.rows.setdefault(table, []).append(values)

    def add_part(self, session: SessionKey, values: Values, num_tokens: int) -> None:
        self.num_bytes += _BYTES_PER_ROW + 12 * num_tokens + len(str(values[-1]))
        self.parts.setdefault(session, []).append(values)

    def add_annotations(self, rows: Sequence[RowAnnotation]) -> None:
        for row in rows:
            self.num_bytes += _BYTES_PER_ROW + sum(len(part) for part in row if isinstance(part, bytes))
            self.annotations.append(annotation_values(row))

    def rewind(self, step: int) -> None:
        """Undo what was measured after `step`, in this batch too."""
        kept = [values for values in self.rows.pop(schema.METRICS, []) if int(values[1] or 0) <= step]
        if kept:
            self.rows[schema.METRICS] = kept
        self.lines = [line for line in self.lines if decode(line)["step"] <= step]
        self.rewound = step if self.rewound is None else min(step, self.rewound)

    def end(self, session: SessionKey) -> None:
        self.parts.pop(session, None)
        self.ended.add(session)


class JournalStore:
    """Writing side of a journal, for one thread."""

    def __init__(self, connection: sqlite3.Connection, metrics: MetricsFile, max_bytes: int) -> None:
        self._connection = connection
        self._metrics = metrics
        self._start = 1 + max(_last_start(connection, table) for table in ("trajectories", "parts", "events"))
        self._retention = Retention(connection, max_bytes, self._start)
        self._next_trajectory = _next_id(connection, "trajectories")
        self._next_prompt = _next_id(connection, "prompts")
        self._prompts: dict[str, StoredPrompt] = {}
        limit = connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)
        self._max_rows = min(_MAX_ROWS_PER_STATEMENT, limit // schema.TRAJECTORIES.width)

    @classmethod
    def open(cls, run_dir: Path, max_bytes: int) -> "JournalStore":
        """Open the journal and the metrics file of a run directory, and make them if they are not there."""
        path = run_dir / schema.FILE_NAME
        with ExitStack() as undo:
            connection = schema.connect_writer(path, max_bytes=max_bytes)
            undo.callback(connection.close)
            metrics = MetricsFile.open(run_dir)
            undo.callback(metrics.close)
            try:
                store = cls(connection, metrics, max_bytes)
            except sqlite3.Error as error:
                problem = f"cannot use {path} as a journal: {error}{schema.what_is_left(path)}"
                raise RunError(problem) from error
            undo.pop_all()
        return store

    def write(self, records: Iterable[Stamped]) -> None:
        """Write a batch of records to the journal, whole, and keep the file within its size."""
        batch = WriteBatch()
        for stamped in records:
            self._add_record(batch, stamped.time, stamped.record)
        self._connection.execute("BEGIN")
        try:
            if batch.rewound is not None:
                self._connection.execute("DELETE FROM metrics WHERE step > ?", (batch.rewound,))
                self._metrics.rewind(batch.rewound)
            for table, rows in batch.rows.items():
                self._insert(table, rows)
            insert_annotations(self._connection, batch.annotations)
            self._connection.executemany("DELETE FROM parts WHERE uid = ? AND sample = ?", batch.ended)
            self._insert(schema.PARTS, [*chain.from_iterable(batch.parts.values())])
            self._metrics.append(batch.lines)
            self._connection.execute("COMMIT")
        except (sqlite3.Error, OSError):
            self._roll_back()
            raise
        if self._retention.enforce(batch.num_bytes):
            self._prompts.clear()

    def close(self) -> None:
        """Move what is in the write-ahead log into the file, and close both."""
        self._metrics.close()
        self._connection.close()

    def _add_record(self, batch: WriteBatch, time: float, record: Record) -> None:
        match record:
            case Trajectory():
                self._add_trajectory(batch, time, record)
            case Task():
                batch.add(schema.TASKS, task_values(record))
            case JournalEvent():
                batch.add(schema.EVENTS, sealed((self._start, time, label(record.kind), encode(record.fields))))
            case Measurement():
                batch.add(schema.METRICS, sealed((time, record.step, encode(record.values))))
                batch.lines.append(encode({**record.values, "step": record.step, "time": time}))
            case PartsAdded(parts):
                self._add_parts(batch, time, parts)
            case AnnotationsAdded(rows):
                batch.add_annotations(rows)
            case SessionEnded(uid, sample):
                batch.end((label(uid), sample))
            case MetricsRewound(step):
                batch.rewind(step)

    def _add_parts(self, batch: WriteBatch, time: float, parts: Sequence[RecordedCompletion]) -> None:
        for part in parts:
            session = (label(part.uid), part.sample)
            batch.add_part(session, part_values(self._start, time, part), len(part.completion.ids))

    def _add_trajectory(self, batch: WriteBatch, time: float, trajectory: Trajectory) -> None:
        id = self._next_trajectory
        self._next_trajectory += 1
        masks = [bytes(row.mask) for row in trajectory.rows]
        prompt = self._prompt(batch, trajectory)
        rows = [
            row_values(id, at, row, mask) for at, (row, mask) in enumerate(zip(trajectory.rows, masks, strict=True))
        ]
        text = text_values(id, len(prompt.opening), trajectory)
        body = seal((prompt.ids, prompt.text, *chain.from_iterable(values[2:] for values in rows), *text[1:]))
        batch.add(schema.TRAJECTORIES, headline_values(self._start, time, id, prompt.id, trajectory, masks, body))
        for mask, values in zip(masks, rows, strict=True):
            batch.add(schema.ROWS, values)
            batch.num_bytes += 13 * len(mask) + len(str(values[-1]))
        batch.add(schema.TEXTS, text)
        batch.num_bytes += len(str(text[1]))

    def _prompt(self, batch: WriteBatch, trajectory: Trajectory) -> StoredPrompt:
        """The stored prompt of a trajectory: that of an earlier sample of the same task where it is the same."""
        ids = pack_ints(trajectory.rows[0].prompt_ids) if trajectory.rows else b""
        known = self._prompts.get(trajectory.uid)
        if known is not None and known.begins(ids, trajectory.messages):
            return known
        opening = _opening(trajectory.messages)
        prompt = StoredPrompt(self._next_prompt, ids, opening, encode(opening))
        self._next_prompt += 1
        batch.add(schema.PROMPTS, (prompt.id, label(trajectory.uid), ids, prompt.text))
        batch.num_bytes += len(ids)
        if len(self._prompts) >= _MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        self._prompts[trajectory.uid] = prompt
        return prompt

    def _insert(self, table: Table, rows: Sequence[Values]) -> None:
        """Insert in statements whose sizes are powers of two, so that few distinct statements are ever compiled."""
        start = 0
        while start < len(rows):
            size = min(1 << ((len(rows) - start).bit_length() - 1), self._max_rows)
            part = rows[start : start + size]
            self._connection.execute(table.insert(size), list(chain.from_iterable(part)))
            start += size

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


def insert_annotations(connection: sqlite3.Connection, rows: Sequence[Values]) -> None:
    """Insert rows as `annotation_values` gives them, in the place of earlier ones of the same row and step."""
    of_trajectory = "SELECT max(id) FROM trajectories WHERE uid = ? AND sample = ? AND attempt = ?"
    names = [values[-3:] for values in rows]
    connection.executemany(
        f"DELETE FROM annotations WHERE position = ? AND trajectory = ({of_trajectory})",
        [(values[0], *name) for values, name in zip(rows, names, strict=True)],
    )
    columns = ",".join(schema.ANNOTATIONS)
    marks = ",".join("?" * len(schema.ANNOTATIONS))
    connection.executemany(
        f"INSERT INTO annotations ({columns}, trajectory) SELECT {marks}, max(id) FROM trajectories "
        "WHERE uid = ? AND sample = ? AND attempt = ? HAVING max(id) IS NOT NULL",
        rows,
    )


def _opening(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages before the model's first."""
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            return messages[:index]
    return messages


def _last_start(connection: sqlite3.Connection, table: str) -> int:
    """By which start the last row of a table was written."""
    found = connection.execute(f"SELECT start FROM {table} ORDER BY id DESC LIMIT 1").fetchone()
    return int(found[0]) if found else 0


def _next_id(connection: sqlite3.Connection, table: str) -> int:
    return int(connection.execute(f"SELECT ifnull(max(id), 0) + 1 FROM {table}").fetchone()[0])
