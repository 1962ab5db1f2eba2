"""Checkpoint links: `latest` and `best` beside the checkpoints, and the scores that decide which is best.

run_dir/checkpoints/
  0003-step-120/
  latest -> 0003-step-120      the newest save
  best -> 0002-step-80         the save with the highest score; see `CheckpointScores.best`
  scores.json                  {"0002-step-80": {"metric": "validation/success", "value": 0.61}, …}

Links are relative, so a run directory can be moved or copied with them. They are a courtesy: where the file system
takes none, training goes on, and says so.
Invariant: a link that exists leads to a checkpoint that was written to its end.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

log = logging.getLogger(__name__)

LATEST = "latest"
BEST = "best"
SCORES = "scores.json"

VALIDATION_SUCCESS = "validation/success"
VALIDATION_LOSS = "validation/loss"
TRAINING_REWARD = "reward/mean"
METRICS = (VALIDATION_SUCCESS, VALIDATION_LOSS, TRAINING_REWARD)
"""What a score may be, the more telling first."""
_LOWER_IS_BETTER = frozenset({VALIDATION_LOSS})


@dataclass(frozen=True, slots=True)
class CheckpointScore:
    """How good the weights of a checkpoint are, by one metric."""

    metric: str
    value: float


class CheckpointScores:
    """Scores of the checkpoints in a folder, by their names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scores = read_scores(folder)

    def add(self, checkpoint: Path, score: CheckpointScore) -> None:
        """Score a checkpoint, and let `best` lead to the best one."""
        if isfinite(score.value):
            self._scores[checkpoint.name] = score
            self._write()

    def drop_missing(self) -> None:
        """Forget checkpoints that are no longer there."""
        if gone := [name for name in self._scores if not (self._folder / name).is_dir()]:
            for name in gone:
                del self._scores[name]
            self._write()

    def best(self) -> Path | None:
        """The checkpoint with the highest validation success, the lowest validation loss, or where none was validated
        the highest training reward.

        Of equals the newest. None where no checkpoint has a score.
        """
        return best_of(self._folder, self._scores)

    def _write(self) -> None:
        try:
            draft = self._folder / f".{SCORES}"
            draft.write_text(json.dumps({name: asdict(score) for name, score in self._scores.items()}), "utf-8")
            draft.replace(self._folder / SCORES)
        except OSError as error:
            log.warning("%s could not be written: %s", self._folder / SCORES, error)
        if best := self.best():
            link(self._folder, BEST, best)


def read_scores(folder: Path) -> dict[str, CheckpointScore]:
    """Scores by checkpoint name; empty where there are none. What cannot be read counts as none, and is reported."""
    path = folder / SCORES
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(name): CheckpointScore(str(score["metric"]), float(score["value"])) for name, score in stored.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read, so no earlier checkpoint counts as best: %s", path, error)
        return {}


def best_of(folder: Path, scores: Mapping[str, CheckpointScore]) -> Path | None:
    """See `CheckpointScores.best`."""
    for metric in METRICS:
        sign = -1 if metric in _LOWER_IS_BETTER else 1
        known = {name: sign * score.value for name, score in scores.items() if score.metric == metric}
        if present := [name for name in known if (folder / name).is_dir()]:
            return folder / max(present, key=lambda name: (known[name], int(name.partition("-")[0])))
    return None


def link(folder: Path, name: str, checkpoint: Path) -> None:
    """Let `name` lead to a checkpoint of the same folder, from one moment to the next."""
    draft = folder / f".{name}"
    try:
        draft.unlink(missing_ok=True)
        draft.symlink_to(checkpoint.name, target_is_directory=True)
        os.replace(draft, folder / name)
    except OSError as error:
        log.warning("no link %s to %s: %s", folder / name, checkpoint.name, error)
