"""How long each part of a run takes to be back after SIGKILL, on one machine and on Ray.

    PYTHONPATH=. python bench/recovery.py [--repeats 3]        on this machine
    PYTHONPATH=. python bench/recovery.py --ray [--repeats 3]  the same on a Ray cluster that is started here

A part is started, used once, killed, and used again: the time is from the kill to the answer, for a request that was
made as soon as the part was gone. Ranks are not restarted: there it is the time until the driver knows. Models are tiny
or scripted, so that what is timed is a process and what it imports; a real model adds the time it takes to load.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.rollouts import engine, rollout, save_model, say, task
from treadle.config import Config, ModelConfig
from treadle.config.reward import RewardConfig, RewardFunctionConfig
from treadle.engine.protocol import Engine
from treadle.engine.remote import RemoteEngine, start_native_engine
from treadle.engine.replica_supervisor import ReplicaSupervisor
from treadle.process.supervisor import RestartPolicy
from treadle.reward.scorer import Scorer
from treadle.rollout.remote_worker import RemoteAgentWorker
from treadle.rollout.worker import Job
from treadle.types import Outcome, Request, Row, SamplingParams, StopReason, Trajectory

TINY = ModelConfig(path="treadle/tiny-calculator")
REWARD = RewardConfig(functions={"count": RewardFunctionConfig(path="tests.ray_engines:count_letters")}, num_workers=1)
POLICY = RestartPolicy(attempts=99, first_wait_s=0.0)
"""Without the back-off, which is for processes that die again soon."""

Part = tuple[Callable[[], int], Callable[[], Awaitable[Any]]]
"""The process to kill, and how the part is used."""


async def start_scripted() -> Engine:
    return engine(say("x"))


def silent(recovery: object) -> None:
    """What is measured here need not be told as well."""


def use_engine(made: Engine) -> Callable[[], Awaitable[Any]]:
    return lambda: made.generate(Request("t", 0, (1, 2, 3), SamplingParams(4)))


def use_worker(worker: RemoteAgentWorker) -> Callable[[], Awaitable[Any]]:
    async def run() -> None:
        for _ in range(5):  # an attempt that the death took along has failed; a new one is made
            made = await worker.run(Job(task(), 0, SamplingParams(8)))
            if isinstance(made, Trajectory) and made.outcome.ok:
                return

    return run


def use_scorer(scorer: Any) -> Callable[[], Awaitable[Any]]:
    row = Row((1,), (2,), (1,), (-0.5,), (0,))
    said = ({"role": "assistant", "content": "four"},)
    return lambda: scorer.score(task(), Trajectory("one", 0, (row,), Outcome.ended(StopReason.STOP), messages=said))


@asynccontextmanager
async def local_engine(start: Callable[[], Awaitable[Engine]], name: str) -> AsyncIterator[Part]:
    limits = rollout().limits
    supervisor = ReplicaSupervisor(1, report=silent, policy=POLICY)
    made = await supervisor.add(name, partial(RemoteEngine.create, start, name=name, limits=limits))
    try:
        yield (lambda: made._engine.pid), use_engine(made)  # type: ignore[union-attr]
    finally:
        await made.close()


@asynccontextmanager
async def local_worker(model: ModelConfig) -> AsyncIterator[Part]:
    worker = await RemoteAgentWorker.create(
        rollout=rollout(num_workers=1), model=model, engine=engine(say("x")), name="agent worker 0"
    )
    try:
        yield (lambda: worker.pid), use_worker(worker)
    finally:
        await worker.close()


@asynccontextmanager
async def local_reward() -> AsyncIterator[Part]:
    async with await Scorer.create(REWARD) as scorer:
        (pool,) = scorer._pools
        yield (lambda: pool._idle[0].process.process.pid), use_scorer(scorer)  # type: ignore[union-attr]


def local_parts(model: ModelConfig) -> dict[str, Callable[[], Any]]:
    native = partial(start_native_engine, rollout(name="native"), TINY, "native-0", "cpu", 1)
    return {
        "engine, scripted": partial(local_engine, start_scripted, "scripted-0"),
        "engine, native": partial(local_engine, native, "native-0"),
        "agent worker": partial(local_worker, model),
        "reward worker": local_reward,
    }


@asynccontextmanager
async def ray_engine(name: str, model: ModelConfig) -> AsyncIterator[Part]:
    from tests import ray_cluster
    from treadle.cluster.ray.replicas import RayReplicas

    config = rollout(name=name, prompt_length=32, response_length=32)
    async with ray_cluster.reserved(config, model) as reservation:
        replicas = RayReplicas(config, model, reservation.replica_slots(), report=silent, policy=POLICY)
        (made,) = await replicas.start()
        try:
            yield (lambda: made._engine.pid), use_engine(made)  # type: ignore[attr-defined]
        finally:
            await made.close()


@asynccontextmanager
async def ray_worker(model: ModelConfig) -> AsyncIterator[Part]:
    from tests import ray_cluster
    from treadle.cluster.ray.rollout import start_worker

    config = rollout(num_workers=1)
    async with ray_cluster.reserved(config, model) as reservation:
        slot = partial(reservation.worker_slot, 0)
        worker = await start_worker(Config(model=model, rollout=config), engine(say("x")), slot, "agent worker 0")
        try:
            yield (lambda: worker.pid), use_worker(worker)
        finally:
            await worker.close()


@asynccontextmanager
async def ray_scorer(model: ModelConfig) -> AsyncIterator[Part]:
    from tests import ray_cluster
    from treadle.cluster.ray.scorer import RemoteScorer, ScorerSetup

    config = rollout()
    async with ray_cluster.reserved(config, model) as reservation:
        slot = partial(reservation.worker_slot, 0)
        scorer = await RemoteScorer.create(ScorerSetup(REWARD), slot, config.limits)
        try:
            yield (lambda: scorer.pid), use_scorer(scorer)
        finally:
            await scorer.close()


def ray_parts(model: ModelConfig) -> dict[str, Callable[[], Any]]:
    return {
        "engine, scripted": partial(ray_engine, "scripted", model),
        "engine, native": partial(ray_engine, "native", TINY),
        "agent worker": partial(ray_worker, model),
        "scorer": partial(ray_scorer, model),
    }


async def measure(part: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds from each kill to the first answer after it."""
    seconds = []
    async with part() as (pid, use):
        await use()
        for _ in range(repeats):
            victim = pid()
            os.kill(victim, signal.SIGKILL)
            killed_at = time.monotonic()
            while _is_alive(victim):  # noqa: ASYNC110  the kernel tells of it in no other way
                await asyncio.sleep(0.001)
            await use()
            seconds.append(time.monotonic() - killed_at)
    return seconds


