"""What Ray adds to a turn: processor time of every process, less that of the same rollout in one process.

    python bench/ray_overhead.py [--n 1024] [--at-once 1024 64] [--repeats 5]

N tasks × 4 assistant turns on scripted engines, as in `bench/orchestration.py`. Time is that of the driver and of
everything below it: Ray's own daemons, replicas, agent workers. Beside it, from the same run: the plain way, one Ray
call for each request. The limit is 0.3 ms a turn.
"""

import argparse
import asyncio
import gc
import os
import random
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray

from bench.orchestration import TURNS, rollout_of, tasks_of
from treadle.cluster.ray.connection import Node, connected
from treadle.cluster.ray.placement import Reservation
from treadle.cluster.ray.replicas import RayReplicas
from treadle.cluster.ray.rollout import start_worker
from treadle.config import ClusterConfig, Config, ModelConfig, RolloutConfig
from treadle.config.plan import make_plan
from treadle.data.renderer import Renderer
from treadle.engine.protocol import Engine
from treadle.engine.router import Router
from treadle.engine.scripted import ScriptedEngine
from treadle.rollout.completion_log import CompletionLog
from treadle.rollout.dispatch import Dispatcher, RolloutRequest
from treadle.rollout.worker import AgentLoopWorker
from treadle.types import Completion, Request, SamplingParams, Trajectory

LIMIT_MS = 0.3
TICK = os.sysconf("SC_CLK_TCK")

Workers = Callable[[Router, AsyncExitStack], Awaitable[Sequence[Any]]]


def tree_seconds() -> float:
    """User and system time of this process and all below it."""
    parents: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we were looking
        pid = int(stat.parent.name)
        parents.setdefault(int(fields[1]), []).append(pid)
        seconds[pid] = (int(fields[11]) + int(fields[12])) / TICK
    todo, total = [os.getpid()], 0.0
    while todo:
        pid = todo.pop()
        total += seconds.get(pid, 0.0)
        todo += parents.get(pid, [])
    return total


async def idle_rate(seconds: float = 3.0, quiet: float = 0.1) -> float:
    """What the daemons use while nothing happens, in processor seconds a second; it is not a turn's doing.

    Ray starts spare processes after each actor: the figure is taken when that is over.
    """
    for _ in range(20):
        before = tree_seconds()
        await asyncio.sleep(seconds)
        rate = (tree_seconds() - before) / seconds
        if rate < quiet:
            break
    return rate


async def measure(
    rollout: RolloutConfig, model: ModelConfig, engines: Sequence[Engine], workers: Workers, count: int, repeats: int
) -> float:
    """Median CPU milliseconds a turn. The first run warms up."""
    figures: list[float] = []
    async with AsyncExitStack() as started:
        router = Router(engines, limits=rollout.limits, failures=rollout.failures, rng=random.Random(0))
        started.push_async_callback(router.close)
        dispatcher = Dispatcher(
            rollout, await workers(router, started), None, completion_log=CompletionLog(router, None)
        )
        order = RolloutRequest(
            SamplingParams(rollout.response_length, stop_token_ids=Renderer.create(model).stop_token_ids), 1
        )
        idle = await idle_rate()
        for at in range(repeats + 1):
            gc.collect()
            clock = asyncio.get_running_loop().time
            before, began = tree_seconds(), clock()
            batch = await dispatcher.generate(tasks_of(count), order)
            spent = tree_seconds() - before - idle * (clock() - began)
            turns = sum(trajectory.num_turns for trajectory in batch.trajectories)
            assert turns == TURNS * count, (
                f"{turns} turns, {TURNS * count} expected: {_first_failure(batch.trajectories)}"
            )
            if at:
                figures.append(1e3 * spent / turns)
    return statistics.median(figures)


def _first_failure(trajectories: Sequence[Trajectory]) -> str:
    return next((item.outcome.detail for item in trajectories if not item.outcome.ok), "none failed")


class PlainActor:
    """The plain way: a Ray call for each request."""

    def __init__(self, rollout: RolloutConfig, model: ModelConfig, path: list[str]) -> None:
        sys.path += path
        self._engine = scripted(rollout, model, "plain")

    async def generate(self, request: Request) -> Completion:
        return await self._engine.generate(request)


class PlainReplica(ScriptedEngine):
    """Its driver's side."""

    actor: Any

    async def generate(self, request: Request) -> Completion:
        completion: Completion = await self.actor.generate.remote(request)
        return completion


