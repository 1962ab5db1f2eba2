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
from treadle.cluster.ray.rollout import Report, reserved, supply_rollout
from treadle.cluster.ray.single_rank import SingleRankSpec
from treadle.cluster.ray.weight_sender import RankSender
from treadle.cluster.runtime import Runtime, sharded_spec
from treadle.config import TrainConfig
from treadle.data.tasks import TaskSource
from treadle.engine.native.engine import choose_dtype
from treadle.policy.policy import Sampling
from treadle.policy.rank import NetworksSpec
from treadle.policy.rank_group import RankGroup
from treadle.policy.sharded import ShardedCritic, ShardedPolicy, ShardedReference
from treadle.process.supervisor import print_recovery
from treadle.rollout import RolloutParts
from treadle.trainer.step import StepParts
from treadle.trainer.terms import total_steps
from treadle.weights.sync import WeightSync
from treadle.weights.transports import TransportSpec


def start_ranks(config: TrainConfig, tasks: TaskSource, reservation: Reservation) -> RemoteRanks:
    """Every rank that the plan places, with its networks loaded; or an error. Blocks."""
    places = reservation.rank_slots()
    return RemoteRanks.start(
        _spec(config, tasks, len(places)),
        places,
        launch_timeout_s=config.rollout.limits.launch_timeout_s,
        timeout_s=config.trainer.rank_timeout_s,
    )


def make_step(config: TrainConfig, ranks: RankGroup) -> StepParts:
    """What a training step works with, on these ranks."""
    _, ref, critic = config.used_networks()
    return StepParts(
        ShardedPolicy(ranks),
        config.actor,
        config.algorithm,
        config.trainer,
        None if ref is None else ShardedReference(ranks),
        None if critic is None else ShardedCritic(ranks),
        config.reward,
    )


def _spec(config: TrainConfig, tasks: TaskSource, num_ranks: int) -> NetworksSpec | SingleRankSpec:
    steps = total_steps(config, tasks)
    if num_ranks > 1:
        return sharded_spec(config, steps)
    actor, ref, critic = config.used_networks()
    correction, sampling = config.algorithm.rollout_correction, Sampling.of(config.rollout)
    return SingleRankSpec(config.model, actor, correction, sampling, steps, ref, critic)


_SPARE_TIMEOUT_S = 10.0
"""How long Ray may take to give GPUs that seem to be free."""


@asynccontextmanager
async def started(config: TrainConfig, tasks: TaskSource, *, report: Report = print_recovery) -> AsyncIterator[Runtime]:
    """Everything that the plan of this config places, started; closed again in the opposite order."""
    async with AsyncExitStack() as parts:
        reservation = await parts.enter_async_context(reserved(config))
        route = TransportSpec.of(config, replicas=len(reservation.replica_slots()), device="cuda:0")
        parts.callback(route.clear)
        handles = await asyncio.to_thread(start_ranks, config, tasks, reservation)
        parts.callback(handles.close)
        validation = await _validation(config, reservation, report)
        yield _runtime(config, reservation, handles, route, report, validation)


async def _validation(config: TrainConfig, reservation: Reservation, report: Report) -> RolloutParts | None:
    """A further replica with weights of its own, where the plan has one."""
    slot = await reservation.validation_slot(timeout_s=_SPARE_TIMEOUT_S)
    return None if slot is None else supply_rollout(config, reservation, report, slots=[slot], name="validation")


def _runtime(
    config: TrainConfig,
    reservation: Reservation,
    handles: RemoteRanks,
    route: TransportSpec,
    report: Report,
    validation: RolloutParts | None,
) -> Runtime:
    ranks = RankGroup(handles, config.trainer.rank_timeout_s)
    device = torch.device("cuda" if reservation.replica_slots()[0].gpus else "cpu")
    sender = RankSender(ranks, choose_dtype(config.rollout, device), route)

    async def watch() -> None:
        raise await asyncio.wrap_future(handles.gone)

    return Runtime(
        step=make_step(config, ranks),
        rollout=supply_rollout(config, reservation, report),
        weights=WeightSync.of(config, sender),
        validation=validation,
        watch=watch,
    )
