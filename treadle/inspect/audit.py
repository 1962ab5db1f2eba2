"""Audit: proof from the journal that a run skipped no task and trained none twice, whatever ended it in between.

Owns the state of each position: admitted, then trained or removed, or still open. A resume goes back to a checkpoint,
and the states with it: what was trained after that checkpoint is trained again, and counts once. Trusts no checkpoint:
what one says is open must be what the events say is open, so a task that the run lost is found.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from treadle.errors import RunError
from treadle.journal import Event, Filter, JournalReader

_KINDS = frozenset({"admit", "stale", "remove", "step", "checkpoint", "resume", "dropped_events"})


class _TaskStatus(StrEnum):
    """Where a task of some position is."""

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


@dataclass(frozen=True, slots=True)
class _CheckpointMark:
    """Tells checkpoints apart: two with the same step, frontier and open tasks have the same books."""

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
    """Positions and where they are, with the way back to each checkpoint."""

    places: dict[int, _TaskStatus] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    """Those of `places` that are open."""
    admitted: int = 0
    """The position after the last that was admitted."""
    names: dict[int, str] = field(default_factory=dict)
    """The uid each position was admitted with."""
    changes: list[tuple[int, _TaskStatus | None]] = field(default_factory=list)
    """Every change, as the position and where it was before."""
    checkpoints: dict[_CheckpointMark, int] = field(default_factory=lambda: {_BEGINNING: 0})
    """How many changes there were at each."""
    readmitted: set[int] = field(default_factory=set)
    """Positions that may be admitted though they are open: a resume left them, or they became too old."""
    first: _CheckpointMark = _BEGINNING
    """Where the books begin."""
    step: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def move(self, position: int, place: _TaskStatus) -> None:
        self.changes.append((position, self.places.get(position)))
        self._put(position, place)
        self.admitted = max(self.admitted, position + 1)

    def go_back(self, mark: _CheckpointMark) -> None:
        """To where a checkpoint was saved."""
        length = self.checkpoints.get(mark)
        if length is None:
            self.problems.append(
                f"start {self.counts['starts']} went back to step {mark.step} with {len(mark.open)} open tasks of "
                f"{mark.position}: no such checkpoint is recorded"
            )
            return
        while len(self.changes) > length:
            position, before = self.changes.pop()
            self.counts["again"] += self.places[position] is _TaskStatus.TRAINED
            self._put(position, before)
        self.checkpoints = {saved: at for saved, at in self.checkpoints.items() if at <= length}
        self._go_on(mark)

    def start_from(self, mark: _CheckpointMark) -> None:
        """Begin with the checkpoint of another run: what it left open is open here, all else before it is not ours."""
        self.first = mark
        self.checkpoints = {mark: 0}
        for position in mark.open:
            self._put(position, _TaskStatus.OPEN)
        self._go_on(mark)

    def _go_on(self, mark: _CheckpointMark) -> None:
        self.step, self.admitted, self.readmitted = mark.step, mark.position, set(mark.open)

    def _put(self, position: int, place: _TaskStatus | None) -> None:
        if place is None:
            del self.places[position]
        else:
            self.places[position] = place
        if place is _TaskStatus.OPEN:
            self.open.add(position)
        else:
            self.open.discard(position)


def audit(run_dir: Path) -> Audit:
    """Read every event of a run, in order, and keep the books."""
    books = _TaskStates()
    with JournalReader.open(run_dir) as reader:
        for event in _events(reader):
            if not event.is_intact:
                books.problems.append(f"event {event.id} ({event.kind}) of the journal is not as it was written")
            elif event.kind == "dropped_events":
                lost = event.fields["count"]
                books.problems.append(f"the record is not complete: logging.journal_max_mb let {lost} events go")
            else:
                _apply_event(books, event)
        books.problems += _find_damage(reader)
    if not books.counts["starts"]:
        raise RunError(f"{run_dir} is no training run: its journal has no start of one")
    _find_gaps(books)
    places = Counter(books.places.values())
    return Audit(
        starts=books.counts["starts"],
        steps=books.step - books.first.step,
        trained=places[_TaskStatus.TRAINED],
        removed=places[_TaskStatus.REMOVED],
        open=places[_TaskStatus.OPEN],
        trained_again=books.counts["again"],
        reused=books.counts["reused"],
        continued=books.counts["continued"],
        problems=tuple(books.problems),
    )


def _events(reader: JournalReader) -> Iterator[Event]:
    last = 0
    while found := reader.events(after=last):
        yield from (event for event in found if event.kind in _KINDS or not event.is_intact)
        last = found[-1].id


def _find_damage(reader: JournalReader) -> Iterator[str]:
    """Trajectories whose rows are not as they were written, tokens and messages included."""
    for entry in reader.trajectories(Filter(superseded=True)):
        if not entry.headline.is_intact:
            name = f"{entry.headline.uid}/{entry.headline.sample}, attempt {entry.headline.attempt}"
            yield f"trajectory {name} is not as it was written"


def _apply_event(books: _TaskStates, event: Event) -> None:
    fields = event.fields
    if event.kind == "resume":
        _resume(books, _CheckpointMark.of(fields))
    elif event.kind == "checkpoint":
        _check(books, _CheckpointMark.of(fields))
    elif event.kind == "step":
        _train(books, fields)
    elif event.kind == "admit":
        _admit(books, fields)
    elif event.kind == "stale":
        books.readmitted.add(fields["position"])
    elif event.kind == "remove":
        _expect(books, fields["position"], _TaskStatus.OPEN, "was removed")
        books.move(fields["position"], _TaskStatus.REMOVED)


def _resume(books: _TaskStates, mark: _CheckpointMark) -> None:
    books.counts["starts"] += 1
    if books.counts["starts"] == 1 and mark != _BEGINNING:
        books.start_from(mark)
    else:
        books.go_back(mark)


def _admit(books: _TaskStates, fields: Mapping[str, Any]) -> None:
    position = fields["position"]
    if position in books.readmitted:
        books.readmitted.discard(position)
        _expect(books, position, _TaskStatus.OPEN, "was admitted again")
    else:
        _expect(books, position, None, "was admitted")
    books.counts["reused"] += fields["finished"]
    books.counts["continued"] += fields["continued"]
    books.names[position] = fields["uid"]
    books.move(position, _TaskStatus.OPEN)


def _train(books: _TaskStates, fields: Mapping[str, Any]) -> None:
    step = fields["step"]
    if step != books.step + 1:
        books.problems.append(f"step {step} follows step {books.step}")
    for position, (uid, _) in zip(fields["positions"], fields["groups"], strict=True):
        _expect(books, position, _TaskStatus.OPEN, f"was trained in step {step}")
        if uid != books.names.get(position, uid):
            books.problems.append(f"task {position} is {books.names[position]}, but step {step} trained {uid} for it")
        books.move(position, _TaskStatus.TRAINED)
    books.step = step


def _check(books: _TaskStates, mark: _CheckpointMark) -> None:
    """A checkpoint knows every task that is open, and no other."""
    saved = f"the checkpoint after step {mark.step}"
    for position in sorted(books.open - mark.open):
        books.problems.append(f"task {position} was lost: {saved} has no trace of it")
    for position in sorted(mark.open - books.open):
        place = books.places.get(position, "never admitted")
        books.problems.append(f"task {position} is open in {saved}, but it was {place}")
    if mark.position != books.admitted:
        books.problems.append(f"{saved} goes on with task {mark.position}, but the next is {books.admitted}")
    books.checkpoints[mark] = len(books.changes)


def _expect(books: _TaskStates, position: int, expected: _TaskStatus | None, what: str) -> None:
    place = books.places.get(position)
    if place is not expected:
        books.problems.append(f"task {position} {what}, but it was {place or 'never admitted'}")


def _find_gaps(books: _TaskStates) -> None:
    """Positions never admitted; as ranges, since one wrong position may leave a gap of any size."""
    expected = books.first.position
    known = (position for position in books.places if books.first.position <= position < books.admitted)
    for position in (*sorted(known), books.admitted):
        if position == expected + 1:
            books.problems.append(f"task {expected} was skipped")
        elif position > expected:
            books.problems.append(f"tasks {expected} to {position - 1} were skipped")
        expected = position + 1