def measure_ranks(repeats: int) -> list[float]:
    """Seconds from the kill of one of two ranks until the driver knows."""
    from tests.policies import save_tiny_model
    from tests.sharded import make_spec
    from treadle.policy.local_ranks import LocalRanks

    seconds = []
    with tempfile.TemporaryDirectory() as directory:
        spec = make_spec(save_tiny_model(Path(directory)))
        for _ in range(repeats):
            ranks = LocalRanks.start(spec, ["cpu", "cpu"], launch_timeout_s=180, timeout_s=60)
            try:
                os.kill(ranks._processes[1].pid, signal.SIGKILL)
                killed_at = time.monotonic()
                ranks.gone.result(60)
                seconds.append(time.monotonic() - killed_at)
            finally:
                ranks.close()
    return seconds


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def cluster(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    from tests import ray_cluster

    with ray_cluster.ray_here():
        yield


async def report(parts: dict[str, Callable[[], Any]], repeats: int) -> None:
    for name, part in parts.items():
        show(name, await measure(part, repeats))


def show(name: str, seconds: list[float]) -> None:
    print(f"{name:20} {statistics.median(seconds):6.2f} s   {min(seconds):.2f} to {max(seconds):.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster, started here")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, cluster(options.ray):
        model = save_model(Path(directory))
        asyncio.run(report((ray_parts if options.ray else local_parts)(model), options.repeats))
    if not options.ray:
        show("rank, until known", measure_ranks(options.repeats))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from bench.recovery import main as run  # so that processes find these functions by name

    run()
