"""A training run in this process: policy, engine, rollout and journal put together, and taken apart again.

Owns which device each part is on, and whether policy and engine share one module. Knows no schedule's inside.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from treadle.checkpoint.store import Checkpoints
from treadle.config import TrainConfig, to_yaml
from treadle.config.show import flatten
from treadle.data.tasks import TaskSource, load_training_tasks, load_validation_tasks
from treadle.engine.native.engine import NativeEngine, choose_dtype
from treadle.errors import ConfigError, Mistake
from treadle.journal import Journal
from treadle.model.tokenizer import resolve_model_path
from treadle.observe.trackers import Trackers
from treadle.policy.critic import SingleCritic
from treadle.policy.precision import DTYPES
from treadle.policy.reference import SingleReference
from treadle.policy.single import Sampling, SinglePolicy
from treadle.rollout import AgentLoopManager
from treadle.rollout import Parts as RolloutParts
from treadle.trainer.evaluate import Validation
from treadle.trainer.run import Interrupted, Parts, Run, View, total_steps
from treadle.trainer.step import StepParts
from treadle.trainer.sync import train_sync
from treadle.weights.push import push


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What came of a run."""

    run_dir: Path
    steps: int
    interrupted: bool
    validations: tuple[Validation, ...]


def check_local(config: TrainConfig) -> None:
    """Refuse what one process cannot do, before anything is loaded."""
    trainer, rollout, cluster = config.trainer, config.rollout, config.cluster
    wants = [
        ("trainer.mode", trainer.mode, trainer.mode != "sync", "only sync is part of this version"),
        ("trainer.n_gpus_per_node", trainer.n_gpus_per_node, trainer.n_gpus_per_node > 1, "one device trains for now"),
        ("trainer.nnodes", trainer.nnodes, trainer.nnodes > 1, "one node trains for now"),
        ("rollout.nnodes", rollout.nnodes, rollout.nnodes > 0, "the rollout shares the trainer's device for now"),
        ("rollout.name", rollout.name, rollout.name != "native", "only the native engine takes weights for now"),
        ("cluster.backend", cluster.backend, cluster.backend != "local", "only local is part of this version"),
    ]
    mistakes = [Mistake(key, why, value, config.origin(key)) for key, value, wrong, why in wants if wrong]
    if mistakes:
        raise ConfigError(mistakes)


async def train(config: TrainConfig, view: View, command: Sequence[str] = ()) -> TrainingResult:
    """Train as the config says. Ctrl-C ends it in order and saves; the same call goes on from there."""
    check_local(config)
    async with _assembled(config, view, command) as run:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, run.request_stop)
        interrupted = False
        try:
            await train_sync(run)
        except Interrupted:
            interrupted = True
            await run.save_interrupted()
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        return TrainingResult(Path(config.logging.directory()), run.step, interrupted, tuple(run.validations))


@asynccontextmanager
async def _assembled(config: TrainConfig, view: View, command: Sequence[str]) -> AsyncIterator[Run]:
    """Every part, started; closed again in the opposite order."""
    device = _device(config)
    run_dir, logging = Path(config.logging.directory()), config.logging
    tasks = load_training_tasks(config.data)
    resolve_model_path(config.model.path, origin=config.model.origin("path"))  # before there is a run directory
    async with AsyncExitStack() as parts:
        resolved = to_yaml(config, origins=True)
        journal = Journal.open(run_dir, max_mb=logging.journal_max_mb, config_yaml=resolved, command=command)
        await parts.enter_async_context(journal)
        trackers = Trackers.start(logging, run_dir, flatten(config))
        parts.callback(trackers.close)
        validation_tasks = tuple(load_validation_tasks(config.data)) if config.data.val_files else ()
        step = await asyncio.to_thread(load_networks, config, tasks)
        parts.callback(_close_networks, step)
        assert isinstance(step.policy, SinglePolicy), "loaded just before"
        manager = await _start_rollout(config, step.policy, journal, device)
        await parts.enter_async_context(manager)
        shared = _shares_module(config, device)
        yield Run(
            config,
            Parts(
                step=step,
                rollout=manager,
                push=partial(
                    push,
                    step.policy,
                    manager,
                    shared=shared,
                    timeout_s=config.rollout.limits.request_timeout_s,
                    dtype=choose_dtype(config.rollout, device),
                ),
                tasks=tasks,
                validation_tasks=validation_tasks,
                checkpoints=Checkpoints(run_dir, checkpoint=config.checkpoint, model=config.model),
                journal=journal,
                trackers=trackers,
                view=view,
            ),
        )


def _device(config: TrainConfig) -> torch.device:
    return torch.device("cuda" if config.trainer.n_gpus_per_node else "cpu")


def load_networks(config: TrainConfig, tasks: TaskSource | None = None) -> StepParts:
    """The networks a run trains, as they are before its first step."""
    device = _device(config)
    tasks = tasks or load_training_tasks(config.data)
    model, actor, algorithm = config.model, config.actor, config.algorithm
    sampling = Sampling(config.rollout.temperature, config.rollout.response_length)
    steps = total_steps(config, tasks)
    policy = SinglePolicy.create(
        model=model,
        actor=actor,
        rollout_correction=algorithm.rollout_correction,
        sampling=sampling,
        total_steps=steps,
        device=device,
    )
    reference = None
    if actor.use_kl_loss or algorithm.use_kl_in_reward:
        reference = SingleReference.create(model=model, ref=config.ref, temperature=sampling.temperature, device=device)
    critic = None
    if algorithm.needs_critic():
        critic = SingleCritic.create(
            model=model,
            critic=config.critic,
            actor=actor,
            response_length=sampling.response_length,
            total_steps=steps,
            device=device,
        )
    return StepParts(policy, actor, algorithm, config.trainer, reference, critic)


def _close_networks(step: StepParts) -> None:
    for network in (step.critic, step.reference, step.policy):
        if network is not None:
            network.close()


def _shares_module(config: TrainConfig, device: torch.device) -> bool:
    """Whether the engine can sample from the policy's own weights: same device, same number format."""
    return bool(DTYPES[config.actor.model_dtype] == choose_dtype(config.rollout, device))


async def _start_rollout(
    config: TrainConfig, policy: SinglePolicy, journal: Journal, device: torch.device
) -> AgentLoopManager:
    source = policy.module if _shares_module(config, device) else config.model

    async def engines() -> list[NativeEngine]:
        return [await NativeEngine.create(config.rollout, source, device=device, version=policy.version)]

    parts = RolloutParts(engines=engines, journal=journal if config.logging.journal else None)
    return await AgentLoopManager.create(rollout=config.rollout, model=config.model, reward=config.reward, parts=parts)
