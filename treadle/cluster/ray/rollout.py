"""What a rollout on a Ray cluster is supplied with: replicas and who looks after them, agent workers, a scorer.

Owns who sits where. Imports no torch, so that a rollout which stands alone starts without it.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial

from treadle.cluster.ray.connection import connected, machines_of
from treadle.cluster.ray.messages import ScorerSetup
from treadle.cluster.ray.placement import Reservation
from treadle.cluster.ray.pool import ReplicaPool
from treadle.cluster.ray.scorer import RemoteScorer
from treadle.cluster.ray.seat import Seat
from treadle.cluster.ray.supervisor import Supervisor
from treadle.cluster.ray.worker import RemoteWorker
from treadle.config import Config, make_plan
from treadle.config.reward_places import wishes
from treadle.engine.recovery import Recovery, print_recovery
from treadle.engine.router import Router
from treadle.reward.surroundings import Surroundings
from treadle.rollout.service import Note, Parts
from treadle.rollout.services import Generator

Report = Callable[[Recovery], None]
"""Told of every replica that died, and what became of it."""


@asynccontextmanager
async def started_rollout(config: Config, *, report: Report = print_recovery) -> AsyncIterator[Parts]:
    """The places of a rollout that stands alone; parts are started there as it calls for them."""
    async with reserved(config) as reservation:
        yield supply_rollout(config, reservation, report)


@contextmanager
def started_rollout_blocking(config: Config, *, report: Report = print_recovery) -> Iterator[Parts]:
    """The same, for code that does not await."""
    with connected(config.cluster) as nodes:
        plan, limit = make_plan(config, machines_of(nodes)), config.rollout.limits.launch_timeout_s
        reservation = Reservation.reserve_blocking(plan, nodes, timeout_s=limit)
        try:
            yield supply_rollout(config, reservation, report)
        finally:
            reservation.release()


@asynccontextmanager
async def reserved(config: Config) -> AsyncIterator[Reservation]:
    """The places of a plan, on the cluster that the config names."""
    with connected(config.cluster) as nodes:
        plan, limit = make_plan(config, machines_of(nodes)), config.rollout.limits.launch_timeout_s
        reservation = await Reservation.reserve(plan, nodes, timeout_s=limit)
        try:
            yield reservation
        finally:
            reservation.release()


def supply_rollout(
    config: Config, reservation: Reservation, report: Report, *, seats: Sequence[Seat] = (), name: str | None = None
) -> Parts:
    """What this config needs of these places; with replicas in `seats`, or where the plan has them."""
    rollout, reward = config.rollout, config.reward
    move = reservation.move if reservation.can_move else None
    pool = ReplicaPool(rollout, config.model, seats or reservation.replica_seats(), name=name, move=move)
    workers, scorer = None, None

    async def attend(router: Router, note: Note) -> Supervisor:
        def tell(recovery: Recovery) -> None:
            report(recovery)
            note("replica", asdict(recovery))

        return await Supervisor.attend(pool, router, report=tell)

    async def start_workers(engine: Generator) -> Sequence[RemoteWorker]:
        return await _start_workers(config, engine, reservation)

    async def start_scorer(lent: Surroundings) -> RemoteScorer:
        setup = ScorerSetup(reward, config.model, lent.api_keys, reservation.reward_gpus())
        seat = partial(reservation.scorer_seat, rollout.agent.num_workers or 1)
        return await RemoteScorer.create(setup, seat, rollout.limits, lent.policy)

    if rollout.agent.num_workers:
        workers = start_workers
    only_functions = set(reward.weights()) == set(reward.functions)
    if any(wishes(config)) or (reward.functions and reward.num_workers and only_functions):
        scorer = start_scorer  # models without GPUs stay with the manager
    return Parts(engines=pool.start, attend=attend, workers=workers, scorer=scorer)


async def _start_workers(config: Config, engine: Generator, reservation: Reservation) -> list[RemoteWorker]:
    """`rollout.agent.num_workers` actors, spread over the rollout's nodes; or none, and an error."""
    rollout = config.rollout
    async with AsyncExitStack() as started:
        workers = []
        for at in range(rollout.agent.num_workers or 0):
            seat, name = partial(reservation.worker_seat, at), f"agent worker {at}"
            worker = await RemoteWorker.create(rollout=rollout, model=config.model, engine=engine, seat=seat, name=name)
            started.push_async_callback(worker.close)
            workers.append(worker)
        started.pop_all()
        return workers
