"""Replay: trains a fresh policy on a run's journal; the same trajectories in the same order give the same weights.

Owns nothing of a run; reads its journal. Every step's checksum is compared with the one the engine confirmed then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from treadle.algorithm.kl import KLControl
from treadle.checkpoint.store import restore_networks
from treadle.errors import RunError
from treadle.journal import DamagedRecord, Event, JournalReader, RowAnnotation
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
