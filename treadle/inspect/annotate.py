"""Annotation of a run by replay: what the trainer computed for each token, also for runs that recorded little of it.

Trains a fresh policy on the run's journal, as `replay` does, from the newest checkpoint before the step that is asked
for, and writes the annotations of each step into the journal, in the place of those it has. On a CPU the replay is
exact; elsewhere it says how far its logprobs are from recorded ones. Refused while a run holds the directory; changes
nothing else of a run.

Rows are committed a few at a time, so the write-ahead log stays within `_BATCH_BYTES` and the row that passes it,
however large a step is; interrupted, a step has some of its rows annotated. The journal itself grows, by 25 bytes for
each sampled token at most, also beyond logging.journal_max_mb: only a run drops bodies.
"""

import sqlite3
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from treadle.checkpoint.store import latest, step_of
from treadle.errors import RunError
from treadle.inspect.replay import ReplayedStep, first_step_with_tokens, replay
from treadle.journal import JournalReader, RowAnnotation, schema
from treadle.journal.codec import annotation_values, label
from treadle.journal.run_directory import RunLock
from treadle.journal.store import insert_annotations
from treadle.trainer.step import StepParts

_BATCH_BYTES = 8 << 20
"""Of annotations in one transaction; as large as the write-ahead log becomes before it is folded back."""


@dataclass(frozen=True, slots=True)
class AnnotatedStep:
    """A step whose rows are annotated now."""

    replayed: ReplayedStep
    num_rows: int
    largest_difference: float | None
    """Between logprobs that were recorded during the run and those of the replay; None where none were recorded."""


def annotate_run(parts: StepParts, run_dir: Path, step: int | None = None) -> Iterator[AnnotatedStep]:
    """Replay a run with fresh `parts`, and annotate all of its steps that still have their tokens, or one."""
    lock = RunLock.take(run_dir, time.time())
    try:
        connection = schema.connect_writer(run_dir / schema.FILE_NAME, max_bytes=8 * _BATCH_BYTES)
        try:
            yield from _annotate(connection, replace(parts, annotations=1.0), run_dir, step)
        finally:
            connection.close()
    finally:
        lock.release()


def journal_bytes(run_dir: Path) -> int:
    """Bytes of a run's journal on the disk, its write-ahead log included."""
    path = run_dir / schema.FILE_NAME
    files = (path, path.with_name(f"{path.name}-wal"))
    return sum(file.stat().st_size for file in files if file.is_file())


def start_of_replay(run_dir: Path, step: int | None = None) -> Path | None:
    """The checkpoint that a replay begins with; None: the model that the run began with.

    For one step, the newest before it. For all, none where the journal has the tokens of every step; else the earliest
    from which on it has them.
    """
    if step is not None:
        return latest(run_dir, step - 1)
    first = first_step_with_tokens(run_dir)
    if first is None or first == 1:
        return None
    later = [path for at in range(first - 1, _last_step(run_dir)) if (path := latest(run_dir, at)) is not None]
    return next((path for path in later if step_of(path) >= first - 1), None)


def _last_step(run_dir: Path) -> int:
    with JournalReader.open(run_dir) as reader:
        return max((event.fields["step"] for event in reader.iter_events("step")), default=0)


def _annotate(
    connection: sqlite3.Connection, parts: StepParts, run_dir: Path, step: int | None
) -> Iterator[AnnotatedStep]:
    for done in replay(parts, run_dir, checkpoint=start_of_replay(run_dir, step)):
        if step is None or done.step == step:
            difference = _compare(connection, done.annotations)
            for rows in _batches(done.annotations):
                connection.execute("BEGIN")
                insert_annotations(connection, [annotation_values(row) for row in rows])
                connection.execute("COMMIT")
            yield AnnotatedStep(done, len(done.annotations), difference)
        if done.step == step:
            return
    if step is not None:
        raise RunError(f"{run_dir} has no training step {step} to annotate")


def _batches(rows: Sequence[RowAnnotation]) -> Iterator[list[RowAnnotation]]:
    """Rows in order, as many at a time as `_BATCH_BYTES` allows, one at least."""
    batch: list[RowAnnotation] = []
    num_bytes = 0
    for row in rows:
        size = sum(len(value) for value in row if isinstance(value, bytes))
        if batch and num_bytes + size > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(row)
        num_bytes += size
    if batch:
        yield batch


def _compare(connection: sqlite3.Connection, rows: Sequence[RowAnnotation]) -> float | None:
    """The largest difference between recorded logprobs and these."""
    largest = None
    for row in rows:
        found = connection.execute(
            "SELECT a.trainer FROM annotations a JOIN trajectories t ON t.id = a.trajectory "
            "WHERE t.uid = ? AND t.sample = ? AND t.attempt = ? AND a.position = ? AND a.step = ?",
            (label(row.uid), row.sample, row.attempt, row.position, row.step),
        ).fetchone()
        if found is None or found[0] is None or row.trainer is None or len(found[0]) != len(row.trainer):
            continue
        pairs = zip(array("f", found[0]), array("f", row.trainer), strict=True)
        here = max((abs(one - other) for one, other in pairs), default=0.0)
        largest = here if largest is None else max(largest, here)
    return largest
