"""What keys of `data`, `logging` and `checkpoint` change: in tasks and their order, and in files of a run."""

import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.effects.cases import Case, cases, config_cases, training
from tests.effects.models import tiny_model
from treadle.checkpoint.store import Checkpoints
from treadle.config.root import DataConfig, LoggingConfig
from treadle.data.task_feed import load_feed
from treadle.data.task_source import TaskSource
from treadle.data.tasks import load_training_tasks, load_validation_tasks
from treadle.errors import ConfigError
from treadle.observe.trackers import Trackers
from treadle.types import Group, Outcome, Score, StopReason, Task, Trajectory

HERE = __name__
BASE = """
model: {path: unused}
data: {train_files: [tasks.jsonl]}
rollout: {n: 2}
reward: {functions: {it: {path: exact_match}}}
trainer: {}
"""


def count_up(most: int = 2) -> list[dict[str, str]]:
    """A task source of one's own."""
    return [{"prompt": f"after {number}?"} for number in range(most)]


def tasks(directory: Path, **keys: Any) -> list[Any]:
    """The tasks of two epochs as they are drawn, and those of validation."""
    rows = [
        {"prompt": f"a{at}", "question": "b", "answer": "1", "truth": "2", "data_source": "x", "set": "y", "n": 3}
        for at in range(4)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        Path("other.jsonl").write_text('{"prompt": "c"}\n')
        data = DataConfig(**{"train_files": ("rows.jsonl",), "val_files": ("rows.jsonl",), **keys})
        try:
            sources: tuple[TaskSource, ...] = (load_training_tasks(data), load_validation_tasks(data))
        except ConfigError as error:
            return [str(error)]
    drawn = [item for source in sources for item in source.take(2 * len(source))]
    return [(item.messages, item.ground_truth, item.data_source, item.n) for item in drawn]


class Backwards:
    """A sampler of one's own: the last tasks first."""

    def __init__(self, tasks: Any, skip: int = 0) -> None:
        self._uids = [task.uid for task in reversed(tasks)][skip:]

    def next(self, count: int) -> list[str]:
        return [self._uids[at % len(self._uids)] for at in range(count)]

    def tell(self, results: Any) -> None: ...

    def state(self) -> None: ...

    def load_state(self, state: None) -> None: ...


def curriculum(directory: Path, **keys: Any) -> list[str]:
    """The tasks of 16 batches that a sampler chooses, where the policy solves more of one than of the one before."""
    data = training(BASE, keys).data
    source = TaskSource([Task(str(at), ()) for at in range(6)], shuffle=False, seed=0)
    feed, chosen, ended = load_feed(source, data), [], Outcome.ended(StopReason.STOP)
    for drawn in (drawn for _ in range(16) for drawn in feed.draw(2)):
        solved = int(drawn.task.uid.partition("@")[0])
        samples = [Trajectory("", at, (), ended, Score(float(at < solved))) for at in range(5)]
        chosen.append(drawn.task.uid)
        feed.end(drawn.position, Group(drawn.task, tuple(samples)))
        feed.tell()
        feed.leave(drawn.position)
    return chosen


def tracked(directory: Path, **keys: Any) -> Any:
    """The files that trackers leave, and what the metrics endpoint says."""
    logging = LoggingConfig(**{"logger": (), **keys})
    port, said = logging.prometheus_port, ""
    trackers = Trackers.start(logging, directory, {})
    trackers.log(1, {"reward/mean": 0.5})
    if port is not None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            said = str(port) + answer.read().decode()
    trackers.close()
    return sorted({path.name.split(".")[0] for path in directory.rglob("*") if path.is_file()}), said


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Weights:
    """As much of a policy as a checkpoint asks for: a save of the real one waits for the disk many times."""

    version = 0

    def save(self, directory: Path) -> None:
        (directory / "training").mkdir()
        (directory / "training" / "weights").write_text("some")


def kept(directory: Path, **keys: Any) -> Any:
    """Which steps of five are saved, which checkpoints are left of them, and from which one the next start goes on."""
    key = "checkpoint.resume_from_path"
    if key in keys:
        keys[key] = str(directory / "other" / "checkpoints" / keys[key])
    config, now, policy = training(BASE, {**keys, "model.path": str(tiny_model())}), 0.0, Weights()
    other = Checkpoints(directory / "other", checkpoint=config.checkpoint, model=config.model)
    for step in (7, 8) if key in keys else ():
        other.save(policy, None, step, {})
    store = Checkpoints(directory / "run", checkpoint=config.checkpoint, model=config.model, clock=lambda: now)
    saved = []
    for step in range(1, 6):
        now += 100.0
        if store.is_due(step):
            store.save(policy, None, step, {})
            saved.append(step)
    left = sorted(path.name for path in (directory / "run").rglob("*-step-*"))
    return saved, left, str(store.find())


EVERY = {"checkpoint.save_freq": 1}
BAND, HARD = {"data.sampler": "success_band"}, {"data.sampler": "hard_replay"}
EFFECTS: dict[str, Case] = {
    **cases(
        "data",
        tasks,
        *(("train_files", ("rows.jsonl",), ("other.jsonl",)), ("val_files", ("rows.jsonl",), ("other.jsonl",))),
        *(("train_max_samples", -1, 2), ("val_max_samples", -1, 2), ("prompt_key", "prompt", "question")),
        *(("system_prompt", None, "Be brief."), ("prompt_template", None, "{{ question }}?")),
        ("train_weights", (1.0, 1.0), (3.0, 1.0), {"train_files": ("rows.jsonl", "other.jsonl"), "shuffle": False}),
        *(("answer_key", "answer", "truth"), ("reward_fn_key", "data_source", "set")),
        *(("shuffle", True, False), ("seed", 1, 2), ("max_n", 1024, 2)),
        (
            *("source_kwargs", {"count_up": {"most": 2}}, {"count_up": {"most": 3}}),
            {"train_files": (f"{HERE}:count_up",)},
        ),
    ),
    **config_cases(
        "data",
        curriculum,
        ("sampler", None, "success_band"),
        ("sampler_kwargs", {"skip": 0}, {"skip": 1}, {"data.sampler": f"{HERE}:Backwards"}),
        *((f"success_band.{name}", one, other, BAND) for name, one, other in (("low", 0.1, 0.5), ("high", 0.9, 0.5))),
        *(("success_band.explore", 0.1, 0.5, BAND), ("hard_replay.share", 0.25, 0.5, HARD)),
        ("hard_replay.below", 0.1, 0.9, HARD),
    ),
    **cases(
        "logging",
        lambda directory, **keys: LoggingConfig(**keys).directory(),
        *(("project_name", "a", "b"), ("experiment_name", "a", "b"), ("run_dir", None, "elsewhere")),
    ),
    **cases("logging", tracked, ("logger", (), ("tensorboard",)), ("prometheus_port", None, free_port())),
    **config_cases(
        "checkpoint",
        kept,
        *(("save_freq", 1, 2), ("save_every_s", 100.0, 200.0), ("keep_last", 1, 2, EVERY)),
        ("resume_mode", "auto", "disable", EVERY),
        (
            *("resume_from_path", "0001-step-7", "0002-step-8"),
            {**EVERY, "checkpoint.resume_mode": "resume_path"},
        ),
    ),
}
