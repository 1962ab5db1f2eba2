"""What keys of `trainer` and their neighbours change: in schedules, in plans, in weights on their way."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests import virtual_time
from tests.effects.cases import Case, config_cases, configured, training
from tests.rollouts import renderer, task
from tests.schedules import ASYNC, BASE, Rollout, Trial
from treadle.config import Machine, make_plan
from treadle.engine.protocol import WeightUpdate
from treadle.errors import TreadleError
from treadle.model.checksum import checksum
from treadle.observe.trackers import Trackers
from treadle.rollout.service import RolloutKind, RolloutParts, RolloutService
from treadle.types import Batch
from treadle.weights.sync import WeightSync
from treadle.weights.transfer import CastTensors
from treadle.weights.transports import TransportSpec

SCRIPTED = "model: {path: unused}\nrollout: {name: scripted, agent: {num_workers: 0}}\ntrainer: {}\n"


class Told:
    """A tracker that keeps what it is told of conversations."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, int]] = []

    def log(self, step: int, metrics: Any) -> None: ...

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        self.texts.append((step, len(texts)))

    def close(self) -> None: ...


def scheduled(directory: Path, **keys: Any) -> Any:
    """What a schedule asked for and trained on, in which order; its pushes and validations; and how long it took."""
    tracker, pushes = Told(), list[int]()
    rollout = Rollout(dull=("t1", "t2"), delay=lambda uid: 30.0 if uid == "t3" else 10.0)
    words = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]
    trial = Trial(
        directory,
        rollout,
        *words,
        validation=(task("held out"), task("another")),
        train_s=5.0,
        on_push=lambda run, version: pushes.append(version),
        trackers=Trackers({"told": tracker}),
    )

    async def main() -> tuple[str, float]:
        try:
            await trial.run_to_end()
            ended = ""
        except TreadleError as error:
            ended = str(error)
        return ended, asyncio.get_running_loop().time()

    ended = virtual_time.run(main())
    found = [(validation.step, validation.success) for validation in trial.run.validations]
    return trial.batches, trial.ages(), rollout.asked, pushes, found, rollout.slept, tracker.texts, ended


def planned(directory: Path, **keys: Any) -> Any:
    """The plan of a config for two machines of four GPUs."""
    try:
        return make_plan(training(BASE, keys), [Machine("m0", 4), Machine("m1", 4)])
    except TreadleError as error:
        return str(error)


class Sender:
    """Weights of one tensor."""

    async def publish(self, version: int) -> WeightUpdate:
        tensors = {"weight": torch.zeros(1)}
        return WeightUpdate(version, checksum(tensors), tensors)

    async def retire(self, version: int) -> None: ...


def updated(directory: Path, **keys: Any) -> Any:
    """What becomes of a session that is open when new weights come, and how long everything takes."""
    config = training(BASE, {**keys})
    slow = configured(SCRIPTED.replace("trainer: {}\n", ""), {"rollout.scripted.latency_s": 50.0})

    async def main() -> Any:
        clock = asyncio.get_running_loop().time
        service = await RolloutService.start(slow.rollout, slow.model, None, RolloutParts(renderer=renderer()))
        service.name = "rollout"  # type: ignore[attr-defined]
        weights = WeightSync.of(config, Sender())
        running = asyncio.ensure_future(service.generate([task()], RolloutKind.TRAINING))
        await asyncio.sleep(10)
        await weights.push(service, 1)  # type: ignore[arg-type]
        changed = clock()
        batch: Batch = await running
        await service.close()
        rows = [(row.ids, row.versions) for item in batch.trajectories for row in item.rows]
        return changed, clock(), rows

    return virtual_time.run(main())


def sent(directory: Path, **keys: Any) -> Any:
    """The transport that a config opens, what a policy's weights become on it, and the files there."""
    key = "trainer.weights.directory"
    if keys.get(key) is not None:
        keys[key] = str(directory / keys[key])
    keys["logging.run_dir"] = str(directory / "run")
    transport = TransportSpec.of(training(BASE, keys), replicas=1, device="cpu").open()
    tensors = {name: torch.ones(180_000) for name in ("a", "b")}
    try:
        transfer = transport.publish(1, CastTensors(tensors, torch.float32))
        return type(transport).__name__, len(transfer.buckets), sorted(str(path) for path in directory.rglob("*"))
    finally:
        transport.close()


def words(*given: str) -> dict[str, Any]:
    return dict(word.split("=", 1) for word in given)


APART = words(*ASYNC)
ASYNCHRONOUS = {"trainer.mode": "fully_async", **APART}
VALIDATED = {"data.val_files": "unused"}
GPUS = {"actor._target_": "treadle.config.FSDPActorConfig", "trainer.n_gpus_per_node": 2}
OWN = {"rollout.nnodes": 1, "trainer.mode": "one_step_off", "algorithm.rollout_correction.rollout_is": "none"}
DISK = {**OWN, "trainer.weights.transport": "disk"}

EFFECTS: dict[str, Case] = {
    **config_cases(
        "",
        scheduled,
        ("trainer.mode", "sync", "one_step_off", APART),
        ("trainer.max_staleness", 0, 2, ASYNCHRONOUS),
        ("trainer.stale_samples", "wait", "drop", {**ASYNCHRONOUS, "trainer.max_staleness": 1}),
        ("trainer.parameter_sync_steps", 1, 2, ASYNCHRONOUS),
        ("trainer.total_training_steps", 2, 3),
        ("trainer.total_epochs", 1, 2, {"trainer.total_training_steps": "null"}),
        ("trainer.val_before_train", False, True, VALIDATED),
        ("trainer.val_only", False, True, VALIDATED),
        ("trainer.test_freq", -1, 1, VALIDATED),
        ("data.train_batch_size", 2, 4),
        ("algorithm.filter_groups.enable", False, True),
        ("algorithm.filter_groups.metric", "reward", "answer", {"algorithm.filter_groups.enable": True}),
        ("algorithm.filter_groups.max_num_gen_batches", 1, 10, {"algorithm.filter_groups.enable": True}),
        ("reward.success_threshold", 0.5, 2.0, VALIDATED),
        ("logging.log_val_generations", 0, 1, VALIDATED),
        ("rollout.free_cache_engine", False, True),
    ),
    **config_cases(
        "",
        planned,
        *(("trainer.nnodes", 1, 2, GPUS), ("trainer.n_gpus_per_node", 1, 2, GPUS)),
        ("trainer.processes_per_node", 1, 2, {"actor._target_": GPUS["actor._target_"]}),
        *(
            ("rollout.nnodes", 1, 2, OWN),
            ("rollout.n_gpus_per_node", 0, 2, OWN),
            ("rollout.replicas_per_node", 1, 2, OWN),
        ),
        (
            *("rollout.tensor_model_parallel_size", 1, 2),
            {**OWN, "rollout.name": "vllm", "rollout.n_gpus_per_node": 2},
        ),
        ("cluster.backend", "local", "ray", OWN),
    ),
    **config_cases("trainer", updated, ("on_weight_update", "continue", "drop", OWN)),
    **config_cases(
        "trainer.weights",
        sent,
        ("transport", "shared", "disk", OWN),
        ("bucket_mb", 1, 2, DISK),
        ("directory", None, "elsewhere", DISK),
    ),
}
