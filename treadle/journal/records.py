"""Journal records: what is written beside trajectories and tasks, and what a reader gets back.

Owns the records; no SQL, no files.
Invariant: records are frozen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from treadle.errors import Boundary
from treadle.types import Outcome, Provenance, RecordedCompletion, Score, Status, StopReason, Task, Timing, Trajectory


class RunStatus(StrEnum):
    """Where a run stands, as `run.json` says. A run that died without a word is found and marked by the next one."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    CRASHED = "crashed"


class JournalEvent(NamedTuple):
    """An event on its way to the journal."""

    kind: str
    fields: Mapping[str, Any]


class Measurement(NamedTuple):
    """The metrics of one step on their way to the journal."""

    step: int
    values: Mapping[str, float]


class PartsAdded(NamedTuple):
    """What engines answered to open sessions, on its way to the journal."""

    parts: tuple[RecordedCompletion, ...]


class RowAnnotation(NamedTuple):
    """What the trainer computed for each sampled token of a row: float32 arrays, one value where all are the same."""

    uid: str
    sample: int
    attempt: int
    position: int
    """Which row of the trajectory."""
    step: int
    trainer: bytes | None
    """Logprobs as the step trained on them."""
    old: bytes | None
    """At the start of the step; None where it has one optimizer step, and they are the trainer's."""
    reference: bytes | None
    advantage: bytes | None
    entropy: bytes | None
    weight: bytes | None
    """Importance weights."""
    flags: bytes | None
    """One byte for each: 1 clipped, 2 left out of the loss."""


@dataclass(frozen=True, slots=True)
class AnnotatedRow:
    """Arrays of a row that has annotations, as the journal stores them: what it was sampled with, and the trainer's."""

    id: int
    """Of the annotation: later ones have higher ids."""
    trajectory: int
    row: int
    step: int
    num_prompt: int
    mask: bytes
    logprobs: bytes
    versions: bytes
    trainer: bytes
    """Of the policy at the start of the step."""


class AnnotationsAdded(NamedTuple):
    """Annotations of a step, on their way to the journal."""

    rows: tuple[RowAnnotation, ...]


class SessionEnded(NamedTuple):
    """A session whose parts are no longer needed."""

    uid: str
    sample: int


class MetricsRewound(NamedTuple):
    """A run that goes on after `step`: what was measured later is measured anew."""

    step: int


Record = Trajectory | Task | JournalEvent | Measurement | PartsAdded | AnnotationsAdded | SessionEnded | MetricsRewound


class Stamped(NamedTuple):
    """Anything on its way to the journal, and when it was handed over (seconds since the epoch)."""

    time: float
    record: Record


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened: a stall, a retry, a failure, a weight update."""

    id: int
    time: float
    kind: str
    fields: Mapping[str, Any]
    start: int
    """By which start of the run, counted from 1."""
    is_intact: bool = True
    """False where its row is not as it was written."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """What was measured at one step."""

    id: int
    time: float
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Headline:
    """What stays of a trajectory for good: how it ended, its reward, counts and timings."""

    id: int
    start: int
    """Which start of the run wrote it, counted from 1."""
    written_at: float
    uid: str
    sample: int
    attempt: int
    outcome: Outcome
    reward: Score | None
    """Without `extra`, which is part of the body."""
    timing: Timing
    data_source: str
    num_rows: int
    num_turns: int
    prompt_tokens: int
    response_tokens: int
    num_sampled: int
    has_body: bool
    """False once the tokens and messages were dropped to keep the journal within its size."""
    provenance: Provenance
    is_intact: bool
    """False where a row of it, or of its body where that was read, is not as it was written."""


class SessionTime(NamedTuple):
    """When a session that ended was open (seconds since the epoch)."""

    id: int
    """Of its trajectory."""
    uid: str
    start: int
    """Which start of the run wrote it, counted from 1."""
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class TrajectoryEntry:
    """A trajectory as the journal holds it. Without a body, its rows and messages are empty."""

    headline: Headline
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class PartEntry:
    """A part as the journal holds it."""

    start: int
    """Which start of the run wrote it, counted from 1."""
    written_at: float
    part: RecordedCompletion
    is_intact: bool = True
    """False where its row is not as it was written."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which trajectories a reader wants; a field left out does not narrow."""

    uid: str | None = None
    uid_prefix: str | None = None
    data_source: str | None = None
    status: Status | None = None
    reason: StopReason | None = None
    boundary: Boundary | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    superseded: bool = False
    """Also show earlier attempts that a later one of the same (uid, sample) replaced."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many trajectories there are, each (uid, sample) counted once, by its latest attempt."""

    trajectories: int
    by_reason: Mapping[StopReason, int]
    by_boundary: Mapping[Boundary, int]
    by_source: Mapping[str, int]
    superseded: int
    without_body: int
