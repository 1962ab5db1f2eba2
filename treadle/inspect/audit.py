"""Audit: proof from the journal that a run skipped no task and trained none twice, whatever ended it in between.

Owns the state of each position: admitted, then trained or removed, or still open. A resume goes back to a checkpoint,
and the states with it: what was trained after that checkpoint is trained again, and counts once. Trusts no checkpoint:
what one says is open must be what the events say is open, so a task that the run lost is found.
Where a sampler chooses tasks (`data.sampler`), a position is a draw, and a task may be drawn often or not at all: those
that it never drew are skipped, not lost, and their number must be what the draws of the journal come to.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from treadle.errors import RunError
from treadle.journal import Event, Filter, JournalReader


class _TaskStatus(StrEnum):
    """Status of the task at a position."""

    OPEN = "open"
    TRAINED = "trained"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Audit:
    """What the journal of a run proves."""

    starts: int
    steps: int
    trained: int
    removed: int
    open: int
    trained_again: int
    """Tasks of steps that a crash undid."""
    reused: int
    """Trajectories that an earlier start had finished, and that were not sampled again."""
    continued: int
    """Sessions that went on from tokens of an earlier start."""
    problems: tuple[str, ...]
    sampler: "SamplerBooks | None" = None
    """What a sampler chose, where one does."""


@dataclass(frozen=True, slots=True)
class SamplerBooks:
    """Tasks of a run by what its sampler did with them."""

    name: str
    tasks: int
    drawn: int
    """Tasks that were drawn at least once."""
    repeated: int
    """Draws of a task that was drawn before."""

    @property
    def skipped(self) -> int:
        """Tasks that it did not draw."""
        return self.tasks - self.drawn


@dataclass(frozen=True, slots=True)
class _CheckpointMark:
    """Identity of a checkpoint: two with the same step, frontier and open tasks have the same states."""

    step: int
    position: int
    """Of the next task to be admitted for the first time."""
    open: frozenset[int]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "_CheckpointMark":
        return cls(fields["step"], fields["position"], frozenset(fields["open"]))


_BEGINNING = _CheckpointMark(0, 0, frozenset())


@dataclass(slots=True)
class _TaskStates:
    """Status of every position, with an undo log back to each checkpoint."""

    statuses: dict[int, _TaskStatus] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    """Those of `statuses` that are open."""
    admitted: int = 0
    """The position after the last that was admitted."""
    names: dict[int, str] = field(default_factory=dict)
    """The uid each position was admitted with."""
    repeats: dict[int, int | None] = field(default_factory=dict)
    """How often the task of each position was drawn before; None where no sampler chooses."""
    sampler: Mapping[str, Any] = field(default_factory=dict)
    """What the first start said of its sampler: its name, the tasks it has, and those drawn by then."""
    first_draws: int = 0
    """Positions of `statuses`, from where the record begins, whose task was not drawn before."""
    changes: list[tuple[int, _TaskStatus | None]] = field(default_factory=list)
    """Every change, as the position and its status before."""
    checkpoints: dict[_CheckpointMark, int] = field(default_factory=lambda: {_BEGINNING: 0})
    """How many changes there were at each."""
    readmitted: set[int] = field(default_factory=set)
    """Positions that may be admitted though they are open: a resume left them, or they became too old."""
    first: _CheckpointMark = _BEGINNING
    """Where the record begins."""
    step: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def move(self, position: int, status: _TaskStatus) -> None:
        self.changes.append((position, self.statuses.get(position)))
        self._put(position, status)
        self.admitted = max(self.admitted, position + 1)

    def go_back(self, mark: _CheckpointMark) -> None:
        """Undo all changes after a checkpoint."""
        length = self.checkpoints.get(mark)
        if length is None:
            self.problems.append(
                f"start {self.counts['starts']} went back to step {mark.step} with {len(mark.open)} open tasks of "
                f"{mark.position}: no such checkpoint is recorded"
            )
            return
        while len(self.changes) > length:
            position, before = self.changes.pop()
            self.counts["again"] += self.statuses[position] is _TaskStatus.TRAINED
            self._put(position, before)
        self.checkpoints = {saved: at for saved, at in self.checkpoints.items() if at <= length}
        self._go_on(mark)

    def start_from(self, mark: _CheckpointMark) -> None:
        """Begin with the checkpoint of another run: what is open there is open here; the rest is that run's."""
        self.first = mark
        self.checkpoints = {mark: 0}
        for position in mark.open:
            self._put(position, _TaskStatus.OPEN)
        self._go_on(mark)

    def _go_on(self, mark: _CheckpointMark) -> None:
        self.step, self.admitted, self.readmitted = mark.step, mark.position, set(mark.open)

    def _put(self, position: int, status: _TaskStatus | None) -> None:
        if self.repeats.get(position) == 0 and position >= self.first.position:
            self.first_draws += (status is not None) - (position in self.statuses)
        if status is None:
            del self.statuses[position]
        else:
            self.statuses[position] = status
        if status is _TaskStatus.OPEN:
            self.open.add(position)
        else:
            self.open.discard(position)


