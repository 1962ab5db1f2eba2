"""The parts of a training run on a Ray cluster: ranks that train, replicas that sample, and the way between them.

Owns the order of starting and closing. Everything else about a run is the same as in one process.
Ray is started from the thread of the caller's loop, which must outlive the block: see `connection`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import torch

from treadle.cluster.ray.networks import make_step, start_ranks
from treadle.cluster.ray.placement import Reservation
from treadle.cluster.ray.ranks import RemoteRanks
from treadle.cluster.ray.rollout import Report, reserved, supply_rollout
from treadle.cluster.ray.sender import RankSender
from treadle.cluster.runtime import Runtime, push_timeout_s
from treadle.config import TrainConfig
from treadle.data.tasks import TaskSource
from treadle.engine.native.engine import choose_dtype
from treadle.policy.rank_group import RankGroup
from treadle.process.supervisor import print_recovery
from treadle.rollout import RolloutParts
from treadle.weights.sync import PushReport, WeightReceiver, push_weights
from treadle.weights.transports import TransportSpec

_SPARE_TIMEOUT_S = 10.0
"""How long Ray may take to give GPUs that nobody seems to use."""


@asynccontextmanager
async def started(config: TrainConfig, tasks: TaskSource, *, report: Report = print_recovery) -> AsyncIterator[Runtime]:
    """Everything that the plan of this config places, started; closed again in the opposite order."""
    async with AsyncExitStack() as parts:
        reservation = await parts.enter_async_context(reserved(config))
        route = TransportSpec.of(config, replicas=len(reservation.replica_seats()), device="cuda:0")
        parts.callback(route.clear)
        handles = await asyncio.to_thread(start_ranks, config, tasks, reservation)
        parts.callback(handles.close)
        validation = await _validation(config, reservation, report)
        yield _runtime(config, reservation, handles, route, report, validation)


async def _validation(config: TrainConfig, reservation: Reservation, report: Report) -> RolloutParts | None:
    """A further replica with weights of its own, where the plan has one."""
    seat = await reservation.validation_seat(timeout_s=_SPARE_TIMEOUT_S)
    return None if seat is None else supply_rollout(config, reservation, report, seats=[seat], name="validation")


def _runtime(
    config: TrainConfig,
    reservation: Reservation,
    handles: RemoteRanks,
    route: TransportSpec,
    report: Report,
    validation: RolloutParts | None,
) -> Runtime:
    ranks = RankGroup(handles, config.trainer.rank_timeout_s)
    device = torch.device("cuda" if reservation.replica_seats()[0].gpus else "cpu")
    sender = RankSender(ranks, choose_dtype(config.rollout, device), route)

    async def give(receiver: WeightReceiver, version: int) -> PushReport:
        return await push_weights(sender, receiver, version, timeout_s=push_timeout_s(config))

    async def watch() -> None:
        raise await asyncio.wrap_future(handles.gone)

    return Runtime(
        step=make_step(config, ranks),
        rollout=supply_rollout(config, reservation, report),
        push=give,
        validation=validation,
        watch=watch,
    )
