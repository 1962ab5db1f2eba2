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
from dataclasses import replace
from itertools import groupby, takewhile
from logging import getLogger
from math import inf
from pathlib import Path

from treadle.errors import RunError
from treadle.journal import DamagedRecord, Entry, JournalReader, PartEntry
from treadle.rollout.recall import Past, draws_anew
from treadle.types import NOTHING, Part, Provenance, StopReason, Trajectory

log = getLogger(__name__)

RESUME = "resume"
"""The event a start writes before it samples anything: `step` and `version` it goes on from, and its `settings`."""

SET_ASIDE = "set_aside"
"""The event of a batch whose numbers were not finite: `step`, `uids` of its tasks, and why."""

SAVED = "saved"
"""The event after a checkpoint that is whole."""

UNKNOWN_PROVENANCE = Provenance()
"""Of trajectories of which nobody said what they were made from."""

_ALL = 1 << 30
_NOTHING = -1
"""The version before which nothing counts."""


class Lineage:
    """Built by `read`, once, when a run is resumed."""

    def __init__(
        self,
        run_dir: Path,
        reader: JournalReader,
        resumes: tuple[tuple[int, int], ...],
        *,
        scored: bool,
        set_aside: Mapping[str, int] = NOTHING,
        bounds: tuple[float, float] = (-inf, inf),
    ) -> None:
        self._run_dir = run_dir
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
            if not event.is_intact:
                reader.close()
                raise DamagedRecord(
                    f"event {event.id} ({RESUME}) of the journal in {run_dir} is not as it was written, so nobody can "
                    "tell what of it may be used: begin anew with --fresh, or in another logging.run_dir with "
                    "checkpoint.resume_mode=resume_path"
                )
            given = event.fields.get("settings", "")
            resumes.append((event.start, int(event.fields["version"]) if given == before else _NOTHING))
            before = given
        if settings != before:
            resumes.append((_ALL, _NOTHING))
        aside = {
            uid: event.start for event in reader.events(kind=SET_ASIDE, limit=_ALL) for uid in event.fields["uids"]
        }
        return cls(run_dir, reader, tuple(resumes), scored=scored, set_aside=aside, bounds=bounds)

    @property
    def newly_set_aside(self) -> tuple[str, ...]:
        """The tasks of the batch that ended the last start of the run, if one did."""
        newest = max((start for start, _ in self._resumes if start != _ALL), default=_NOTHING)
        return tuple(uid for uid, start in self.set_aside.items() if start == newest)

    def past(self, uid: str, n: int, *, version: int, oldest: int, made_from: Provenance = UNKNOWN_PROVENANCE) -> Past:
        """What is left of the first `n` samples of a task: for weights of `version`, no token before `oldest`.

        Only what was made from the same prompt counts; where the reward is another now, it is left out, so that the
        trajectory is scored again.
        """
        entries, aside = self._reader.attempts(uid), self.set_aside.get(uid, _NOTHING)
        finished = {
            entry.headline.sample: _with_valid_score(entry.trajectory, made_from)
            for entry in entries
            if entry.headline.sample < n
            and entry.headline.start > aside
            and entry.headline.provenance.prompt == made_from.prompt
            and self._is_finished(entry, version, oldest)
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

    def refuse_lost_checkpoints(self) -> None:
        """Raise where the run saved checkpoints since it last began at step 0: to begin again would lose them."""
        began = [event.id for event in self._reader.events(kind=RESUME, limit=_ALL) if not event.fields.get("step")]
        saved = self._reader.events(after=max(began, default=0), kind=SAVED, limit=_ALL)
        if saved:
            raise RunError(
                f"{self._run_dir} has no whole checkpoint, but its journal knows of one after step "
                f"{saved[-1].fields.get('step')}: bring the directory {self._run_dir / 'checkpoints'} back, or begin "
                "anew with --fresh (which sets this run aside), checkpoint.resume_mode=disable, or another "
                "logging.run_dir"
            )

    def close(self) -> None:
        self._reader.close()

    def _is_finished(self, entry: Entry, version: int, oldest: int) -> bool:
        headline = entry.headline
        if not headline.is_intact:
            log.warning("%s/%d is not as it was written, and is sampled again", headline.uid, headline.sample)
            return False
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
            return item.is_intact and _within(item.part.completion.versions, oldest, self._newest(item.start, version))

        for _, session in groupby(found, key=lambda item: item.part.sample):
            yield from (item.part for item in takewhile(counts, session))

    def _newest(self, start: int, version: int) -> int:
        """The newest version that counts in what this start wrote."""
        return min([version, *(returned for resumed, returned in self._resumes if resumed > start)])


def _with_valid_score(trajectory: Trajectory, made_from: Provenance) -> Trajectory:
    before = trajectory.provenance
    same = (before.scoring, before.row) == (made_from.scoring, made_from.row)
    return trajectory if same else replace(trajectory, reward=None)


def _versions(trajectory: Trajectory) -> list[int]:
    return [
        version for row in trajectory.rows for version, sampled in zip(row.versions, row.mask, strict=True) if sampled
    ]


def _within(versions: Iterable[int], oldest: int, newest: int) -> bool:
    return all(oldest <= version <= newest for version in versions)
