"""Rollout on a Ray cluster: replicas and their supervisor, agent workers, a scorer.

Owns which part goes to which slot of the plan. Imports no torch: a rollout that stands alone starts without it.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial

from treadle.cluster.ray.connection import connected, find_nodes, machines_of
from treadle.cluster.ray.launcher import RayLauncher
from treadle.cluster.ray.placement import ActorSlot, Reservation
from treadle.cluster.ray.replicas import RayReplicas
from treadle.cluster.ray.scorer import RemoteScorer, ScorerSetup
from treadle.config import Config, ModelConfig, Plan, RewardConfig, RolloutConfig, make_plan
from treadle.config.placement import reward_gpu_requests
from treadle.data.renderer import Renderer
from treadle.engine.protocol import TokenGenerator
from treadle.engine.replica_supervisor import StartedEngines
from treadle.process.supervisor import Recovery, print_recovery
from treadle.reward.context import RewardContext
from treadle.rollout.engines import RolloutBackend
from treadle.rollout.protocol import ManagedScorer, ManagedWorker
from treadle.rollout.remote_worker import RemoteAgentWorker
from treadle.rollout.service import RolloutParts

Report = Callable[[Recovery], None]
"""Told of every replica that died, and what became of it."""


@asynccontextmanager
async def started_rollout(config: Config, *, report: Report = print_recovery) -> AsyncIterator[RolloutParts]:
    """The places of a rollout that stands alone; parts are started there as it calls for them."""
    with planned(config) as plan:
        async with reserved(config, plan) as reservation:
            yield RolloutParts(RayRollout(config, reservation, report))


@contextmanager
def started_rollout_blocking(config: Config, *, report: Report = print_recovery) -> Iterator[RolloutParts]:
    """As `started_rollout`, for code that does not await."""
    with planned(config) as plan:
        limit = config.rollout.limits.launch_timeout_s
        reservation = Reservation.reserve_blocking(plan, find_nodes(), timeout_s=limit)
        try:
            yield RolloutParts(RayRollout(config, reservation, report))
        finally:
            reservation.release()


@contextmanager
def planned(config: Config) -> Iterator[Plan]:
    """The plan of a run on the cluster that the config names, while there is a connection to it."""
    with connected(config.cluster) as nodes:
        yield make_plan(config, machines_of(nodes))


@asynccontextmanager
async def reserved(config: Config, plan: Plan) -> AsyncIterator[Reservation]:
    """The places of a plan, on the connected cluster."""
    limit = config.rollout.limits.launch_timeout_s
    reservation = await Reservation.reserve(plan, find_nodes(), timeout_s=limit)
    try:
        yield reservation
    finally:
        reservation.release()


class RayRollout(RolloutBackend):
    """Replicas, agent workers and the scorer of a rollout in actors, where the plan has places for them."""

    def __init__(
        self,
        config: Config,
        reservation: Reservation,
        report: Report,
        *,
        slots: Sequence[ActorSlot] = (),
        name: str | None = None,
    ) -> None:
        """With replicas in `slots`, or where the plan has them."""
        super().__init__()
        self._config = config
        self._reservation = reservation
        move = reservation.move if reservation.can_move else None
        slots = slots or reservation.replica_slots()
        self.replicas = RayReplicas(config.rollout, config.model, slots, name=name, move=move, report=report)

    async def start_engines(
        self, rollout: RolloutConfig, model: ModelConfig, renderer: Renderer, api_key: str | None
    ) -> StartedEngines:
        return StartedEngines(await self.replicas.start(), self.replicas.supervisor)

    async def start_workers(
        self, rollout: RolloutConfig, model: ModelConfig, renderer: Renderer, engine: TokenGenerator
    ) -> Sequence[ManagedWorker]:
        """`rollout.agent.num_workers` actors, spread over the rollout's nodes; without them, in the driver."""
        if not rollout.agent.num_workers:
            return await super().start_workers(rollout, model, renderer, engine)
        async with AsyncExitStack() as started:
            workers = []
            for at in range(rollout.agent.num_workers):
                slot = partial(self._reservation.worker_slot, at)
                worker = await start_worker(self._config, engine, slot, f"agent worker {at}")
                started.push_async_callback(worker.close)
                workers.append(worker)
            started.pop_all()
            return workers

    async def start_scorer(self, reward: RewardConfig, context: RewardContext) -> ManagedScorer:
        """In an actor, where it has work there: models without GPUs, and sums of a session's own rewards, stay here."""
        rollout, reservation = self._config.rollout, self._reservation
        only_functions = set(reward.weights()) == set(reward.functions)
        runs_functions = bool(reward.functions and reward.num_workers and only_functions)
        if not reward.weights() or not (runs_functions or any(reward_gpu_requests(self._config))):
            return await super().start_scorer(reward, context)
        setup = ScorerSetup(reward, self._config.model, context.api_keys, reservation.reward_gpus())
        slot = partial(reservation.scorer_slot, rollout.agent.num_workers or 1)
        return await RemoteScorer.create(setup, slot, rollout.limits, context.policy)


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
