"""Runtime: what a place to run supplies: networks, engines, and the weight sync between them.

Every runtime (this machine, Ray) gives the same record, so that everything else about a training run is written once.
The networks of this machine are loaded here: on one device in this process, or sharded over a process for each device.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import torch

from treadle.config import TrainConfig
from treadle.config.training import FSDPActorConfig, FSDPCriticConfig, FSDPRefConfig
from treadle.data.tasks import TaskSource, load_training_tasks
from treadle.policy.critic import SingleCritic
from treadle.policy.local_ranks import LocalRanks
from treadle.policy.policy import Sampling, SinglePolicy
from treadle.policy.rank import NetworksSpec
from treadle.policy.reference import SingleReference
from treadle.policy.sharded import ShardedNetworks, needs_ranks
from treadle.rollout import RolloutParts
from treadle.trainer.step import StepParts
from treadle.trainer.terms import total_steps
from treadle.weights.sync import WeightSync


@dataclass(frozen=True, slots=True)
class Networks:
    """Loaded; `close` is the last call."""

    step: StepParts
    watch: Callable[[], Awaitable[None]] | None = None
    """Raises when a rank dies, also between two calls; None where there are no ranks."""

    def close(self) -> None:
        for network in (self.step.critic, self.step.reference, self.step.policy):
            if network is not None:
                network.close()


def trainer_devices(config: TrainConfig) -> tuple[str, ...]:
    """The device of each rank of this machine."""
    trainer = config.trainer
    if trainer.n_gpus_per_node:
        return tuple(f"cuda:{at}" for at in range(trainer.n_gpus_per_node))
    return ("cpu",) * trainer.processes_per_node


def load_networks(config: TrainConfig, tasks: TaskSource | None = None) -> Networks:
    """The networks a run trains, as they are before its first step."""
    steps, devices = total_steps(config, tasks or load_training_tasks(config.data)), trainer_devices(config)
    if needs_ranks(len(devices), *config.used_networks()):
        return _load_sharded(config, steps, devices)
    return Networks(_load_single(config, steps, torch.device(devices[0])))


def sharded_spec(config: TrainConfig, steps: int) -> NetworksSpec:
    """What each of several ranks loads, where the rules of a config have nothing against it."""
    actor, ref, critic = config.used_networks()
    assert isinstance(actor, FSDPActorConfig), "checked before"
    assert ref is None or isinstance(ref, FSDPRefConfig), "checked before"
    assert critic is None or isinstance(critic, FSDPCriticConfig), "checked before"
    correction, sampling = config.algorithm.rollout_correction, Sampling.of(config.rollout)
    return NetworksSpec(config.model, actor, correction, sampling, steps, ref, critic)


def _load_sharded(config: TrainConfig, steps: int, devices: tuple[str, ...]) -> Networks:
    spec, limits, timeout_s = sharded_spec(config, steps), config.rollout.limits, config.trainer.rank_timeout_s
    ranks = LocalRanks.start(spec, devices, launch_timeout_s=limits.launch_timeout_s, timeout_s=timeout_s)
    networks = ShardedNetworks.over(ranks, spec, timeout_s)
    step = StepParts(
        networks.policy,
        config.actor,
        config.algorithm,
        config.trainer,
        networks.reference,
        networks.critic,
        config.reward,
    )
    return Networks(step, partial(_wait_for_death, ranks))


async def _wait_for_death(ranks: LocalRanks) -> None:
    raise await asyncio.wrap_future(ranks.gone)


def _load_single(config: TrainConfig, steps: int, device: torch.device) -> StepParts:
    model, algorithm = config.model, config.algorithm
    actor, ref, values = config.used_networks()
    sampling = Sampling.of(config.rollout)
    policy = SinglePolicy.create(
        model=model,
        actor=actor,
        rollout_correction=algorithm.rollout_correction,
        sampling=sampling,
        total_steps=steps,
        device=device,
    )
    reference = critic = None
    if ref is not None:
        reference = SingleReference.create(
            model=model, ref=ref, temperature=sampling.temperature, device=device, longest=sampling.longest
        )
    if values is not None:
        critic = SingleCritic.create(
            model=model,
            critic=values,
            actor=actor,
            response_length=sampling.response_length,
            total_steps=steps,
            device=device,
            longest=sampling.longest,
        )
    return StepParts(policy, actor, algorithm, config.trainer, reference, critic, config.reward)


@dataclass(frozen=True, slots=True)
class Runtime:
    """Started networks, and what a rollout builds its own parts from; its maker closes them."""

    step: StepParts
    rollout: RolloutParts
    """Engines, agent workers and a scorer for the rollout that training samples from."""
    weights: WeightSync
    """Pushes the policy's weights, and orders pushes and training steps."""
    validation: RolloutParts | None = None
    """Engines with weights of their own, for validation that goes on beside training; None where there are none."""
    watch: Callable[[], Awaitable[None]] | None = None
    """Raises when a part dies between two calls to it, and else waits until cancelled; None: there is none."""
