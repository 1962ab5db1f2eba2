"""Timeline of a training run, read from its journal: sampling, training, weight updates, and which waited for which.

Owns what the spans of a run mean and how its time is divided into columns; `timeline_svg` draws. The time between
two starts of a run is left out. Reads the journal and nothing else, once through, whatever its
size; a `TimelineReader` in parts, the newest first.
"""

import os
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil
from pathlib import Path

from treadle.errors import RunError
from treadle.inspect.timeline_svg import COLUMNS, Band, Chart, ChartMark, ChartNote, Lane, draw_svg, format_duration
from treadle.journal import Event, JournalReader, SessionTime
from treadle.observe.step_metrics import Interval, add_up
from treadle.trainer.resume import RESUME

FILE_NAME = "timeline.svg"

_CELLS = 16
"""Parts of a column that sessions are counted in."""

_MAX_NOTES = 250
_MAX_NAMED = 12
_VALIDATION = "validation-"
"""Prefix of the names of validation tasks."""

_WORK = (
    ("trains", (("train", "training", "train"),)),
    ("trainer waits", (("rollout", "waits for samples", "wait"), ("validation", "waits for validation", "hold"))),
    ("pushes weights", (("weights", "weights on their way", "push"),)),
    ("validates", (("validating", "validation", "validate"),)),
    ("saves", (("checkpoint", "checkpoint", "save"),)),
)
"""Lanes of spans: their label, and of each kind of span its name in the journal, its name here and its colour."""


@dataclass(frozen=True, slots=True)
class _Step:
    """The spans that were recorded with one step, or after the last one."""

    start: int
    step: int
    spans: tuple[Interval, ...]

    @property
    def began(self) -> float:
        return min(began for _, began, _ in self.spans)

    @property
    def ended(self) -> float:
        return max(ended for _, _, ended in self.spans)


@dataclass(slots=True)
class _Sessions:
    """Begin and end of sessions, in compact arrays: there may be millions."""

    starts: "array[int]" = field(default_factory=lambda: array("l"))
    began: "array[float]" = field(default_factory=lambda: array("d"))
    ended: "array[float]" = field(default_factory=lambda: array("d"))
    validates: "array[int]" = field(default_factory=lambda: array("b"))

    def add(self, session: SessionTime) -> None:
        self.starts.append(session.start)
        self.began.append(session.began)
        self.ended.append(session.ended)
        self.validates.append(session.uid.startswith(_VALIDATION))

    def __iter__(self) -> Iterator[tuple[int, float, float, int]]:
        return zip(self.starts, self.began, self.ended, self.validates, strict=True)


class _Axis:
    """Time axis, from moments of a start to columns: one start after the other, without the time between them."""

    def __init__(self, ranges: dict[int, tuple[float, float]]) -> None:
        self.seconds = sum(ended - began for began, ended in ranges.values())
        self.starts = sorted(ranges)
        self._ranges = ranges
        self._scale = COLUMNS / max(self.seconds, 1e-9)
        lengths = [ranges[start][1] - ranges[start][0] for start in self.starts]
        self._before = dict(zip(self.starts, accumulate(lengths, initial=0.0), strict=False))

    def column(self, start: int, moment: float) -> float:
        began, ended = self._ranges[start]
        return min(float(COLUMNS), (self._before[start] + min(max(moment, began), ended) - began) * self._scale)

    def marks(self) -> tuple[ChartMark, ...]:
        """Where the run was resumed."""
        return tuple(ChartMark(self._before[start] * self._scale, f"start {start}") for start in self.starts[1:])


def write_timeline(run_dir: Path) -> Path:
    """Draw the timeline of a run into its directory."""
    path = run_dir / FILE_NAME
    drawn = draw_svg(read_timeline(run_dir))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(drawn)
    return path


def read_timeline(run_dir: Path) -> Chart:
    """The timeline of a run; RunError where it did nothing yet."""
    return TimelineReader(run_dir).read()


