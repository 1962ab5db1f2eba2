"""What an earlier start of a run left behind, and how much of it may still be used.

Owns the rule: tokens count while the weights that sampled them are part of this run's history. A resume goes back to a
checkpoint; versions after it are made anew, with other weights under the same numbers. So what was recorded before a
resume counts up to the version it went back to, and that for every resume since. Nothing older than a caller's bound
counts either, so that staleness stays bounded across a crash.

Knows nothing of schedules or of tasks that were trained: whoever asks for a task still needs it. Reads one task at a
time, on a connection of its own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, takewhile
from pathlib import Path

from treadle.journal import Entry, JournalReader, PartEntry
from treadle.rollout.recall import Past, draws_anew
from treadle.types import Part, StopReason, Trajectory

RESUME = "resume"
"""The event a start writes before it samples anything: `step` and `version` it goes on from, and its `settings`."""

_ALL = 1 << 30
_NOTHING = -1
"""The version before which nothing counts."""


class Lineage:
    """Built by `read`, once, when a run is resumed."""

    def __init__(self, reader: JournalReader, resumes: tuple[tuple[int, int], ...], *, scored: bool) -> None:
        self._reader = reader
        self._resumes = resumes
        """Which start of the run went back to which version."""
        self._scored = scored

    @classmethod
    def read(cls, run_dir: Path, *, settings: str = "", scored: bool = True) -> "Lineage":
        """Read which versions the run went back to. With `scored`, trajectories without a reward do not count.

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
        return cls(reader, tuple(resumes), scored=scored)

    def past(self, uid: str, n: int, *, version: int, oldest: int) -> Past:
        """What is left of the first `n` samples of a task: for weights of `version`, no token before `oldest`."""
        entries = self._reader.attempts(uid)
        finished = {
            entry.headline.sample: entry.trajectory
            for entry in entries
            if entry.headline.sample < n and self._is_finished(entry, version, oldest)
        }
        open_parts = [
            item for item in self._reader.parts(uid) if item.part.sample < n and item.part.sample not in finished
        ]
        return Past(
            finished=tuple(finished.values()),
            parts=tuple(self._usable(open_parts, version, oldest)),
            attempt=1 + max((entry.headline.attempt for entry in entries), default=-1),
            redraws=Counter(entry.headline.sample for entry in entries if draws_anew(entry.headline.outcome)),
        )

    def close(self) -> None:
        self._reader.close()

    def _is_finished(self, entry: Entry, version: int, oldest: int) -> bool:
        headline = entry.headline
        ended_well = headline.outcome.ok and headline.outcome.reason is not StopReason.ABORT
        if not (ended_well and headline.has_body and (headline.reward is not None or not self._scored)):
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
