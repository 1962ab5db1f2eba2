"""Rollout on a Ray cluster: replicas and their supervisor, agent workers, a scorer.

Owns which part goes to which slot of the plan. Imports no torch: a rollout that stands alone starts without it.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial

from treadle.cluster.ray.connection import connected, machines_of
from treadle.cluster.ray.launcher import RayLauncher
from treadle.cluster.ray.placement import ActorSlot, Reservation
from treadle.cluster.ray.replicas import RayReplicas
from treadle.cluster.ray.scorer import RemoteScorer, ScorerSetup
from treadle.config import Config, make_plan
from treadle.config.placement import reward_gpu_requests
from treadle.engine.protocol import TokenGenerator
from treadle.process.supervisor import Recovery, print_recovery
from treadle.reward.context import RewardContext
from treadle.rollout.remote_worker import RemoteAgentWorker
from treadle.rollout.service import RolloutParts

Report = Callable[[Recovery], None]
"""Told of every replica that died, and what became of it."""


@asynccontextmanager
async def started_rollout(config: Config, *, report: Report = print_recovery) -> AsyncIterator[RolloutParts]:
    """The places of a rollout that stands alone; parts are started there as it calls for them."""
    async with reserved(config) as reservation:
        yield supply_rollout(config, reservation, report)


@contextmanager
def started_rollout_blocking(config: Config, *, report: Report = print_recovery) -> Iterator[RolloutParts]:
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
    config: Config,
    reservation: Reservation,
    report: Report,
    *,
    slots: Sequence[ActorSlot] = (),
    name: str | None = None,
) -> RolloutParts:
    """What this config needs of these places; with replicas in `slots`, or where the plan has them."""
    rollout, reward = config.rollout, config.reward
    move = reservation.move if reservation.can_move else None
    places = slots or reservation.replica_slots()
    replicas = RayReplicas(rollout, config.model, places, name=name, move=move, report=report)
    workers, scorer = None, None

    async def start_workers(engine: TokenGenerator) -> Sequence[RemoteAgentWorker]:
        return await _start_workers(config, engine, reservation)

    async def start_scorer(lent: RewardContext) -> RemoteScorer:
        setup = ScorerSetup(reward, config.model, lent.api_keys, reservation.reward_gpus())
        slot = partial(reservation.scorer_slot, rollout.agent.num_workers or 1)
        return await RemoteScorer.create(setup, slot, rollout.limits, lent.policy)

    if rollout.agent.num_workers:
        workers = start_workers
    only_functions = set(reward.weights()) == set(reward.functions)
    if any(reward_gpu_requests(config)) or (reward.functions and reward.num_workers and only_functions):
        scorer = start_scorer  # models without GPUs stay with the manager
    return RolloutParts(engines=replicas.start, attend=replicas.supervisor.attend, workers=workers, scorer=scorer)


async def _start_workers(config: Config, engine: TokenGenerator, reservation: Reservation) -> list[RemoteAgentWorker]:
    """`rollout.agent.num_workers` actors, spread over the rollout's nodes; or none, and an error."""
    rollout = config.rollout
    async with AsyncExitStack() as started:
        workers = []
        for at in range(rollout.agent.num_workers or 0):
            worker = await start_worker(config, engine, partial(reservation.worker_slot, at), f"agent worker {at}")
            started.push_async_callback(worker.close)
            workers.append(worker)
        started.pop_all()
        return workers


async def start_worker(
    config: Config, engine: TokenGenerator, slot: Callable[[], ActorSlot], name: str
) -> RemoteAgentWorker:
    """An agent worker in an actor. `slot` says where, whenever one is started."""
    return await RemoteAgentWorker.create(
        rollout=config.rollout,
        model=config.model,
        engine=engine,
        name=name,
        launcher=lambda: RayLauncher(slot()),
        sends_text=not config.rollout.uses_gpus(),
    )
