"""Ray for tests: small clusters that are always taken down, and what stands between a session and its actors."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from treadle.cluster.ray.connection import Node, connected, find_nodes
from treadle.cluster.ray.placement import ActorSlot, Reservation
from treadle.cluster.ray.replicas import RayReplica, RayReplicas
from treadle.config import ClusterConfig, Config, ModelConfig, RolloutConfig
from treadle.config.plan import make_plan
from treadle.engine.replica_supervisor import ReplicaSupervisor
from treadle.engine.restarting_engine import RestartingEngine
from treadle.engine.router import Router
from treadle.process.supervisor import Recovery, RestartPolicy

STORE_BYTES = 100_000_000

os.environ.setdefault("OMP_NUM_THREADS", "1")  # actors have the driver's; small models leave threads nothing to do


@contextmanager
def ray_here(num_cpus: int = 4, **options: Any) -> Iterator[tuple[Node, ...]]:
    """A cluster of one node, started here."""
    ray_init = {"num_cpus": num_cpus, "object_store_memory": STORE_BYTES, "log_to_driver": False, **options}
    with connected(ClusterConfig(backend="ray", ray_init=ray_init)) as nodes:
        yield nodes


@contextmanager
def ray_cluster(*shapes: dict[str, Any]) -> Iterator[Cluster]:
    """A cluster of several nodes on this machine, one for each shape such as `{"num_cpus": 1}`; connected."""
    cluster = Cluster()
    try:
        for shape in shapes:
            cluster.add_node(object_store_memory=STORE_BYTES, include_dashboard=False, **shape)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@asynccontextmanager
async def reserved(
    rollout: RolloutConfig, model: ModelConfig, nodes: Sequence[Node] | None = None
) -> AsyncIterator[Reservation]:
    """Places for a rollout that stands alone."""
    nodes = find_nodes() if nodes is None else nodes
    config = Config(model=model, rollout=rollout, cluster=ClusterConfig(backend="ray"))
    plan = make_plan(config, [node.machine for node in nodes])
    reservation = await Reservation.reserve(plan, nodes, timeout_s=10)
    try:
        yield reservation
    finally:
        reservation.release()


@contextmanager
def bundle(node: Node) -> Iterator[ActorSlot]:
    """A slot of its own on a node."""
    group = placement_group([{"CPU": 1.0}], bundle_label_selector=[{"ray.io/node-id": node.id}])
    assert group.wait(10)
    try:
        yield ActorSlot(group, 0, node)
    finally:
        remove_placement_group(group)


class Fleet:
    """Supervised replicas behind a router, and what was reported about them."""

    def __init__(
        self,
        router: Router,
        engines: Sequence[RestartingEngine],
        supervisor: ReplicaSupervisor,
        recoveries: list[Recovery],
        news: asyncio.Event,
        reservation: Reservation,
        slots: Mapping[str, ActorSlot],
    ) -> None:
        self.router = router
        self.engines = engines
        self.supervisor = supervisor
        self.recoveries = recoveries
        self.news = news
        self.reservation = reservation
        self.slots = slots

    def replica(self, at: int = 0) -> RayReplica:
        """The one that serves in a slot now."""
        replica = self.engines[at]._engine
        assert isinstance(replica, RayReplica)
        return replica

    def has_saved(self, name: str) -> bool:
        """Whether every request that is open at a replica has handed some of its tokens over, and there are such."""
        (engine,) = [engine for engine in self.engines if engine.name == name]
        return bool(engine._requests.open) and all(request.saved for request in engine._requests.open)

    async def recovered(self, count: int = 1, timeout_s: float = 60.0) -> None:
        """Wait for reports; they come from the supervisor's own tasks."""
        async with asyncio.timeout(timeout_s):
            while len(self.recoveries) < count:
                await self.news.wait()
                self.news.clear()


@asynccontextmanager
async def fleet(
    rollout: RolloutConfig,
    model: ModelConfig,
    nodes: Sequence[Node] | None = None,
    *,
    policy: RestartPolicy | None = None,
    **options: Any,
) -> AsyncIterator[Fleet]:
    """Everything between a session and its actors."""
    recoveries: list[Recovery] = []
    news = asyncio.Event()

    def report(recovery: Recovery) -> None:
        recoveries.append(recovery)
        news.set()

    async with AsyncExitStack() as started:
        reservation = await started.enter_async_context(reserved(rollout, model, nodes))
        policy = policy or RestartPolicy(first_wait_s=0.1)
        replicas = RayReplicas(
            rollout, model, reservation.replica_slots(), move=reservation.move, report=report, policy=policy, **options
        )
        engines = await replicas.start()
        router = Router(engines, limits=rollout.limits, failures=rollout.failures, rng=random.Random(0))
        started.push_async_callback(router.close)
        supervisor = replicas.supervisor
        supervisor.connect(router)
        started.push_async_callback(supervisor.close)
        yield Fleet(router, engines, supervisor, recoveries, news, reservation, replicas.slots)


async def until(reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(timeout_s):
        while not reached():  # noqa: ASYNC110  other processes set no event
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Those of `pids` that are still there after a while."""
    end = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left