def scripted(rollout: RolloutConfig, model: ModelConfig, name: str, kind: type = ScriptedEngine) -> Any:
    made = Renderer.create(model)
    return kind.create(rollout.scripted, name=name, encode=made.encode, decode=made.decode)


class Bench:
    """One cluster, and the ways to use it."""

    def __init__(self, model: ModelConfig, nodes: Sequence[Node], options: argparse.Namespace) -> None:
        self._model = model
        self._nodes = nodes
        self._options = options

    @asynccontextmanager
    async def _reserved(self, rollout: RolloutConfig) -> AsyncIterator[Reservation]:
        plan = make_plan(Config(model=self._model, rollout=rollout), [node.machine for node in self._nodes])
        reservation = await Reservation.reserve(plan, self._nodes, timeout_s=30)
        try:
            yield reservation
        finally:
            reservation.release()

    async def _here(self, router: Router, started: AsyncExitStack) -> Sequence[Any]:
        rollout = rollout_of(self._options.n, 1)
        return [await AgentLoopWorker.create(rollout=rollout, model=self._model, engine=router)]

    async def in_process(self, at_once: int) -> float:
        rollout = rollout_of(at_once, 1)
        engines = [scripted(rollout, self._model, f"scripted-{at}") for at in range(2)]
        return await measure(rollout, self._model, engines, self._here, self._options.n, self._options.repeats)

    async def plain(self, at_once: int) -> float:
        rollout = rollout_of(at_once, 1)
        engines = []
        for at in range(2):
            engine = scripted(rollout, self._model, f"plain-{at}", PlainReplica)
            engine.actor = (
                ray.remote(PlainActor).options(num_cpus=0, max_concurrency=4096).remote(rollout, self._model, sys.path)
            )
            engines.append(engine)
        try:
            return await measure(rollout, self._model, engines, self._here, self._options.n, self._options.repeats)
        finally:
            for engine in engines:
                ray.kill(engine.actor)

    async def replicas(self, at_once: int, workers: int = 0) -> float:
        values = {**rollout_of(at_once, max(1, workers)).values(), "replicas_per_node": 2}
        rollout = RolloutConfig(**values)
        async with self._reserved(rollout) as reservation:
            made_replicas = RayReplicas(rollout, self._model, reservation.replica_slots())
            engines = await made_replicas.start()

            async def remote(router: Router, started: AsyncExitStack) -> Sequence[Any]:
                supervisor = made_replicas.supervisor
                supervisor.connect(router)
                started.push_async_callback(supervisor.close)
                if not workers:
                    return await self._here(router, started)
                made = []
                for at in range(workers):
                    config = Config(model=self._model, rollout=rollout)
                    slot = partial(reservation.worker_slot, at)
                    worker = await start_worker(config, router, slot, f"agent worker {at}")
                    started.push_async_callback(worker.close)
                    made.append(worker)
                return made

            return await measure(rollout, self._model, engines, remote, self._options.n, self._options.repeats)


async def report(bench: Bench, options: argparse.Namespace) -> None:
    bases = [await bench.in_process(at_once) for at_once in options.at_once]  # before Ray has anything to do
    for at_once, base in zip(options.at_once, bases, strict=True):
        rows = {
            "2 replicas on Ray": await bench.replicas(at_once),
            "2 replicas, 2 agent workers on Ray": await bench.replicas(at_once, 2),
            "the plain way: one Ray call a request": await bench.plain(at_once),
        }
        print(f"CPU ms per turn, {options.n} trajectories × {TURNS} turns, {at_once} at once")
        print(f"{'in one process':40} {base:8.3f}")
        for name, figure in rows.items():
            added = figure - base
            print(f"{name:40} {figure:8.3f}   adds {added:6.3f}, {added / LIMIT_MS:5.2f} × the limit", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokenizer", default="treadle/tiny-calculator", help="a tokenizer with a hermes tools template"
    )
    parser.add_argument("--n", type=int, default=1024, help="trajectories of a run")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1024, 64], help="trajectories that run at once")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    here = ClusterConfig(backend="ray", ray_init={"num_cpus": 2, "object_store_memory": 100_000_000})
    with connected(here) as nodes:
        asyncio.run(report(Bench(ModelConfig(path=options.tokenizer), nodes, options), options))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from bench.ray_overhead import main as run  # so that actors find these classes by name

    run()
