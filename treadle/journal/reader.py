"""Journal reader: read-only queries of a run, for resume, `inspect` and viewers; also while a run writes.

Owns a read-only connection. Never writes, and never holds a snapshot between two answers, so that it cannot keep the
writer's log from being folded back into the file.
Invariant: every trajectory it gives is whole, or says that its body was dropped, or that it is not as it was written.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from treadle.errors import Boundary, RunError
from treadle.journal import schema
from treadle.journal.codec import (
    decode,
    is_intact,
    label,
    read_extra,
    read_headline,
    read_messages,
    read_part,
    read_row,
    read_task,
    seal,
)
from treadle.journal.records import (
    AnnotatedRow,
    Counts,
    Event,
    Filter,
    Headline,
    Metrics,
    PartEntry,
    SessionTime,
    TrajectoryEntry,
)
from treadle.types import Status, StopReason, Task, Trajectory

_PAGE = 64
_MANY = 10_000
_HEADLINE = ",".join(f"t.{column}" for column in schema.TRAJECTORIES.columns)
_PART = ",".join(schema.PARTS.columns)
_HAS_BODY = "t.id >= (SELECT ifnull(min(trajectory), 1 << 62) FROM texts)"
_LATEST = (
    "NOT EXISTS (SELECT 1 FROM trajectories later "
    "WHERE later.uid = t.uid AND later.sample = t.sample AND later.id > t.id)"
)
EVERYTHING = Filter()


class DamagedRecord(RunError):
    """A record of a journal that is not as it was written."""


class JournalReader:
    """Queries of a run, live or over."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    @classmethod
    def open(cls, run_dir: Path) -> "JournalReader":
        path = run_dir / schema.FILE_NAME
        return cls(schema.connect_reader(path), path)

    def headlines(self, wanted: Filter = EVERYTHING, *, after: int = 0) -> Iterator[Headline]:
        """Headline of each trajectory, in the order they were written; `after` an id: only later ones."""
        while page := self._page(wanted, after):
            yield from page
            after = page[-1].id

    def trajectories(self, wanted: Filter = EVERYTHING, *, after: int = 0) -> Iterator[TrajectoryEntry]:
        """Whole trajectories, in the order they were written."""
        while True:
            with self._snapshot():
                entries = [self._entry(headline) for headline in self._page(wanted, after)]
            if not entries:
                return
            yield from entries
            after = entries[-1].headline.id

    def session_times(self, after: int = 0) -> Iterator[SessionTime]:
        """When each session was open, failed attempts included, in the order they were written; `after` an id."""
        while found := self._execute(
            "SELECT id, uid, start, started_at, total_s FROM trajectories WHERE id > ? ORDER BY id LIMIT ?",
            (after, _MANY),
        ):
            for id, uid, start, began, total_s in found:
                yield SessionTime(id, uid, start, began, began + total_s)
            after = found[-1][0]

    def session_times_before(self, before: int | None) -> tuple[SessionTime, ...]:
        """A page of them, the newest first: those written before an id, or the newest of all."""
        found = self._execute(
            "SELECT id, uid, start, started_at, total_s FROM trajectories WHERE id < ? ORDER BY id DESC LIMIT ?",
            (2**63 - 1 if before is None else before, _MANY),
        )
        return tuple(SessionTime(id, uid, start, began, began + total_s) for id, uid, start, began, total_s in found)

    def trajectory(self, uid: str, sample: int, attempt: int | None = None) -> TrajectoryEntry | None:
        """One trajectory: the latest of this (uid, sample), or the latest with this attempt number."""
        with self._snapshot():
            found = self._execute(
                f"SELECT {_HEADLINE}, {_HAS_BODY} FROM trajectories t "
                "WHERE uid = ? AND sample = ? AND (? IS NULL OR attempt = ?) ORDER BY id DESC LIMIT 1",
                (label(uid), sample, attempt, attempt),
            )
            return self._entry(read_headline(found[0][:-1], bool(found[0][-1]))) if found else None

    def entry(self, id: int) -> TrajectoryEntry | None:
        """One trajectory by its number in the journal, also where a later one has its name."""
        with self._snapshot():
            found = self._execute(f"SELECT {_HEADLINE}, {_HAS_BODY} FROM trajectories t WHERE id = ?", (id,))
            return self._entry(read_headline(found[0][:-1], bool(found[0][-1]))) if found else None

    def headline(self, uid: str, sample: int, attempt: int) -> Headline | None:
        """One trajectory without its body: the latest with this attempt number."""
        found = self._execute(
            f"SELECT {_HEADLINE}, {_HAS_BODY} FROM trajectories t "
            "WHERE uid = ? AND sample = ? AND attempt = ? ORDER BY id DESC LIMIT 1",
            (label(uid), sample, attempt),
        )
        return read_headline(found[0][:-1], bool(found[0][-1])) if found else None

    def attempts(self, uid: str) -> tuple[TrajectoryEntry, ...]:
        """Every attempt at a task: sample by sample, in the order they were written."""
        with self._snapshot():
            found = self._execute(
                f"SELECT {_HEADLINE}, {_HAS_BODY} FROM trajectories t WHERE uid = ? ORDER BY sample, id", (label(uid),)
            )
            return tuple(self._entry(read_headline(stored[:-1], bool(stored[-1]))) for stored in found)

    def parts(self, uid: str) -> tuple[PartEntry, ...]:
        """What is left of sessions that had not ended: sample by sample, row by row, in the order of their requests."""
        found = self._execute(f"SELECT {_PART} FROM parts WHERE uid = ? ORDER BY sample, row, number", (label(uid),))
        return tuple(read_part(uid, stored) for stored in found)

    def annotated_rows(
        self, trajectory: int | None = None, *, after: int = 0, limit: int = 1000
    ) -> tuple[AnnotatedRow, ...]:
        """Rows whose logprobs the trainer computed: of one trajectory, or those annotated after annotation `after`."""
        if not self._execute("SELECT 1 FROM sqlite_master WHERE name = 'annotations'"):
            return ()
        narrowed = "" if trajectory is None else "AND a.trajectory = ? "
        found = self._execute(
            "SELECT a.id, a.trajectory, a.position, a.step, length(ifnull(r.prompt_ids, p.ids)) / 4, r.mask, "
            "r.logprobs, r.versions, ifnull(a.old, a.trainer) FROM annotations a "
            "JOIN rows r ON r.trajectory = a.trajectory AND r.position = a.position "
            "JOIN trajectories t ON t.id = a.trajectory JOIN prompts p ON p.id = t.prompt "
            f"WHERE a.id > ? {narrowed}AND ifnull(a.old, a.trainer) IS NOT NULL ORDER BY a.id LIMIT ?",
            (after, limit) if trajectory is None else (after, trajectory, limit),
        )
        return tuple(AnnotatedRow(*stored) for stored in found)

    def sampled_uids(self) -> frozenset[str]:
        """Tasks of which anything was sampled, as columns have their uids (`label`)."""
        return frozenset(uid for (uid,) in self._execute("SELECT uid FROM trajectories UNION SELECT uid FROM parts"))

    def newest_of_validation(self, step: int) -> list[tuple[str, int, int, int]]:
        """uid, sample, attempt and id of the newest trajectory of each sample of a validation, ordered by uid."""
        return self._execute(
            # A range of the index; SQLite takes the attempt from the row that holds the maximum.
            "SELECT uid, sample, attempt, max(id) FROM trajectories WHERE uid >= ? AND uid < ? "
            "GROUP BY uid, sample ORDER BY uid, sample",
            (f"validation-{step}/", f"validation-{step}0"),
        )

    def task(self, uid: str) -> Task | None:
        """A task as it was given."""
        found = self._execute("SELECT uid, data_source, task, digest FROM tasks WHERE uid = ?", (label(uid),))
        if not found:
            return None
        if not is_intact(found[0]):
            raise DamagedRecord(f"the task {uid!r} in {self._path} is not as it was written")
        return read_task(*found[0][:-1])

    def finished(self) -> set[tuple[str, int]]:
        """The (uid, sample) that need not be run again: whose latest attempt neither failed nor was aborted."""
        found = self._execute(
            # SQLite takes the other columns from the row that holds the maximum.
            "SELECT uid, sample, status, reason, max(id) FROM trajectories GROUP BY uid, sample"
        )
        return {
            (uid, sample)
            for uid, sample, status, reason, _ in found
            if status != Status.FAILED and reason != StopReason.ABORT
        }

    def counts(self) -> Counts:
        """How many trajectories there are, by how they ended and where they came from."""
        with self._snapshot():
            reasons = self._count_by("reason")
            boundaries = self._count_by("boundary")
            return Counts(
                trajectories=sum(reasons.values()),
                by_reason={StopReason(reason): count for reason, count in reasons.items()},
                by_boundary={Boundary(boundary): count for boundary, count in boundaries.items() if boundary},
                by_source=self._count_by("data_source"),
                superseded=self._count(f"NOT {_LATEST}"),
                without_body=self._count(f"NOT {_HAS_BODY}"),
            )

    def events(self, after: int = 0, kind: str | None = None, limit: int = 1000) -> tuple[Event, ...]:
        """At most `limit` events that came after event `after`, oldest first."""
        found = self._execute(
            "SELECT id, start, time, kind, fields, digest FROM events "
            "WHERE id > ? AND (? IS NULL OR kind = ?) ORDER BY id LIMIT ?",
            (after, kind, kind, limit),
        )
        return tuple(_event(*stored) for stored in found)

    def iter_events(self, kind: str | None = None, *, after: int = 0) -> Iterator[Event]:
        """Every event, or those of one kind, oldest first; `after` an id: only later ones."""
        while found := self.events(after, kind):
            yield from found
            after = found[-1].id

    def metrics(self, after: int = 0, limit: int = 1000) -> tuple[Metrics, ...]:
        """At most `limit` measurements that came after measurement `after`, oldest first."""
        found = self._execute(
            "SELECT id, time, step, items FROM metrics WHERE id > ? ORDER BY id LIMIT ?", (after, limit)
        )
        return tuple(Metrics(id, time, step, self._measured(step, items)) for id, time, step, items in found)

    def _measured(self, step: int, items: str) -> Mapping[str, float]:
        try:
            values: Mapping[str, float] = decode(items)
        except ValueError:
            raise DamagedRecord(f"a measurement of step {step} in {self._path} is not as it was written") from None
        return values

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Several queries of one snapshot."""
        self._execute("BEGIN")
        try:
            yield
        finally:
            if self._connection.in_transaction:
                self._execute("COMMIT")

    def _page(self, wanted: Filter, after: int) -> list[Headline]:
        condition, values = _where(wanted)
        found = self._execute(
            f"SELECT {_HEADLINE}, {_HAS_BODY} FROM trajectories t "
            f"WHERE t.id > ?{condition} ORDER BY t.id LIMIT {_PAGE}",
            (after, *values),
        )
        return [read_headline(stored[:-1], bool(stored[-1])) for stored in found]

    def _entry(self, headline: Headline) -> TrajectoryEntry:
        bare = Trajectory(
            headline.uid,
            headline.sample,
            (),
            headline.outcome,
            headline.reward,
            timing=headline.timing,
            attempt=headline.attempt,
            data_source=headline.data_source,
            provenance=headline.provenance,
        )
        return self._with_body(bare, headline) if headline.has_body else TrajectoryEntry(headline, bare)

    def _with_body(self, bare: Trajectory, headline: Headline) -> TrajectoryEntry:
        found = self._execute(
            "SELECT p.ids, p.messages, x.messages, x.extra, x.score_extra, t.body_digest FROM trajectories t "
            "JOIN prompts p ON p.id = t.prompt JOIN texts x ON x.trajectory = t.id WHERE t.id = ?",
            (headline.id,),
        )
        rows = self._execute(
            "SELECT prompt_ids, ids, mask, logprobs, versions, processed_logprobs, turns FROM rows "
            "WHERE trajectory = ? ORDER BY position",
            (headline.id,),
        )
        if not found:
            return TrajectoryEntry(replace(headline, is_intact=False), bare)
        prompt_ids, opening, messages, extra, score_extra, digest = found[0]
        body = (prompt_ids, opening, *chain.from_iterable(rows), messages, extra, score_extra)
        if not headline.is_intact or seal(body) != digest:
            return TrajectoryEntry(replace(headline, is_intact=False), bare)
        read = [read_row(prompt_ids if own is None else own, *rest) for own, *rest in rows]
        reward = bare.reward and replace(bare.reward, extra=read_extra(score_extra))
        whole = replace(
            bare,
            rows=tuple(read),
            reward=reward,
            messages=read_messages(opening, messages),
            extra=read_extra(extra),
        )
        return TrajectoryEntry(headline, whole)

    def _count_by(self, column: str) -> dict[str, int]:
        found = self._execute(f"SELECT {column}, count(*) FROM trajectories t WHERE {_LATEST} GROUP BY 1")
        return dict(found)

    def _count(self, condition: str) -> int:
        return int(self._execute(f"SELECT count(*) FROM trajectories t WHERE {condition}")[0][0])

    def _execute(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise RunError(f"cannot read the journal {self._path}: {error}{schema.what_is_left(self._path)}") from error


def _event(id: int, start: int, time: float, kind: str, text: str, digest: bytes) -> Event:
    intact = is_intact((start, time, kind, text, digest))
    return Event(id, time, kind, decode(text) if intact else {}, start, intact)


def _where(wanted: Filter) -> tuple[str, Sequence[Any]]:
    """The SQL behind a filter, to follow another condition, and its values."""
    narrowing = {
        "t.uid = ?": None if wanted.uid is None else label(wanted.uid),
        "instr(t.uid, ?) = 1": None if wanted.uid_prefix is None else label(wanted.uid_prefix),
        "t.data_source = ?": None if wanted.data_source is None else label(wanted.data_source),
        "t.status = ?": wanted.status,
        "t.reason = ?": wanted.reason,
        "t.boundary = ?": wanted.boundary,
        "t.reward >= ?": wanted.min_reward,
        "t.reward <= ?": wanted.max_reward,
    }
    given = {condition: value for condition, value in narrowing.items() if value is not None}
    conditions = [*given, *([] if wanted.superseded else [_LATEST])]
    return "".join(f" AND {condition}" for condition in conditions), list(given.values())