class TimelineReader:
    """Timeline of a run that goes on: what was read is kept, so that the next picture costs what is new."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._sessions = _Sessions()
        self._begun: dict[int, float] = {}
        self._recorded: list[_Step] = []
        self._event = self._newest = 0
        """Ids that were read through."""
        self._oldest: int | None = None
        """The session through which older ones were read; None before the first."""

    @property
    def share(self) -> float:
        """How much of the run's sessions was read, from 0 to 1."""
        if self._oldest is None or self._oldest == 1:
            return float(self._oldest == 1)
        return (self._newest - self._oldest + 1) / max(self._newest, 1)

    def read(self, budget_s: float | None = None) -> Chart:
        """The timeline up to now; RunError where the run did nothing yet.

        With a budget, of its newest part: as far back as sessions could be read in that time; the next call goes on.
        """
        ends = None if budget_s is None else time.monotonic() + budget_s
        with JournalReader.open(self._run_dir) as reader:
            through = self._event
            for event in reader.iter_events(RESUME, after=through):
                self._begun[event.start] = event.time
                self._event = max(self._event, event.id)
            for event in reader.iter_events("spans", after=through):
                self._event = max(self._event, event.id)
                if event.fields.get("spans"):
                    self._recorded.append(_read_step(event))
            self._read_sessions(reader, ends)
        if self.share < 1:
            return self._draw_newest()
        return _make_chart(self._run_dir, self._begun, self._recorded, self._sessions)

    def _read_sessions(self, reader: JournalReader, ends: float | None) -> None:
        """Read sessions that are new, and then older ones until the time is over: one page at least."""
        if self._oldest is not None:
            for session in reader.session_times(self._newest):
                self._sessions.add(session)
                self._newest = session.id
        while self._oldest != 1:
            page = reader.session_times_before(self._oldest)
            for session in page:
                self._sessions.add(session)
                self._newest = max(self._newest, session.id)
            self._oldest = page[-1].id if page else 1
            if ends is not None and time.monotonic() > ends:
                return

    def _draw_newest(self) -> Chart:
        """Without the steps before the oldest session that was read: nothing is drawn as idle that was not read."""
        began = min(self._sessions.began)
        recorded = [item for item in self._recorded if item.began >= began] or self._recorded[-1:]
        chart = _make_chart(self._run_dir, {}, recorded, self._sessions)
        remark = f"the newest {self.share:.0%} of the sessions; older ones are being read"
        return replace(chart, remarks=(remark, *chart.remarks))


def _make_chart(run_dir: Path, begun: dict[int, float], recorded: Sequence[_Step], sessions: _Sessions) -> Chart:
    if not recorded:
        raise RunError(f"{run_dir} has no timeline: no step of a training run is recorded in it")
    axis = _Axis(_ranges(begun, recorded, sessions))
    steps = _whole_steps(recorded)
    sampling, waiting = _sampling_lanes(axis, sessions)
    working = _working_lanes(axis, recorded)
    last = max((step.step for step in steps), default=0)
    return Chart(
        title=f"{run_dir.resolve().name}: {_format_count(last, 'step')} in {format_duration(axis.seconds)}",
        remarks=(_describe_trainer(working), _describe_rollout(sampling, waiting), *_describe_starts(axis, steps)),
        seconds=axis.seconds,
        lanes=(sampling, waiting, *working),
        steps=tuple(
            ChartMark(axis.column(item.start, item.ended), str(item.step)) for item in _named_steps(steps, last)
        ),
        starts=axis.marks(),
        notes=tuple(_notes(axis, steps)),
    )


def _read_step(event: Event) -> _Step:
    spans = tuple((name, began, ended) for name, began, ended in event.fields["spans"])
    return _Step(event.start, event.fields["step"], spans)


def _whole_steps(recorded: Sequence[_Step]) -> list[_Step]:
    """Without what a start did after its last step, such as the last validation."""
    seen: set[tuple[int, int]] = {(item.start, 0) for item in recorded}
    steps = []
    for item in recorded:
        if (item.start, item.step) not in seen:
            steps.append(item)
        seen.add((item.start, item.step))
    return steps


def _named_steps(steps: Sequence[_Step], last: int) -> Iterator[_Step]:
    """Steps with round numbers, and the last."""
    stride = _round_up(last / _MAX_NAMED)
    yield from (item for item in steps if item.step % stride == 0 or item.step == last)


def _ranges(begun: dict[int, float], recorded: Sequence[_Step], sessions: _Sessions) -> dict[int, tuple[float, float]]:
    """Begin and end of each start that recorded anything."""
    ranges = {item.start: (item.began, item.ended) for item in reversed(recorded)}
    for item in recorded:
        began, ended = ranges[item.start]
        ranges[item.start] = min(began, item.began, begun.get(item.start, began)), max(ended, item.ended)
    known = {*ranges, *begun}
    for start, session_began, session_ended, _ in sessions:
        began, ended = ranges.get(start, (begun.get(start, session_began), session_ended))
        ranges[start] = began if start in known else min(began, session_began), max(ended, session_ended)
    return ranges


