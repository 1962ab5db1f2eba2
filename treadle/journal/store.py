"""Everything that is written to a run directory while it runs: batches into SQLite, metrics into JSONL as well.

Owns the writing connection and the metrics file. Knows nothing of threads or queues: one caller at a time.
Invariant: a batch is in the journal whole or not at all; the file stays within its size by dropping the tokens and
messages of the oldest trajectories, whose headlines stay.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from treadle.errors import RunError
from treadle.journal import schema
from treadle.journal.codec import (
    Values,
    headline_values,
    pack_ints,
    part_values,
    row_values,
    seal,
    sealed,
    task_values,
    text_values,
)
from treadle.journal.metricsfile import MetricsFile
from treadle.journal.record import Ended, Measurement, Note, Parts, Record, Rewound, Stamped
from treadle.journal.retention import Retention
from treadle.journal.schema import Table
from treadle.journal.text import decode, encode, label
from treadle.types import Message, Task, Trajectory

_MAX_PROMPTS = 512
_MAX_ROWS_PER_STATEMENT = 256
_BYTES_PER_ROW = 128  # about what a row takes beside its blobs and long texts

Session = tuple[str, int]
"""uid and sample."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is in the journal already, for the next sample that starts with it."""

    id: int
    ids: bytes
    opening: tuple[Message, ...]
    text: str
    """The opening as it is stored."""

    def begins(self, ids: bytes, messages: tuple[Message, ...]) -> bool:
        return self.ids == ids and self.opening == messages[: len(self.opening)]


@dataclass(slots=True)
class Pages:
    """The rows of one batch, by table."""

    rows: dict[Table, list[Values]] = field(default_factory=dict)
    parts: dict[Session, list[Values]] = field(default_factory=dict)
    ended: set[Session] = field(default_factory=set)
    """Sessions whose parts in the journal are deleted, before those in `parts` are inserted."""
    lines: list[str] = field(default_factory=list)
    rewound: int | None = None
    """The step after which everything measured so far is undone."""
    num_bytes: int = 0

    def add(self, table: Table, values: Values) -> None:
        self.num_bytes += _BYTES_PER_ROW
        self.rows.setdefault(table, []).append(values)

    def add_part(self, session: Session, values: Values, num_tokens: int) -> None:
        self.num_bytes += _BYTES_PER_ROW + 12 * num_tokens + len(str(values[-1]))
        self.parts.setdefault(session, []).append(values)

    def rewind(self, step: int) -> None:
        """Undo what was measured after `step`, in this batch too."""
        kept = [values for values in self.rows.pop(schema.METRICS, []) if int(values[1] or 0) <= step]
        if kept:
            self.rows[schema.METRICS] = kept
        self.lines = [line for line in self.lines if decode(line)["step"] <= step]
        self.rewound = step if self.rewound is None else min(step, self.rewound)

    def end(self, session: Session) -> None:
        self.parts.pop(session, None)
        self.ended.add(session)


class Store:
    """The writing side of a journal, as one thread sees it."""

    def __init__(self, connection: sqlite3.Connection, metrics: MetricsFile, max_bytes: int) -> None:
        self._connection = connection
        self._metrics = metrics
        self._start = 1 + max(_last_start(connection, table) for table in ("trajectories", "parts", "events"))
        self._retention = Retention(connection, max_bytes, self._start)
        self._next_trajectory = _next_id(connection, "trajectories")
        self._next_prompt = _next_id(connection, "prompts")
        self._prompts: dict[str, Prompt] = {}
        limit = connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)
        self._max_rows = min(_MAX_ROWS_PER_STATEMENT, limit // schema.TRAJECTORIES.width)

    @classmethod
    def open(cls, run_dir: Path, max_bytes: int) -> "Store":
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

    def write(self, batch: Iterable[Stamped]) -> None:
        """Put a batch into the journal, whole, and keep the file within its size."""
        pages = Pages()
        for stamped in batch:
            self._lay_out(pages, stamped.time, stamped.record)
        self._connection.execute("BEGIN")
        try:
            if pages.rewound is not None:
                self._connection.execute("DELETE FROM metrics WHERE step > ?", (pages.rewound,))
                self._metrics.rewind(pages.rewound)
            for table, rows in pages.rows.items():
                self._insert(table, rows)
            self._connection.executemany("DELETE FROM parts WHERE uid = ? AND sample = ?", pages.ended)
            self._insert(schema.PARTS, [*chain.from_iterable(pages.parts.values())])
            self._metrics.append(pages.lines)
            self._connection.execute("COMMIT")
        except (sqlite3.Error, OSError):
            self._roll_back()
            raise
        if self._retention.tend(pages.num_bytes):
            self._prompts.clear()

    def close(self) -> None:
        """Move what is in the write-ahead log into the file, and let go of both."""
        self._metrics.close()
        self._connection.close()

    def _lay_out(self, pages: Pages, time: float, record: Record) -> None:
        match record:
            case Trajectory():
                self._lay_out_trajectory(pages, time, record)
            case Task():
                pages.add(schema.TASKS, task_values(record))
            case Note():
                pages.add(schema.EVENTS, sealed((self._start, time, label(record.kind), encode(record.fields))))
            case Measurement():
                pages.add(schema.METRICS, sealed((time, record.step, encode(record.values))))
                pages.lines.append(encode({**record.values, "step": record.step, "time": time}))
            case Parts(parts):
                for part in parts:
                    session = (label(part.uid), part.sample)
                    pages.add_part(session, part_values(self._start, time, part), len(part.completion.ids))
            case Ended(uid, sample):
                pages.end((label(uid), sample))
            case Rewound(step):
                pages.rewind(step)

    def _lay_out_trajectory(self, pages: Pages, time: float, trajectory: Trajectory) -> None:
        id = self._next_trajectory
        self._next_trajectory += 1
        masks = [bytes(row.mask) for row in trajectory.rows]
        prompt = self._prompt(pages, trajectory)
        rows = [
            row_values(id, at, row, mask) for at, (row, mask) in enumerate(zip(trajectory.rows, masks, strict=True))
        ]
        text = text_values(id, len(prompt.opening), trajectory)
        body = seal((prompt.ids, prompt.text, *chain.from_iterable(values[2:] for values in rows), *text[1:]))
        pages.add(schema.TRAJECTORIES, headline_values(self._start, time, id, prompt.id, trajectory, masks, body))
        for mask, values in zip(masks, rows, strict=True):
            pages.add(schema.ROWS, values)
            pages.num_bytes += 13 * len(mask) + len(str(values[-1]))
        pages.add(schema.TEXTS, text)
        pages.num_bytes += len(str(text[1]))

    def _prompt(self, pages: Pages, trajectory: Trajectory) -> Prompt:
        """The stored prompt of a trajectory: that of an earlier sample of the same task where it is the same."""
        ids = pack_ints(trajectory.rows[0].prompt_ids) if trajectory.rows else b""
        known = self._prompts.get(trajectory.uid)
        if known is not None and known.begins(ids, trajectory.messages):
            return known
        opening = _opening(trajectory.messages)
        prompt = Prompt(self._next_prompt, ids, opening, encode(opening))
        self._next_prompt += 1
        pages.add(schema.PROMPTS, (prompt.id, label(trajectory.uid), ids, prompt.text))
        pages.num_bytes += len(ids)
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
