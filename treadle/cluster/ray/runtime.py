"""Ray runtime: the parts of a training run on a cluster, ranks that train, replicas that sample, and the way between.

Owns the order of starting and closing. Networks are sharded where several ranks train, and else on one device.
Everything else about a run is the same as in one process. Ray is started from the thread of the caller's loop, which
must outlive the block: see `connection`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import torch

from treadle.cluster.ray.placement import Reservation
from treadle.cluster.ray.ranks import RemoteRanks
from treadle.cluster.ray.rollout import RayRollout, Report, reserved
from treadle.cluster.ray.single_rank import SingleRankSpec
from treadle.cluster.ray.weight_sender import RankSender
from treadle.cluster.runtime import sharded_spec
from treadle.config import Plan, TrainConfig
from treadle.engine.native.engine import choose_dtype
from treadle.policy.policy import Sampling
from treadle.policy.rank import NetworksSpec
from treadle.policy.rank_calls import ShardedCritic, ShardedPolicy, ShardedReference
from treadle.policy.rank_group import RankGroup
from treadle.process.supervisor import print_recovery
from treadle.rollout.engines import RolloutBackend
from treadle.trainer.step import StepParts
from treadle.weights.sync import WeightSync
from treadle.weights.transports import TransportSpec


def start_ranks(config: TrainConfig, total_steps: int, reservation: Reservation) -> RemoteRanks:
    """Every rank that the plan places, with its networks loaded; or an error. Blocks."""
    places = reservation.rank_slots()
    return RemoteRanks.start(
        _spec(config, total_steps, len(places)),
        places,
        launch_timeout_s=config.rollout.limits.launch_timeout_s,
        timeout_s=config.trainer.rank_timeout_s,
    )


def make_step(config: TrainConfig, ranks: RankGroup) -> StepParts:
    """What a training step works with, on these ranks."""
    _, ref, critic = config.used_networks()
    reference = None if ref is None else ShardedReference(ranks)
    return StepParts.of(config, ShardedPolicy(ranks), reference, None if critic is None else ShardedCritic(ranks))


def _spec(config: TrainConfig, steps: int, num_ranks: int) -> NetworksSpec | SingleRankSpec:
    if num_ranks > 1:
        return sharded_spec(config, steps)
    actor, ref, critic = config.used_networks()
    correction, sampling = config.algorithm.rollout_correction, Sampling.of(config.rollout)
    return SingleRankSpec(config.model, actor, correction, sampling, steps, ref, critic)


_SPARE_TIMEOUT_S = 10.0
"""How long Ray may take to give GPUs that seem to be free."""


class RayRuntime:
    """The parts of a training run on a cluster, where its plan places them. Made by `start`."""

    def __init__(
        self,
        config: TrainConfig,
        reservation: Reservation,
        handles: RemoteRanks,
        transport: TransportSpec,
        validation: RolloutBackend | None,
        report: Report,
    ) -> None:
        ranks = RankGroup(handles, config.trainer.rank_timeout_s)
        device = torch.device("cuda" if reservation.replica_slots()[0].gpus else "cpu")
        sender = RankSender(ranks, choose_dtype(config.rollout, device), transport)
        self.networks = make_step(config, ranks)
        self.weights = WeightSync.of(config, sender)
        self.rollout: RolloutBackend = RayRollout(config, reservation, report)
        self.validation = validation
        self._handles = handles

    @classmethod
    @asynccontextmanager
    async def start(
        cls, config: TrainConfig, plan: Plan, total_steps: int, *, report: Report = print_recovery
    ) -> AsyncIterator["RayRuntime"]:
        """Everything that the plan places on the connected cluster, started; closed again in the opposite order."""
        async with AsyncExitStack() as parts:
            reservation = await parts.enter_async_context(reserved(config, plan))
            transport = TransportSpec.of(config, replicas=len(reservation.replica_slots()), device="cuda:0")
            parts.callback(transport.clear)
            handles = await asyncio.to_thread(start_ranks, config, total_steps, reservation)
            parts.callback(handles.close)
            validation = await _validation(config, reservation, report)
            yield cls(config, reservation, handles, transport, validation, report)

    async def watch(self) -> None:
        """Raise when a rank dies, also between two calls to it."""
        raise await asyncio.wrap_future(self._handles.gone)


async def _validation(config: TrainConfig, reservation: Reservation, report: Report) -> RolloutBackend | None:
    """A further replica with weights of its own, where the plan has one."""
    slot = await reservation.validation_slot(timeout_s=_SPARE_TIMEOUT_S)
    return None if slot is None else RayRollout(config, reservation, report, slots=[slot], name="validation")
