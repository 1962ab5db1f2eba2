"""Findings: what a person would want to look at in a run: rewards without signal, and rewards that may be gamed.

The one place that looks for them: `treadle show RUN --findings`, the viewer, and the last lines of a run read through
here. Reads the newest groups of training and the newest validations, a bounded number of trajectories each, and says
how many it read; a `RunScan` keeps what it saw, so that a live run costs its new steps alone. Imports no torch.

    no_signal    all samples of a task have the same reward: nothing is learned from it
    identical    most samples of a task are the same tokens, 32 or more
    growth       longer samples of the same task get more reward, and answers have become longer
    format_only  a reward above 0 that comes from parts such as format or length alone
    repetition   tokens that repeat over and over
    gap          sampler and trainer differ on a token that was sampled by the weights it trains
    echo         the ground truth stands in what the model was given, and its answer repeats it
    tampering    a rewarded sample writes about tests, graders or exits in a way that could fake a success

Every finding names a trajectory (of a group, one of them) and, where there is one, the span that shows it. They are
pointers for a reader, not verdicts: nothing is ever taken out of training for one. Findings of validations are counted
apart, and are of single samples alone: format_only, repetition, echo and tampering.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import sqrt
from pathlib import Path
from typing import Any

from treadle.inspect.detectors import FindingKind, LookedAtGroup, RunFinding, look_at_group
from treadle.inspect.gaps import largest_gap
from treadle.inspect.run_records import FoundTrajectory, RolloutPurpose, RunRecords, load_recorded, validated_after
from treadle.journal import Filter, JournalReader

TITLES: Mapping[FindingKind, str] = {
    "tampering": "samples that may tamper with tests or graders",
    "echo": "answers that repeat a ground truth they were given",
    "format_only": "rewards from format or length alone",
    "growth": "longer answers are rewarded more",
    "gap": "tokens on which sampler and trainer part",
    "repetition": "answers that repeat themselves",
    "identical": "groups of identical samples",
    "no_signal": "groups without signal",
}
"""In the order they are shown: what may be gamed first."""
OF_GROUPS: frozenset[FindingKind] = frozenset(("no_signal", "identical"))
"""Kinds that are about a group and not about one of its samples."""

SCANNED = 2048
"""Trajectories of training that a scan reads, the newest first; of validations, half as many."""
KEPT = 200
"""Findings of a kind that are kept; all are counted."""
_MIN_SAMPLES, _MIN_CORRELATION, _MIN_GROWTH = 32, 0.4, 1.2

_Name = tuple[str, tuple[tuple[int, int], ...]]
"""A group: its uid, and (sample, attempt) of each trajectory."""
_Wanted = tuple[int, int | None, _Name]
"""A group to look at: what tells it from a later one of the same name, its step, and its name."""


@dataclass(frozen=True, slots=True)
class FindingsReport:
    """What a scan found, and how much it read."""

    findings: tuple[RunFinding, ...]
    counts: Mapping[FindingKind, int]
    """Of training, or of a rollout that stands alone."""
    groups: int
    trajectories: int
    validation_counts: Mapping[FindingKind, int]
    validation_trajectories: int
    is_whole: bool
    """Whether every trajectory of the run was read."""
    is_over: bool = True
    """Whether all that is to be read was read; the next report of the same scan goes on where this one ended."""

    def lines(self) -> list[str]:
        """One line for each kind that was found, in training and in validations."""
        return [line for line, _ in self.sections()]

    def sections(self) -> list[tuple[str, list[RunFinding]]]:
        """The line of each kind, with what was found of it."""
        shown = []
        for kind in TITLES:
            of_kind = [finding for finding in self.findings if finding.kind == kind]
            trained = [finding for finding in of_kind if finding.validation is None]
            validated = [finding for finding in of_kind if finding.validation is not None]
            if trained:
                shown.append((f"{TITLES[kind]}: {self._describe(trained[0])}", trained))
            if validated:
                count, total = self.validation_counts[kind], self.validation_trajectories
                of = f"{count:,} of {total:,} samples, such as {_name_of(validated[0])}"
                shown.append((f"{TITLES[kind]}, in validation: {of}", validated))
        return shown

    def metrics(self) -> dict[str, float]:
        """How many of each kind were found, as trackers get them."""
        trained = {f"findings/{kind}": float(count) for kind, count in self.counts.items()}
        return trained | {f"findings/validation/{kind}": float(n) for kind, n in self.validation_counts.items()}

    def describe_reading(self) -> str:
        """How much was read."""
        trained = f"{self.trajectories:,} trajectories of {self.groups:,} groups"
        validated = f" and {self.validation_trajectories:,} of validations" if self.validation_trajectories else ""
        return f"{trained}{validated} were read{'' if self.is_whole else ', the newest of the run'}"

    def to_json(self) -> dict[str, Any]:
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "counts": dict(self.counts),
            "titles": dict(TITLES),
            "groups": self.groups,
            "trajectories": self.trajectories,
            "validation_counts": dict(self.validation_counts),
            "validation_trajectories": self.validation_trajectories,
            "is_whole": self.is_whole,
            "is_over": self.is_over,
        }

    def _describe(self, first: RunFinding) -> str:
        if first.kind == "growth":
            return first.detail
        count, of = self.counts[first.kind], "groups" if first.kind in OF_GROUPS else "samples"
        total = self.groups if of == "groups" else self.trajectories
        return f"{count:,} of {total:,} {of}, such as {_name_of(first)}"


def _name_of(finding: RunFinding) -> str:
    return f"{finding.uid}/{finding.sample}"


def scan_run(run_dir: Path, limit: int = SCANNED) -> FindingsReport:
    """Look at the newest groups of a run: `limit` trajectories of training at most, and half as many of validations.

    Of each, at least one group is read.
    """
    return RunScan(run_dir, limit).report()


class RunScan:
    """Scan of a run that may go on: groups are looked at once, the newest first, as far as there is time."""

    def __init__(self, run_dir: Path, limit: int = SCANNED) -> None:
        self._records = RunRecords(run_dir)
        self._run_dir = run_dir
        self._limit = limit
        self._steps: dict[int, int] = {}
        """Event of each step in force."""
        self._read_through = 0
        self._looked_at: dict[tuple[int, _Name], LookedAtGroup] = {}
        """By what tells it from a later one of the same name, and its name."""

    def report(self, budget_s: float | None = None) -> FindingsReport:
        """What was found; with a budget, in as much of the run as it sufficed for, one new group at least."""
        ends = None if budget_s is None else time.monotonic() + budget_s
        with JournalReader.open(self._run_dir) as reader:
            self._read_steps(reader)
            wanted, is_whole = self._choose(reader)
            curves = self._records.metrics()
            ended = [step for step, _ in curves.get("validation/success", [])]
            validated, is_all = _validated(reader, ended, self._limit // 2)
            wanted, is_whole = [*wanted, *validated], is_whole and is_all
            looked: dict[tuple[int, _Name], LookedAtGroup] = {}
            fresh = 0
            for event, step, name in wanted:
                kept = self._looked_at.get((event, name))
                if kept is None:
                    if fresh and ends is not None and time.monotonic() > ends:
                        continue
                    fresh += 1
                looked[event, name] = kept or _look_at(reader, step, name)
            self._looked_at = looked
        groups = list(looked.values())
        return _summarize(groups, curves.get("response_length/mean", []), is_whole, len(groups) == len(wanted))

    def _read_steps(self, reader: JournalReader) -> None:
        """Steps and resumes that were written since the last time."""
        found = [event for kind in ("step", "resume") for event in reader.iter_events(kind, after=self._read_through)]
        for event in sorted(found, key=lambda event: event.id):
            self._read_through = event.id
            if not event.is_intact:
                continue
            if event.kind == "resume":
                self._steps = {step: id for step, id in self._steps.items() if step <= event.fields["step"]}
            else:
                self._steps[event.fields["step"]] = event.id

    def _choose(self, reader: JournalReader) -> tuple[list[_Wanted], bool]:
        """Groups of the newest steps, as many as the limit allows; and whether that is all."""
        if not self._steps:
            return _untrained(reader, self._limit)
        wanted: list[_Wanted] = []
        count = 0
        for step in sorted(self._steps, reverse=True):
            event = self._steps[step]
            (stored,) = reader.events(event - 1, limit=1)
            names = [_name(uid, samples) for uid, samples in stored.fields["groups"]]
            size = sum(len(samples) for _, samples in names)
            if count and count + size > self._limit:
                return wanted, False
            while size > self._limit and len(names) > 1:  # a step that is larger than a scan: its last groups
                size -= len(names.pop(0)[1])
            wanted += [(event, step, name) for name in names]
            count += size
        return wanted, count <= self._limit


def _name(uid: str, samples: Sequence[Sequence[int]]) -> _Name:
    return uid, tuple((sample, attempt) for sample, attempt in samples)


def _untrained(reader: JournalReader, limit: int) -> tuple[list[_Wanted], bool]:
    """Groups of a run without steps: a rollout that stands alone, or one whose first step is under way."""
    found = (item for item in reader.headlines(Filter()) if validated_after(item.uid) is None)
    headlines = sorted(found, key=lambda item: (item.uid, item.sample))
    groups: list[_Wanted] = [
        (0, None, (uid, tuple((item.sample, item.attempt) for item in items)))
        for uid, items in groupby(headlines[-limit:], key=lambda item: item.uid)
    ]
    return groups, len(headlines) <= limit


def _validated(reader: JournalReader, steps: Sequence[int], limit: int) -> tuple[list[_Wanted], bool]:
    """Groups of the newest validations that ended, as many as the limit allows; and whether that is all."""
    wanted: list[_Wanted] = []
    count = 0
    for step in sorted(steps, reverse=True):
        for uid, found in groupby(reader.newest_of_validation(step), key=lambda line: line[0]):
            samples = list(found)
            if count and count + len(samples) > limit:
                return wanted, False
            count += len(samples)
            last = max(id for _, _, _, id in samples)
            wanted.append((last, step, (uid, tuple((sample, attempt) for _, sample, attempt, _ in samples))))
    return wanted, True


def _look_at(reader: JournalReader, step: int | None, name: _Name) -> LookedAtGroup:
    uid, samples = name
    is_validation = validated_after(uid) is not None
    purpose = RolloutPurpose.VALIDATION if is_validation else RolloutPurpose.TRAINING
    headlines = {(item.sample, item.attempt): item for item in reader.headlines(Filter(uid=uid, superseded=True))}
    found = [FoundTrajectory(headlines[at], purpose, step) for at in samples if at in headlines]
    loaded = [load_recorded(reader, item) for item in found]
    gaps = [largest_gap(reader.annotated_rows(item.headline.id), is_current=True) for item in loaded]
    return look_at_group(loaded, gaps)


def _summarize(
    groups: Sequence[LookedAtGroup], lengths: Sequence[tuple[int, float]], is_whole: bool, is_over: bool
) -> FindingsReport:
    trained = [group for group in groups if not group.is_validation]
    validated = [group for group in groups if group.is_validation]
    counts: Counter[FindingKind] = Counter()
    validation_counts: Counter[FindingKind] = Counter()
    kept: list[RunFinding] = []
    growth = _find_growth(trained, [value for _, value in lengths])
    for finding in (*(found for group in groups for found in group.findings), *growth):
        own = counts if finding.validation is None else validation_counts
        own[finding.kind] += 1
        if own[finding.kind] <= KEPT:
            kept.append(finding)
    order = list(TITLES)
    kept.sort(key=lambda finding: order.index(finding.kind))
    return FindingsReport(
        tuple(kept),
        dict(counts),
        len(trained),
        sum(group.num_samples for group in trained),
        dict(validation_counts),
        sum(group.num_samples for group in validated),
        is_whole and is_over,
        is_over,
    )


def _find_growth(groups: Sequence[LookedAtGroup], lengths: Sequence[float]) -> Iterator[RunFinding]:
    """Whether length pays: within groups it goes with reward, and over the run answers have become longer."""
    centred = [(length, reward) for group in groups for length, reward, _ in group.centred]
    quarter = len(lengths) // 4
    correlation = _correlate(centred)
    if quarter < 1 or len(centred) < _MIN_SAMPLES or correlation < _MIN_CORRELATION:
        return
    before, now = sum(lengths[:quarter]) / quarter, sum(lengths[-quarter:]) / quarter
    if now < _MIN_GROWTH * before:
        return
    places = ((entry[0], group.samples[entry[2]]) for group in groups for entry in group.centred)
    uid, sample, id, step = max(places, key=lambda place: place[0])[1]
    detail = (
        f"length and reward of a task's samples correlate by {correlation:.2f} ({len(centred):,} samples), "
        f"and the mean answer grew from {before:.0f} to {now:.0f} tokens"
    )
    yield RunFinding("growth", uid, sample, id, step, None, detail)


def _correlate(pairs: Sequence[tuple[float, float]]) -> float:
    """Pearson's correlation of centred pairs; 0 where one of them never varies."""
    product = sum(x * y for x, y in pairs)
    size = sqrt(sum(x * x for x, _ in pairs) * sum(y * y for _, y in pairs))
    return product / size if size > 0 else 0.0
