"""Checkpoints of a run, and the Hugging Face export of a policy.

Saved in turn, those of the last k steps kept, the newest whole one found again:

run_dir/checkpoints/
  0003-step-120/     the third save, after training step 120: a Hugging Face directory, and `training/` inside it
  latest, best       links, see `links`
Saves are numbered, so a run started afresh in the same directory is newer than what it replaces, whatever its step.

Owns names, order and retention. Knows a policy only as something that saves itself, and the caller's state not at all.
Invariant: what `latest` returns was written to its end and is, byte for byte, what was written.
"""

import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.checkpoint.atomic_directory import (
    Damaged,
    atomic_directory,
    delete,
    move_to_trash,
    read_manifest,
    remove_leftovers,
    verify,
    write_manifest,
)
from treadle.checkpoint.links import LATEST, CheckpointScore, CheckpointScores, link
from treadle.config.rollout import ModelConfig
from treadle.config.training import CheckpointConfig
from treadle.disk import explain_disk_error
from treadle.errors import ConfigError, Mistake, MisuseError, RunError
from treadle.model.tokenizer import resolve_model_path
from treadle.policy.protocol import Critic, Policy, Reference

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
"""Every name under which a tokenizer may keep a part of itself."""


def export(policy: Policy, directory: Path, model: ModelConfig) -> None:
    """Write the policy and its tokenizer into `directory`, which appears when it is whole."""
    if directory.exists():
        raise MisuseError(f"{directory} exists: export to a directory of its own")
    with atomic_directory(directory) as draft:
        policy.export(draft)
        copy_tokenizer(model, draft)


def copy_tokenizer(model: ModelConfig, directory: Path) -> None:
    """Put the files of the model's tokenizer into `directory`."""
    name = "path" if model.tokenizer_path is None else "tokenizer_path"
    given = model.path if model.tokenizer_path is None else model.tokenizer_path
    source = resolve_model_path(given, f"model.{name}", model.origin(name))
    for part in (source / file for file in TOKENIZER_FILES):
        if part.is_dir():
            shutil.copytree(part, directory / part.name)
        elif part.is_file():
            shutil.copyfile(part, directory / part.name)
    if model.custom_chat_template is not None:
        (directory / "chat_template.jinja").write_text(model.custom_chat_template, encoding="utf-8")


log = logging.getLogger(__name__)