def audit(run_dir: Path) -> Audit:
    """Read every event of a run, in order, and follow the state of each task."""
    states = _TaskStates()
    with JournalReader.open(run_dir) as reader:
        for event in reader.iter_events():
            if not event.is_intact:
                states.problems.append(f"event {event.id} ({event.kind}) of the journal is not as it was written")
            elif event.kind == "dropped_events":
                lost = event.fields["count"]
                states.problems.append(f"the record is not complete: logging.journal_max_mb let {lost} events go")
            else:
                _apply_event(states, event)
        states.problems += _find_damage(reader)
    if not states.counts["starts"] and not states.problems:
        raise RunError(f"{run_dir} is no training run: its journal has no start of one")
    _find_gaps(states)
    statuses = Counter(states.statuses.values())
    return Audit(
        starts=states.counts["starts"],
        steps=states.step - states.first.step,
        trained=statuses[_TaskStatus.TRAINED],
        removed=statuses[_TaskStatus.REMOVED],
        open=statuses[_TaskStatus.OPEN],
        trained_again=states.counts["again"],
        reused=states.counts["reused"],
        continued=states.counts["continued"],
        problems=tuple(states.problems),
        sampler=_count_draws(states),
    )


def _find_damage(reader: JournalReader) -> Iterator[str]:
    """Trajectories whose rows are not as they were written, tokens and messages included."""
    for entry in reader.trajectories(Filter(superseded=True)):
        if not entry.headline.is_intact:
            name = f"{entry.headline.uid}/{entry.headline.sample}, attempt {entry.headline.attempt}"
            yield f"trajectory {name} is not as it was written"


def _apply_event(states: _TaskStates, event: Event) -> None:
    fields = event.fields
    if event.kind == "resume":
        mark = _CheckpointMark.of(fields)
        states.counts["starts"] += 1
        if states.counts["starts"] == 1:
            states.sampler = {name: fields[name] for name in ("sampler", "tasks", "drawn") if name in fields}
        if states.counts["starts"] == 1 and mark != _BEGINNING:
            states.start_from(mark)
        else:
            states.go_back(mark)
    elif event.kind == "checkpoint":
        _check(states, _CheckpointMark.of(fields))
        if (books := _count_draws(states)) is not None and books.drawn != fields["drawn"]:
            saved = f"the checkpoint after step {fields['step']}"
            states.problems.append(f"{saved} has {fields['drawn']} tasks that were drawn, but {books.drawn} were")
    elif event.kind == "step":
        _train(states, fields)
    elif event.kind == "admit":
        _admit(states, fields)
    elif event.kind == "stale":
        states.readmitted.add(fields["position"])
    elif event.kind == "remove":
        _expect(states, fields["position"], _TaskStatus.OPEN, "was removed")
        states.move(fields["position"], _TaskStatus.REMOVED)


def _admit(states: _TaskStates, fields: Mapping[str, Any]) -> None:
    position = fields["position"]
    if position in states.readmitted:
        states.readmitted.discard(position)
        _expect(states, position, _TaskStatus.OPEN, "was admitted again")
        if (name := states.names.get(position, fields["uid"])) != fields["uid"]:
            states.problems.append(f"task {position} is {name}, but {fields['uid']} was admitted again for it")
    else:
        _expect(states, position, None, "was admitted")
    states.counts["reused"] += fields["finished"]
    states.counts["continued"] += fields["continued"]
    states.names[position] = fields["uid"]
    states.repeats[position] = fields.get("repeat")
    states.move(position, _TaskStatus.OPEN)


def _train(states: _TaskStates, fields: Mapping[str, Any]) -> None:
    step = fields["step"]
    if step != states.step + 1:
        states.problems.append(f"step {step} follows step {states.step}")
    for position, (uid, _) in zip(fields["positions"], fields["groups"], strict=True):
        _expect(states, position, _TaskStatus.OPEN, f"was trained in step {step}")
        if uid != states.names.get(position, uid):
            states.problems.append(f"task {position} is {states.names[position]}, but step {step} trained {uid} for it")
        states.move(position, _TaskStatus.TRAINED)
    states.step = step


def _check(states: _TaskStates, mark: _CheckpointMark) -> None:
    """Check that a checkpoint lists every open task, and no other."""
    saved = f"the checkpoint after step {mark.step}"
    for position in sorted(states.open - mark.open):
        states.problems.append(f"task {position} was lost: {saved} has no trace of it")
    for position in sorted(mark.open - states.open):
        status = states.statuses.get(position, "never admitted")
        states.problems.append(f"task {position} is open in {saved}, but it was {status}")
    if mark.position != states.admitted:
        states.problems.append(f"{saved} goes on with task {mark.position}, but the next is {states.admitted}")
    states.checkpoints[mark] = len(states.changes)


def _expect(states: _TaskStates, position: int, expected: _TaskStatus | None, what: str) -> None:
    status = states.statuses.get(position)
    if status is not expected:
        states.problems.append(f"task {position} {what}, but it was {status or 'never admitted'}")


def _count_draws(states: _TaskStates) -> SamplerBooks | None:
    """Count the draws of a sampler: all but those of another run that this one went on from."""
    if not states.sampler:
        return None
    drawn, draws = states.sampler["drawn"] + states.first_draws, states.admitted - states.first.position
    return SamplerBooks(states.sampler["sampler"], states.sampler["tasks"], drawn, draws - states.first_draws)


def _find_gaps(states: _TaskStates) -> None:
    """Positions never admitted; as ranges, since one wrong position may leave a gap of any size."""
    expected = states.first.position
    known = (position for position in states.statuses if states.first.position <= position < states.admitted)
    for position in (*sorted(known), states.admitted):
        if position == expected + 1:
            states.problems.append(f"task {expected} was skipped")
        elif position > expected:
            states.problems.append(f"tasks {expected} to {position - 1} were skipped")
        expected = position + 1
