"""Replay: trains a fresh policy on a run's journal; the same trajectories in the same order give the same weights.

Owns nothing of a run; reads its journal. Every step's checksum is compared with the one the engine confirmed then.
Annotation is a replay from the newest checkpoint before the step that is asked for, which writes what the trainer
computes for each token into the journal, in the place of what it has: also for runs that recorded little of it. On a
CPU the replay is exact; elsewhere it says how far its logprobs are from recorded ones. Refused while a run holds the
directory; changes nothing else of a run. Rows are committed a few at a time, so the write-ahead log stays within
`_BATCH_BYTES` and the row that passes it, however large a step is; interrupted, a step has some of its rows annotated.
The journal grows by 25 bytes for each sampled token at most, also beyond logging.journal_max_mb: only a run drops
bodies.
"""

import sqlite3
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from treadle.algorithm.kl import KLControl
from treadle.checkpoint.store import latest, restore_networks, step_of
from treadle.errors import RunError
from treadle.journal import DamagedRecord, Event, JournalReader, RowAnnotation, schema
from treadle.journal.codec import annotation_values, label
from treadle.journal.run_directory import RunLock
from treadle.journal.store import insert_annotations
from treadle.model.checksum import checksum
from treadle.trainer.resume import RESUME
from treadle.trainer.step import StepParts, train_step
from treadle.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step: the checksum recorded then and the one computed now."""

    step: int
    recorded: str | None
    """None where no engine was given the weights of this step, as between two pushes."""
    replayed: str
    annotations: tuple[RowAnnotation, ...] = ()
    """What it computed for each token, where `StepParts.annotations` asks for it."""

    @property
    def equal(self) -> bool:
        return self.recorded in (None, self.replayed)


def replay(parts: StepParts, run_dir: Path, *, checkpoint: Path | None = None) -> Iterator[ReplayedStep]:
    """Train `parts` on each step in turn, or on those after a checkpoint; what a resume undid does not count."""
    control: KLControl | None = None
    done = 0
    if checkpoint is not None:
        progress = restore_networks(checkpoint, parts.policy, parts.critic, parts.reference)
        done, coefficient = progress.step, progress.state.get("kl_coefficient")
        start = KLControl.start(parts.algorithm.kl_ctrl)
        control = start if coefficient is None else replace(start, coefficient=coefficient)
    with JournalReader.open(run_dir) as reader:
        steps, weights = _surviving(reader)
        if not steps:
            raise RunError(f"{run_dir} has no training steps to replay")
        for step in sorted(step for step in steps if step > done):
            event = steps[step]
            groups = _groups(reader, event, run_dir)
            report = train_step(parts, groups, step=step, control=control, baselines=event.fields["baselines"])
            control = report.control
            recorded = weights.get(event.fields["version"])
            yield ReplayedStep(step, recorded, checksum(parts.policy.tensors()), report.annotations)


def first_step_with_tokens(run_dir: Path) -> int | None:
    """The step from which on the journal has the tokens of every step; earlier ones were dropped for its size."""
    with JournalReader.open(run_dir) as reader:
        steps, _ = _surviving(reader)
        first = None
        for step in sorted(steps, reverse=True):
            names = [(uid, *name) for uid, samples in steps[step].fields["groups"] for name in samples]
            found = (reader.headline(*name) for name in names)
            if not all(headline is not None and headline.has_body for headline in found):
                break
            first = step
        return first


def _surviving(reader: JournalReader) -> tuple[dict[int, Event], dict[int, str]]:
    """The steps and the checksums of versions that count: a resume undoes what came after its checkpoint."""
    steps: dict[int, Event] = {}
    weights: dict[int, str] = {}
    for event in reader.iter_events():
        if not event.is_intact:
            raise DamagedRecord(f"event {event.id} ({event.kind}) of the journal is not as it was written")
        fields = event.fields
        if event.kind == RESUME:
            steps = {step: done for step, done in steps.items() if step <= fields["step"]}
            weights = {version: proof for version, proof in weights.items() if version <= fields["version"]}
        elif event.kind == "step":
            steps[fields["step"]] = event
        elif event.kind == "weights":
            weights[fields["version"]] = fields["checksum"]
    return steps, weights


def _groups(reader: JournalReader, event: Event, run_dir: Path) -> list[Group]:
    groups = []
    for uid, samples in event.fields["groups"]:
        task = reader.task(uid)
        trajectories = [_trajectory(reader, uid, sample, attempt, run_dir) for sample, attempt in samples]
        if task is None:
            raise RunError(f"{run_dir} has no task {uid!r}: it cannot be replayed")
        groups.append(Group(task, tuple(trajectories)))
    return groups


def _trajectory(reader: JournalReader, uid: str, sample: int, attempt: int, run_dir: Path) -> Trajectory:
    entry = reader.trajectory(uid, sample, attempt)
    if entry is None or not entry.headline.has_body:
        raise RunError(
            f"{run_dir} no longer has the tokens of {uid}/{sample}: logging.journal_max_mb let them go, so the run "
            "cannot be replayed from here; a checkpoint of a later step (checkpoint.save_freq, checkpoint.keep_last) "
            "lets the steps after it be annotated"
        )
    if not entry.headline.is_intact:
        raise DamagedRecord(f"trajectory {uid}/{sample} in {run_dir} is not as it was written: it cannot be replayed")
    return entry.trajectory


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
