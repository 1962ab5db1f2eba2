"""Runtime: what a place to run supplies: networks, engines, and the weight sync between them.

`LocalRuntime` and `RayRuntime` start what a plan places, and are used alike: everything else about a training run is
written once. The networks of this machine are loaded here: on one device in this process, or sharded over a process for
each device.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import torch

from treadle.config import TrainConfig
from treadle.config.training import FSDPActorConfig, FSDPCriticConfig, FSDPRefConfig, TrainerConfig
from treadle.policy.critic import SingleCritic
from treadle.policy.local_ranks import LocalRanks
from treadle.policy.policy import Sampling, SinglePolicy
from treadle.policy.rank import NetworksSpec
from treadle.policy.rank_calls import ShardedNetworks, needs_ranks
from treadle.policy.reference import SingleReference
from treadle.rollout.engines import RolloutBackend
from treadle.trainer.step import StepParts
from treadle.weights.sync import WeightSync


class Runtime(Protocol):
    """The started parts of a training run; closed where they were started."""

    @property
    def networks(self) -> StepParts: ...

    @property
    def weights(self) -> WeightSync:
        """Pushes the policy's weights, and orders pushes and training steps."""
        ...

    @property
    def rollout(self) -> RolloutBackend:
        """Starts the parts of the rollout that training samples from."""
        ...

    @property
    def validation(self) -> RolloutBackend | None:
        """Has engines with weights of their own, for validation that goes on beside training; None: there are none."""
        ...

    async def watch(self) -> None:
        """Raise when a part dies between two calls to it, and else wait until cancelled."""
        ...


class Networks:
    """Networks of this machine, loaded; `close` is the last call."""

    def __init__(self, step: StepParts, ranks: LocalRanks | None = None) -> None:
        self.step = step
        self._ranks = ranks

    async def watch(self) -> None:
        """Raise when a rank dies, also between two calls; without ranks, wait until cancelled."""
        if self._ranks is None:
            await asyncio.Event().wait()
        else:
            raise await asyncio.wrap_future(self._ranks.gone)

    def close(self) -> None:
        for network in (self.step.critic, self.step.reference, self.step.policy):
            if network is not None:
                network.close()


def name_devices(trainer: TrainerConfig, gpus: Sequence[int]) -> tuple[str, ...]:
    """The device of each rank, on these GPUs; on the processor where there are none."""
    return tuple(f"cuda:{gpu}" for gpu in gpus) or ("cpu",) * trainer.processes_per_node


def load_networks(config: TrainConfig, total_steps: int, gpus: Sequence[int]) -> Networks:
    """The networks a run trains, as they are before its first step, on the GPUs that a plan gives to the trainer."""
    devices = name_devices(config.trainer, gpus)
    if needs_ranks(len(devices), *config.used_networks()):
        return _load_sharded(config, total_steps, devices)
    return Networks(_load_single(config, total_steps, torch.device(devices[0])))


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
    return Networks(StepParts.of(config, networks.policy, networks.reference, networks.critic), ranks)


def _load_single(config: TrainConfig, steps: int, device: torch.device) -> StepParts:
    model = config.model
    actor, ref, values = config.used_networks()
    sampling = Sampling.of(config.rollout)
    policy = SinglePolicy.create(
        model=model,
        actor=actor,
        rollout_correction=config.algorithm.rollout_correction,
        sampling=sampling,
        total_steps=steps,
        device=device,
    )
    reference = critic = None
    if ref is not None:
        reference = policy.frozen_reference(ref) or SingleReference.create(
            model=ref.model_of(model),
            ref=ref,
            temperature=sampling.temperature,
            device=device,
            longest=sampling.longest,
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
    return StepParts.of(config, policy, reference, critic)
