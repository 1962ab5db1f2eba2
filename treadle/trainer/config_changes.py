"""Config changes between two starts of a training run: which a resume takes with a note, and which it refuses.

Owns the classes of keys. A start records its whole config, and what files and sources it named held, in the journal;
the next start compares before anything is loaded or written.

    noted     how long, where, how fast, what is watched: trainer, checkpoint, logging, cluster, validation, placement
    refused   what is learned from what: sampling, rewards and their source, optimizer, losses, batch sizes;
              `--allow-changes` goes on with them, and the journal says from which step
    never     another model or other training tasks: the checkpoint and its position mean nothing for them
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from treadle.config import TrainConfig
from treadle.config.secrets import hide_secret
from treadle.config.show import as_yaml, flatten
from treadle.data.tasks import TaskSource
from treadle.errors import ConfigError, Mistake
from treadle.journal import Journal, JournalReader
from treadle.journal.codec import task_values
from treadle.journal.schema import FILE_NAME
from treadle.rollout.provenance import SCORER, Items, RunInputs, changes, digest_of, is_placement
from treadle.rollout.reuse import INPUTS, TRAINING, origin_of

CHANGED = "config_changed"
"""The event of a start that goes on with another config: `changes`, each as key, before and now."""

_PART = "config"
_NOTED = ("trainer.", "checkpoint.", "logging.", "cluster.", "data.val_", "rollout.val_kwargs.", *SCORER)
_CRITIC_WARMUP = "trainer.critic_warmup"
_NEVER = (
    "contents of model.path",
    "model.override_config",
    "contents of data.train_files",
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


def config_items(config: TrainConfig, inputs: RunInputs, tasks: TaskSource) -> Items:
    """Everything a training run depends on, by name."""
    leaves = {name: as_yaml(hide_secret(name, value, digest=True)) for name, value in flatten(config).items()}
    named = {name: value for name, value in {**inputs.training, **inputs.scoring}.items() if " of " in name}
    digest = blake2b(digest_size=8)
    for task in tasks.tasks:
        digest.update(b"\n".join(str(value).encode() for value in task_values(task)[:3]))
    # Contents stand for paths: a model or a data file that was moved is the same.
    moved = ("model.path", "model.tokenizer_path", "data.train_files", "data.train_max_samples")
    kept = {name: value for name, value in leaves.items() if name not in moved}
    return {**kept, **named, "contents of data.train_files": digest.hexdigest()}


def record_config(journal: Journal, items: Items, changed: list[ConfigChange]) -> None:
    """Have the journal say what this start was configured with, and what that changed."""
    journal.add_event(INPUTS, part=_PART, digest=digest_of(items), items=dict(items))
    if changed:
        journal.add_event(CHANGED, changes=[[change.key, change.before, change.now] for change in changed])


def check_changes(run_dir: Path, config: TrainConfig, items: Items, *, allow: bool) -> list[ConfigChange]:
    """What changed since the last start of the run in this directory; a ConfigError where it must not have."""
    if not (run_dir / FILE_NAME).exists():
        return []
    with JournalReader.open(run_dir) as reader:
        if not reader.events(kind=TRAINING, limit=1):
            _refuse_rollout(reader, run_dir)
            return []
        known = [event.fields for event in reader.events(kind=INPUTS, limit=1 << 30) if event.is_intact]
        steps = reader.events(kind="step", limit=1 << 30)
    before = next((fields["items"] for fields in reversed(known) if fields["part"] == _PART), None)
    if before is None or not steps or config.checkpoint.resume_mode != "auto":
        return []
    found = [
        ConfigChange(name, old, now)
        for name, old, now in changes(before, items)
        if " of " in name or (name in before and name in items)  # a key that another version added was not changed
    ]
    if mistakes := list(_mistakes(run_dir, config, found, int(steps[-1].fields["step"]), allow=allow)):
        raise ConfigError(mistakes)
    return found


def _mistakes(
    run_dir: Path, config: TrainConfig, found: list[ConfigChange], step: int, *, allow: bool
) -> Iterator[Mistake]:
    anew = f"--fresh sets {run_dir} aside and trains anew; logging.run_dir=DIRECTORY keeps both"
    for change in found:
        never = change.key.startswith(_NEVER)
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
