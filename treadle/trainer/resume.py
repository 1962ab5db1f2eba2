"""Resume: what an earlier start of a run left, how much of it is still valid, and which config changes are allowed.

Tokens are valid while the weights that sampled them are part of this run's history. A resume goes back to a checkpoint;
versions after it are made anew, with other weights under the same numbers. So what was recorded before a resume counts
up to the version it went back to, and that for every resume since. Nothing older than the caller's bound counts, so
that staleness stays bounded across a crash. Reads one task at a time, on a connection of its own, and only tasks that
an earlier start has sampled; knows no schedule.

A start records its whole config, and digests of the files and sources it names, in the journal; the next start compares
before anything is loaded or written.

    noted     how long, where, how fast, what is watched: trainer, checkpoint, logging, cluster, validation, placement
    refused   what is learned from what: sampling, rewards and their source, optimizer, losses, batch sizes;
              `--allow-changes` goes on with them, and the journal says from which step
    never     another model or other training tasks: the checkpoint and its position mean nothing for them
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby, takewhile
from logging import getLogger
from math import inf
from pathlib import Path

from treadle.config import TrainConfig
from treadle.config.show import as_yaml, flatten, hide_secret
from treadle.data.task_source import TaskSource
from treadle.errors import ConfigError, Mistake, RunError
from treadle.journal import DamagedRecord, Event, Journal, JournalReader, PartEntry, TrajectoryEntry
from treadle.journal.codec import label, task_values
from treadle.journal.schema import FILE_NAME
from treadle.rollout.completion_log import NOTHING_RECOVERED, RecoveredTask, needs_new_noise
from treadle.rollout.provenance import (
    INPUTS_EVENT,
    RESUME_EVENT,
    SCORE_NEUTRAL_KEYS,
    InputItems,
    RunInputs,
    changed_items,
    digest_of,
    is_placement,
    origin_of,
    source_digests,
)
from treadle.types import NOTHING, Provenance, RecordedCompletion, StopReason, Task, Trajectory

log = getLogger(__name__)

RESUME = "resume"
"""The event a start writes before it samples anything: `step` and `version` it goes on from, and its `settings`."""

SET_ASIDE = "set_aside"
"""The event of a batch whose numbers were not finite: `step`, `uids` of its tasks, and why."""

SAVED = "saved"
"""The event after a checkpoint that is whole."""

UNKNOWN_PROVENANCE = Provenance()
"""Provenance of trajectories whose inputs were not recorded."""

_ALL = 1 << 30
_NOTHING = -1
"""The version before which nothing counts."""


class RunHistory:
    """History of a run, from its journal: which samples of earlier starts are still valid. Made by `read`, once."""

    def __init__(
        self,
        run_dir: Path,
        reader: JournalReader,
        resumes: tuple[tuple[int, int], ...],
        *,
        scored: bool,
        set_aside: Mapping[str, int] = NOTHING,
        bounds: tuple[float, float] = (-inf, inf),
        settings: str = "",
        inputs: RunInputs | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._reader = reader
        self._sampled = reader.sampled_uids()
        """Tasks that an earlier start has sampled anything of."""
        self._inputs = inputs
        self.settings = settings
        """Stands for everything that decides what this start samples."""
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
        inputs: RunInputs | None = None,
    ) -> "RunHistory":
        """Read which versions the run went back to. With `scored`, trajectories without a reward do not count; nor do
        those whose reward lies outside `bounds`.

        `settings` stands for everything that decides what is sampled: nothing counts that was sampled with others.
        `inputs` is what this start's trajectories are made from.
        """
        reader = JournalReader.open(run_dir)
        resumes: list[tuple[int, int]] = []
        before = ""
        for event in _intact(reader, run_dir, RESUME):
            given = event.fields.get("settings", "")
            resumes.append((event.start, int(event.fields["version"]) if given == before else _NOTHING))
            before = given
        if settings != before:
            resumes.append((_ALL, _NOTHING))
        aside = {uid: event.start for event in _intact(reader, run_dir, SET_ASIDE) for uid in event.fields["uids"]}
        return cls(
            *(run_dir, reader, tuple(resumes)),
            scored=scored,
            set_aside=aside,
            bounds=bounds,
            settings=settings,
            inputs=inputs,
        )

    @property
    def newly_set_aside(self) -> tuple[str, ...]:
        """The tasks of the batch that ended the last start of the run, if one did."""
        newest = max((start for start, _ in self._resumes if start != _ALL), default=_NOTHING)
        return tuple(uid for uid, start in self.set_aside.items() if start == newest)

    def recover(self, task: Task, n: int, *, version: int, oldest: int) -> RecoveredTask:
        """What is left of a task (see `past`). The journal is asked only where it has something of it."""
        if label(task.uid) not in self._sampled:
            return NOTHING_RECOVERED
        made_from = UNKNOWN_PROVENANCE if self._inputs is None else self._inputs.stamp(task, validation=False)
        return self.past(task.uid, n, version=version, oldest=oldest, made_from=made_from)

    def past(
        self, uid: str, n: int, *, version: int, oldest: int, made_from: Provenance = UNKNOWN_PROVENANCE
    ) -> RecoveredTask:
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
        return RecoveredTask(
            finished=tuple(finished.values()),
            parts=tuple(self._usable(open_parts, version, oldest)),
            attempt=1 + max((entry.headline.attempt for entry in entries), default=-1),
            redraws=Counter(
                entry.headline.sample
                for entry in entries
                if needs_new_noise(entry.headline.outcome) or entry.headline.start <= aside
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
        damaged = sorted((self._run_dir / "checkpoints").glob("[0-9]*-step-*"))
        if damaged:
            raise RunError(
                f"{self._run_dir} has no whole checkpoint, but {len(damaged)} damaged, such as {damaged[-1].name}, and "
                "its journal knows of none: bring the directory back as it was, or begin anew with --fresh (which sets "
                "this run aside), checkpoint.resume_mode=disable, or another logging.run_dir"
            )

    def tell_lost_journal(self, step: int) -> None:
        """Warn where a checkpoint is gone on from that this journal knows nothing of: it was deleted meanwhile."""
        if not any(start != _ALL for start, _ in self._resumes):
            log.warning(
                "%s goes on after step %d, but its journal begins anew: what was sampled and trained before is not in "
                "it, and treadle audit counts from here",
                self._run_dir,
                step,
            )

    def close(self) -> None:
        self._reader.close()

    def _is_finished(self, entry: TrajectoryEntry, version: int, oldest: int) -> bool:
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

    def _usable(self, found: Iterable[PartEntry], version: int, oldest: int) -> Iterator[RecordedCompletion]:
        """The parts of each session up to the first that does not count: what follows was sampled after it."""

        def counts(item: PartEntry) -> bool:
            return item.is_intact and _within(item.part.completion.versions, oldest, self._newest(item.start, version))

        for _, session in groupby(found, key=lambda item: item.part.sample):
            yield from (item.part for item in takewhile(counts, session))

    def _newest(self, start: int, version: int) -> int:
        """The newest version that counts in what this start wrote."""
        return min([version, *(returned for resumed, returned in self._resumes if resumed > start)])


def settings_digest(config: TrainConfig, inputs: RunInputs | None = None) -> str:
    """Stands for everything that decides what is sampled: what other settings left is not taken over."""
    inputs = inputs or RunInputs.of(config.rollout, config.model, config.reward)
    fresh = f"-{time.time()}" if config.checkpoint.resume_mode == "disable" else ""
    return digest_of(inputs.training) + fresh


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


CHANGED = "config_changed"
"""The event of a start that goes on with another config: `changes`, each as key, before and now."""

_PART = "config"
_NOTED = ("trainer.", "checkpoint.", "logging.", "cluster.", "data.val_", "rollout.val_kwargs.", *SCORE_NEUTRAL_KEYS)
_CRITIC_WARMUP = "trainer.critic_warmup"
_NEVER = (
    "contents of model.path",
    "contents of model.adapter",
    "actor.lora.",
    "model.override_config",
    "contents of data.train_files",
    "data.train_weights",
    "data.shuffle",
    "data.seed",
)


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A key whose value differs from that of the last start."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} → {self.now}"

    @property
    def is_noted(self) -> bool:
        if self.key == _CRITIC_WARMUP:
            return False
        return self.key.startswith(_NOTED) or (is_placement(self.key) and self.key != "rollout.n")


def config_items(config: TrainConfig, inputs: RunInputs, tasks: TaskSource) -> InputItems:
    """Everything a training run depends on, by name."""
    leaves = {name: as_yaml(hide_secret(name, value, digest=True)) for name, value in flatten(config).items()}
    sampler = {"data.sampler": config.data.sampler or ""}
    given = {**inputs.training, **inputs.scoring, **source_digests(sampler)}
    named = {name: value for name, value in given.items() if " of " in name}
    digest = blake2b(digest_size=8)
    for task in tasks.tasks:
        digest.update(b"\n".join(str(value).encode() for value in task_values(task)[:3]))
    # Contents stand for paths: a model or a data file that was moved is the same.
    moved = ("model.path", "model.adapter", "model.tokenizer_path", "data.train_files", "data.train_max_samples")
    kept = {name: value for name, value in leaves.items() if name not in moved}
    return {**kept, **named, "contents of data.train_files": digest.hexdigest()}


def record_config(journal: Journal, items: InputItems, changed: list[ConfigChange]) -> None:
    """Have the journal say what this start was configured with, and what that changed."""
    journal.add_event(INPUTS_EVENT, part=_PART, digest=digest_of(items), items=dict(items))
    if changed:
        journal.add_event(CHANGED, changes=[[change.key, change.before, change.now] for change in changed])


def _intact(reader: JournalReader, run_dir: Path, kind: str) -> Iterator[Event]:
    """The events of a kind that decides what may be used again; DamagedRecord where one of them cannot be read."""
    for event in reader.events(kind=kind, limit=_ALL):
        if not event.is_intact:
            reader.close()
            raise DamagedRecord(
                f"event {event.id} ({kind}) of the journal in {run_dir} is not as it was written, so it is unknown "
                "what of it may be used: begin anew with --fresh, or in another logging.run_dir with "
                "checkpoint.resume_mode=resume_path"
            )
        yield event


def check_changes(run_dir: Path, config: TrainConfig, items: InputItems, *, allow: bool) -> list[ConfigChange]:
    """What changed since the last start of the run in this directory; a ConfigError where it must not have."""
    if not (run_dir / FILE_NAME).exists():
        return []
    with JournalReader.open(run_dir) as reader:
        if not reader.events(kind=RESUME_EVENT, limit=1):
            _refuse_rollout(reader, run_dir)
            return []
        inputs = reader.events(kind=INPUTS_EVENT, limit=_ALL)
        steps = [event for event in reader.events(kind="step", limit=_ALL) if event.is_intact]
    known = [event.fields for event in inputs if event.is_intact]
    if len(known) < len(inputs) and config.checkpoint.resume_mode == "auto" and not allow:
        raise DamagedRecord(
            f"an event ({INPUTS_EVENT}) of the journal in {run_dir} is not as it was written, so it is unknown whether "
            "the config changed since: --allow-changes goes on with the one that is given, --fresh begins anew"
        )
    before = next((fields["items"] for fields in reversed(known) if fields["part"] == _PART), None)
    if before is None or not steps or config.checkpoint.resume_mode != "auto":
        return []
    found = [
        ConfigChange(name, old, now)
        for name, old, now in changed_items(before, items)
        if " of " in name or (name in before and name in items)  # a key that another version added was not changed
    ]
    if mistakes := list(_change_mistakes(run_dir, config, found, int(steps[-1].fields["step"]), allow=allow)):
        raise ConfigError(mistakes)
    return found


def _change_mistakes(
    run_dir: Path, config: TrainConfig, found: list[ConfigChange], step: int, *, allow: bool
) -> Iterator[Mistake]:
    anew = f"--fresh sets {run_dir} aside and trains anew; logging.run_dir=DIRECTORY keeps both"
    for change in found:
        never = change.key.startswith(_NEVER) or change.key == "data.sampler"
        if change.is_noted or (allow and not never):
            continue
        problem = (
            f"{change.now or 'absent'} now, but the run in {run_dir} has {step} steps with {change.before or 'none'}"
        )
        fix = anew if never else f"{anew}; --allow-changes goes on from there with the new value"
        yield Mistake(change.key, problem, origin=origin_of(config, change.key), fix=fix)


def _refuse_rollout(reader: JournalReader, run_dir: Path) -> None:
    if next(reader.headlines(), None) is not None:
        problem = f"{run_dir} holds a rollout, not a training run"
        fix = "--fresh sets it aside; or give another directory"
        raise ConfigError([Mistake("logging.run_dir", problem, str(run_dir), fix=fix)])