FOLDER = "checkpoints"
PROGRESS = "training/progress.json"
_NAME = re.compile(r"(\d+)-step-(\d+)")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, beside its networks."""

    step: int
    """Training steps done."""
    version: int
    state: Mapping[str, Any]
    """Whatever the caller wants back, such as the position in the data: JSON-able, and otherwise unread."""


def latest(run_dir: Path, through: int | None = None) -> Path | None:
    """The newest whole checkpoint of a run (of step `through` or before), if there is one.

    Damaged ones are passed over with a warning."""
    for path in reversed(_saved(run_dir)):
        if through is not None and step_of(path) > through:
            continue
        try:
            verify(path)
        except Damaged as damage:
            log.warning("checkpoint passed over: %s", damage)
        else:
            return path
    return None


def restore_networks(path: Path, policy: Policy, critic: Critic | None, reference: Reference | None) -> Progress:
    """Bring networks to where a checkpoint was saved."""
    policy.restore(path)
    if critic is not None:
        critic.restore(path)
    if reference is not None:
        reference.restore(path)
    progress = Progress(**json.loads((path / PROGRESS).read_text(encoding="utf-8")))
    if progress.version != policy.version:
        raise RunError(f"{path} has version {progress.version} in {PROGRESS}, and {policy.version} in its policy")
    return progress


class Checkpoints:
    """The checkpoints of one run, for the process that trains it."""

    def __init__(
        self,
        run_dir: Path,
        *,
        checkpoint: CheckpointConfig,
        model: ModelConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._checkpoint = checkpoint
        self._model = model
        self._clock = clock
        self._saved_at = clock()
        self._scores = CheckpointScores(run_dir / FOLDER)
        self._measured: dict[int, CheckpointScore] = {}
        """Scores by step, of steps that may be saved yet."""
        self._of_step: dict[int, Path] = {}
        """Checkpoints that hold the weights of this start's steps."""
        self._lock = threading.Lock()
        """A validation may end, and score its step, while another thread saves."""

    def score(self, step: int, score: CheckpointScore) -> None:
        """Say how good the weights after a step are; where they are saved, or will be, that decides `best`."""
        with self._lock:
            self._measured[step] = score
            if step in self._of_step and self._of_step[step].is_dir():
                self._scores.add(self._of_step[step], score)

    def save(
        self,
        policy: Policy,
        critic: Critic | None,
        step: int,
        state: Mapping[str, Any],
        reference: Reference | None = None,
    ) -> Path:
        """Save everything after training step `step`, then delete what is no longer kept. The best one is kept."""
        folder = self._run_dir / FOLDER
        remove_leftovers(folder)
        last = max((_order(path) for path in _saved(self._run_dir)), default=0)
        target = folder / f"{last + 1:04d}-step-{step}"
        with _disk_errors(target), atomic_directory(target) as draft:
            policy.save(draft)
            if critic is not None:
                critic.save(draft)
            if reference is not None:
                reference.save(draft)
            copy_tokenizer(self._model, draft)
            progress = {"step": step, "version": policy.version, "state": dict(state)}
            (draft / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
            write_manifest(draft)
        self._saved_at = self._clock()
        with self._lock:
            self._of_step[step] = target
            link(folder, LATEST, target)
            if step in self._measured:
                self._scores.add(target, self._measured[step])
            trash = [move_to_trash(path) for path in self._outdated()]
            self._scores.drop_missing()
        for path in trash:
            delete(path)
        return target

    def find(self) -> Path | None:
        """The checkpoint to go on from, as `checkpoint.resume_mode` says; None to start afresh."""
        checkpoint = self._checkpoint
        if checkpoint.resume_mode == "disable":
            return None
        if checkpoint.resume_mode == "auto":
            return latest(self._run_dir)
        path = Path(checkpoint.resume_from_path or "").expanduser()
        try:
            verify(path)
        except Damaged as damage:
            key, given = "checkpoint.resume_from_path", checkpoint.resume_from_path
            fix = "give a directory that a run saved, as run_dir/checkpoints/0003-step-120"
            problem = f"no whole checkpoint: {damage}"
            raise ConfigError([Mistake(key, problem, given, checkpoint.origin("resume_from_path"), fix)]) from damage
        return path

    def restore(self, policy: Policy, critic: Critic | None, reference: Reference | None = None) -> Progress | None:
        """Bring the networks to where the run stopped; None, and nothing changed, where it starts afresh."""
        path = self.find()
        if path is None:
            return None
        progress = restore_networks(path, policy, critic, reference)
        if path.parent == self._run_dir / FOLDER:
            self._of_step[progress.step] = path
        return progress

    def is_due(self, step: int) -> bool:
        """Whether `checkpoint.save_freq` or `checkpoint.save_every_s` asks for a save after this step."""
        save_freq, save_every_s = self._checkpoint.save_freq, self._checkpoint.save_every_s
        if save_freq > 0 and step % save_freq == 0:
            return True
        return save_every_s is not None and self._clock() - self._saved_at >= save_every_s

    def _outdated(self) -> list[Path]:
        """All but the newest whole checkpoint of each of the last k steps saved, and but the best.

        One that is not whole goes with them."""
        keep_last = self._checkpoint.keep_last
        if keep_last is None:
            return []
        saved = _saved(self._run_dir)
        kept: dict[int, Path] = {}
        for path in reversed(saved):
            if len(kept) < keep_last and _looks_whole(path):
                kept.setdefault(step_of(path), path)
        best = self._scores.best()
        return [path for path in saved[:-1] if path != best and path not in kept.values()]


def _saved(run_dir: Path) -> list[Path]:
    """Every checkpoint of a run, oldest first."""
    folder = run_dir / FOLDER
    named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(named, key=_order)


def _order(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None, f"{path} is no checkpoint"
    return int(found[1])


def step_of(path: Path) -> int:
    """The step after which a checkpoint was saved, by its name."""
    found = _NAME.fullmatch(path.name)
    assert found is not None, f"{path} is no checkpoint"
    return int(found[2])


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """A save that the disk does not take is a RunError in a sentence, whichever library met it."""
    try:
        yield
    except Exception as error:
        disk = explain_disk_error(error, target)
        if disk is None and not isinstance(error, OSError):
            raise
        problem = disk.problem if disk else getattr(error, "strerror", None) or error
        raise RunError(
            f"the checkpoint {target} cannot be saved: {problem}. Earlier checkpoints are whole: "
            f"{disk.fix if disk else 'see the cause'} and start again to go on from the newest"
        ) from error


def _looks_whole(path: Path) -> bool:
    try:
        read_manifest(path)
    except Damaged:
        return False
    return True