def _sampling_lanes(axis: _Axis, sessions: _Sessions) -> tuple[Lane, Lane]:
    """How many sessions are open, and when none is."""
    changes = [[0] * (COLUMNS * _CELLS + 1) for _ in range(2)]
    for start, began, ended, validates in sessions:
        first = min(int(axis.column(start, began) * _CELLS), COLUMNS * _CELLS - 1)
        after = min(max(first + 1, ceil(axis.column(start, ended) * _CELLS)), COLUMNS * _CELLS)
        changes[validates][first] += 1
        changes[validates][after] -= 1
    trains, validates_ = (list(accumulate(change))[:-1] for change in changes)
    none = [float(not (one or two)) for one, two in zip(trains, validates_, strict=True)]
    by_column = [_mean_by_column(trains), _mean_by_column(validates_)]
    most = max(one + two for one, two in zip(*by_column, strict=True))
    bands = Band("sessions", "sample", by_column[0]), Band("validation", "validate", by_column[1])
    idle = Band("no session is open", "idle", _mean_by_column(none))
    return Lane("open sessions", bands, top=max(1.5, _round_up(most))), Lane("rollout waits", (idle,))


def _mean_by_column(cells: Sequence[float]) -> list[float]:
    return [sum(cells[at : at + _CELLS]) / _CELLS for at in range(0, COLUMNS * _CELLS, _CELLS)]


def _round_up(value: float) -> int:
    """To a round number for an axis."""
    size = 1
    while size * 10 < value:
        size *= 10
    return next(size * step for step in (1, 2, 3, 4, 5, 6, 8, 10) if size * step >= value)


def _working_lanes(axis: _Axis, recorded: Sequence[_Step]) -> tuple[Lane, ...]:
    shares = {name: [0.0] * COLUMNS for _, kinds in _WORK for name, _, _ in kinds}
    for item in recorded:
        for name, began, ended in item.spans:
            if name in shares:
                _cover(shares[name], axis.column(item.start, began), axis.column(item.start, ended))
    return tuple(
        Lane(label, tuple(Band(shown, colour, shares[name]) for name, shown, colour in kinds)) for label, kinds in _WORK
    )


def _cover(shares: list[float], begins: float, ends: float) -> None:
    """Add a span to the columns it touches."""
    for column in range(int(begins), min(ceil(ends), COLUMNS)):
        shares[column] = min(1.0, shares[column] + min(ends, column + 1) - max(begins, column))


def _notes(axis: _Axis, steps: Sequence[_Step]) -> Iterator[ChartNote]:
    """One for each step, or for several together where there are many."""
    size = max(1, ceil(len(steps) / _MAX_NOTES))
    for at in range(0, len(steps), size):
        some = steps[at : at + size]
        first, last = some[0], some[-1]
        begins, ends = axis.column(first.start, first.began), axis.column(last.start, last.ended)
        yield ChartNote(begins, ends, _describe_steps(some))


def _describe_steps(steps: Sequence[_Step]) -> str:
    first, last = steps[0].step, steps[-1].step
    seconds = add_up(tuple(span for item in steps for span in item.spans))
    name = f"step {first}" if first == last else f"steps {first} to {last}"
    shown = {kind: text for _, kinds in _WORK for kind, text, _ in kinds}
    spent = [f"{shown[kind]} {seconds[kind]:.2f} s" for kind in shown if kind in seconds]
    return "\n".join([name, *spent])


def _describe_trainer(lanes: Sequence[Lane]) -> str:
    bands = [band for lane in lanes for band in lane.bands if band.name != "validation"]
    shares = [f"{_share(band):.0%} {band.name}" for band in bands if _share(band) >= 0.005]
    return f"trainer: {', '.join(shares)}" if shares else "trainer: did nothing"


def _describe_rollout(sampling: Lane, waiting: Lane) -> str:
    values = [sum(column) for column in zip(*(band.values for band in sampling.bands), strict=True)]
    mean, most, idle = sum(values) / COLUMNS, max(values), _share(waiting.bands[0])
    return f"rollout: {mean:.1f} sessions open on average, {most:.0f} at most; none for {idle:.0%} of the time"


def _describe_starts(axis: _Axis, steps: Sequence[_Step]) -> Iterator[str]:
    again = len(steps) - len({item.step for item in steps})
    if len(axis.starts) > 1:
        yield f"{len(axis.starts)} starts; {_format_count(again, 'step')} made again after a crash"


def _share(band: Band) -> float:
    return sum(band.values) / COLUMNS


def _format_count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number:,} {what}s"
