"""What an earlier start of a run left behind, and how much of it may still be used.

Owns the rule: tokens count while the weights that sampled them are part of this run's history. A resume goes back to a
checkpoint; versions after it are made anew, with other weights under the same numbers. So what was recorded before a
resume counts up to the version it went back to, and that for every resume since. Nothing older than a caller's bound
counts either, so that staleness stays bounded across a crash.

Knows nothing of schedules or of tasks that were trained: whoever asks for a task still needs it. Reads one task at a
time, on a connection of its own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, takewhile
from math import inf
from pathlib import Path

from treadle.journal import Entry, JournalReader, PartEntry
from treadle.rollout.recall import Past, draws_anew
from treadle.types import NOTHING, Part, StopReason, Trajectory

RESUME = "resume"
"""The event a start writes before it samples anything: `step` and `version` it goes on from, and its `settings`."""

SET_ASIDE = "set_aside"
"""The event of a batch whose numbers were not finite: `step`, `uids` of its tasks, and why."""

_ALL = 1 << 30
_NOTHING = -1
"""The version before which nothing counts."""


class Lineage:
    """Built by `read`, once, when a run is resumed."""

    def __init__(
        self,
        reader: JournalReader,
        resumes: tuple[tuple[int, int], ...],
        *,
        scored: bool,
        set_aside: Mapping[str, int] = NOTHING,
        bounds: tuple[float, float] = (-inf, inf),
    ) -> None:
        self._reader = reader
        self.set_aside = set_aside
        """Tasks whose samples spoiled a step, and the start of the run that last said so: what was recorded up to then
        is not used again."""
        self._bounds = bounds
        self._resumes = resumes
        """Which start of the run went back to which version."""
        self._scored = scored

    @classmethod
    def read(
        cls,
        run_dir: Path,
        *,
        settings: str = "",
        scored: bool = True,
        bounds: tuple[float, float] = (-inf, inf),
    ) -> "Lineage":
        """Read which versions the run went back to. With `scored`, trajectories without a reward do not count; nor do
        those whose reward lies outside `bounds`.

        `settings` stands for everything that decides what is sampled: nothing counts that was sampled with others.
        """
        reader = JournalReader.open(run_dir)
        resumes: list[tuple[int, int]] = []
        before = ""
        for event in reader.events(kind=RESUME, limit=_ALL):
            given = event.fields.get("settings", "")
            resumes.append((event.start, int(event.fields["version"]) if given == before else _NOTHING))
            before = given
        if settings != before:
            resumes.append((_ALL, _NOTHING))
        aside = {
            uid: event.start for event in reader.events(kind=SET_ASIDE, limit=_ALL) for uid in event.fields["uids"]
        }
        return cls(reader, tuple(resumes), scored=scored, set_aside=aside, bounds=bounds)

    @property
    def newly_set_aside(self) -> tuple[str, ...]:
        """The tasks of the batch that ended the last start of the run, if one did."""
        newest = max((start for start, _ in self._resumes if start != _ALL), default=_NOTHING)
        return tuple(uid for uid, start in self.set_aside.items() if start == newest)

    def past(self, uid: str, n: int, *, version: int, oldest: int) -> Past:
        """What is left of the first `n` samples of a task: for weights of `version`, no token before `oldest`."""
        entries, aside = self._reader.attempts(uid), self.set_aside.get(uid, _NOTHING)
        finished = {
            entry.headline.sample: entry.trajectory
            for entry in entries
            if entry.headline.sample < n and entry.headline.start > aside and self._is_finished(entry, version, oldest)
        }
        open_parts = [
            item
            for item in self._reader.parts(uid)
            if item.part.sample < n and item.part.sample not in finished and item.start > aside
        ]
        return Past(
            finished=tuple(finished.values()),
            parts=tuple(self._usable(open_parts, version, oldest)),
            attempt=1 + max((entry.headline.attempt for entry in entries), default=-1),
            redraws=Counter(
                entry.headline.sample
                for entry in entries
                if draws_anew(entry.headline.outcome) or entry.headline.start <= aside
            ),
        )

    def close(self) -> None:
        self._reader.close()

    def _is_finished(self, entry: Entry, version: int, oldest: int) -> bool:
        headline = entry.headline
        ended_well = headline.outcome.ok and headline.outcome.reason is not StopReason.ABORT
        if not (ended_well and headline.has_body and (headline.reward is not None or not self._scored)):
            return False
        low, high = self._bounds
        if headline.reward is not None and not low <= headline.reward.value <= high:
            return False
        return _within(_versions(entry.trajectory), oldest, self._newest(headline.start, version))

    def _usable(self, found: Iterable[PartEntry], version: int, oldest: int) -> Iterator[Part]:
        """The parts of each session up to the first that does not count: what follows was sampled after it."""

        def counts(item: PartEntry) -> bool:
            return _within(item.part.completion.versions, oldest, self._newest(item.start, version))

        for _, session in groupby(found, key=lambda item: item.part.sample):
            yield from (item.part for item in takewhile(counts, session))

    def _newest(self, start: int, version: int) -> int:
        """The newest version that counts in what this start wrote."""
        return min([version, *(returned for resumed, returned in self._resumes if resumed > start)])


def _versions(trajectory: Trajectory) -> list[int]:
    return [
        version for row in trajectory.rows for version, sampled in zip(row.versions, row.mask, strict=True) if sampled
    ]


def _within(versions: Iterable[int], oldest: int, newest: int) -> bool:
    return all(oldest <= version <= newest for version in versions)
