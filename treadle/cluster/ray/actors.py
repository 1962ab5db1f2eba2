"""The actors: each is a process that Ray started, around a class that also runs in process.

Owns what a process does first (its GPUs, its threads, where it finds modules), and the loop that serves the driver.
Knows nothing of where it was placed. It serves until the driver's end of its socket closes, however the driver ended.
torch is imported by what the actors host, after the process was set up, and never by this module.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import ray

from treadle.cluster.ray.guard import descendants, guarded
from treadle.cluster.ray.link import PICKLES, Address, Door, Link
from treadle.cluster.ray.messages import GroupScoreOrder, ReplicaSetup, ScoreOrder, ScorerSetup
from treadle.cluster.ray.station import Station
from treadle.cluster.ray.tensors import Packed, StoredTensors
from treadle.data.renderer import Renderer
from treadle.engine.channel import Form, Peer
from treadle.engine.gpus import visible_gpus
from treadle.engine.protocol import Engine, WeightUpdate
from treadle.errors import ConfigError, Failure, RewardFailure, TreadleError
from treadle.reward.scorer import Scorer
from treadle.reward.surroundings import Surroundings as Lent
from treadle.rollout.dispatch import first_error
from treadle.rollout.distant import run_sent, serve_jobs
from treadle.rollout.engines import start_engine, start_engines
from treadle.rollout.process import Setup
from treadle.rollout.process_main import UpstreamEngine
from treadle.rollout.serialization import WORKER_END, Ready
from treadle.rollout.worker import AgentLoopWorker
from treadle.types import Completion, Request, Score

_VISIBLE, _THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process must know before anything else is imported in it."""

    gpus: tuple[str, ...]
    path: tuple[str, ...]
    """Where the driver finds modules, so that the actor finds the same."""
    threads: str | None
    """The driver's own OMP_NUM_THREADS. Ray sets 1 for an actor that reserves no CPU of its own."""

    @classmethod
    def here(cls, gpus: tuple[str, ...] = ()) -> "Surroundings":
        return cls(gpus, tuple(sys.path), os.environ.get(_THREADS))

    def settle(self) -> None:
        os.environ[_VISIBLE] = ",".join(self.gpus)
        if self.threads is None:
            os.environ.pop(_THREADS, None)
        else:
            os.environ[_THREADS] = self.threads
        sys.path += [place for place in self.path if place not in sys.path]


class Host:
    """What the actors that serve over a socket have in common."""

    def __init__(self, surroundings: Surroundings) -> None:
        surroundings.settle()
        self._door = Door(ray.util.get_node_ip_address())

    async def address(self) -> Address:
        """Where the driver finds this actor."""
        return self._door.address

    async def serve(self, timeout_s: float) -> None:
        """Be what the driver says, until it goes. The driver comes within a deadline."""
        raise NotImplementedError

    @asynccontextmanager
    async def _met(self, timeout_s: float, form: Form = PICKLES) -> AsyncIterator[Link]:
        link = await Link.open(await self._door.admit(timeout_s), form)
        try:
            yield link
        finally:
            link.close()


class ReplicaActor(Host):
    """One engine."""

    _engine: Engine
    _apart: bool
    """Whether the engine computes in processes of its own, which Ray does not know."""

    async def serve(self, timeout_s: float) -> None:
        async with self._met(timeout_s) as link:
            setup: ReplicaSetup = await link.receive()
            engine = await _started(_start_engine(setup), link)
            if engine is None:
                return
            self._engine, self._apart = engine, setup.rollout.name == "vllm"
            with guarded(descendants(os.getpid())):  # a successor needs the memory that the engine's processes have
                try:
                    await self._serve(link, setup.save_s)
                finally:
                    await engine.close()

    async def _serve(self, link: Link, save_s: float | None) -> None:
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                station = Station(self._engine, save_s, tasks)
                station.peer = Peer(link, station.answer, TreadleError)
                watching = tasks.create_task(station.watch())
                link.send(Ready())
                await station.peer.serve()
                watching.cancel()

    async def update_weights(self, version: int, checksum: str, packed: Mapping[str, Packed]) -> str:
        """Take weights that Ray brought; the arrays are its own memory, read in place."""
        tensors = StoredTensors(packed)
        if not self._apart:
            return await self._engine.update_weights(WeightUpdate(version, checksum, tensors))
        from treadle.weights.local import LocalTransport
        from treadle.weights.parcel import Cast

        transport = LocalTransport()
        try:
            parcel = transport.offer(version, Cast(tensors, None))
            return await self._engine.update_weights(WeightUpdate(version, checksum, parcel))
        finally:
            await asyncio.to_thread(transport.close)


async def _start_engine(setup: ReplicaSetup) -> Engine:
    rollout, model = setup.rollout, setup.model
    if setup.start is not None:
        return await setup.start(setup)
    if rollout.name == "native":
        import torch

        from treadle.engine.native.engine import NativeEngine

        device = "cuda" if os.environ[_VISIBLE] else "cpu"
        if device == "cpu" and _THREADS not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // setup.crowd))
        return await NativeEngine.create(rollout, model, name=setup.name, device=device)
    renderer = await asyncio.to_thread(Renderer.create, model)
    return await start_engine(rollout, model, renderer, setup.api_key, setup.name, visible_gpus())


class SlimUpstream(UpstreamEngine):
    """Asks for tokens by tokens alone: engines with a model of ours need no text."""

    async def generate(self, request: Request) -> Completion:
        return await super().generate(replace(request, messages=(), tools=()))


class AgentActor(Host):
    """Agent loops and their tools."""

    async def serve(self, timeout_s: float) -> None:
        async with self._met(timeout_s, WORKER_END) as link:
            setup: Setup = await link.receive()
            engine = SlimUpstream() if setup.rollout.uses_gpus() else UpstreamEngine()
            starting = AgentLoopWorker.create(
                rollout=setup.rollout, model=setup.model, engine=engine, announce=engine.announce
            )
            worker = await _started(starting, link)
            if worker is None:
                return
            engine.peer = Peer(link, partial(run_sent, worker), Failure)
            link.send(Ready())
            await serve_jobs(worker, engine.peer)


class ScorerActor(Host):
    """Reward functions, with the sandboxed processes that untrusted ones run in, and reward models."""

    async def serve(self, timeout_s: float) -> None:
        async with self._met(timeout_s) as link:
            setup: ScorerSetup = await link.receive()
            policy = UpstreamEngine()
            scorer = await _started(_start_scorer(setup, policy), link)
            if scorer is None:
                return

            async def score(order: ScoreOrder | GroupScoreOrder) -> Score | list[Score] | None:
                if isinstance(order, GroupScoreOrder):
                    return await scorer.score_group(order.task, order.trajectories)
                return await scorer.score(order.task, order.trajectory)

            policy.peer = Peer(link, score, RewardFailure)
            with guarded(descendants(os.getpid()) if setup.gpus else []):  # they hold memory that a successor needs
                async with scorer:
                    link.send(Ready())
                    await policy.peer.serve()


async def _start_scorer(setup: ScorerSetup, policy: UpstreamEngine) -> Scorer:
    reward, model = setup.reward, setup.model
    if not reward.judges or model is None:
        return await Scorer.create(reward, Lent(api_keys=setup.api_keys, gpus=setup.gpus))
    renderer = await asyncio.to_thread(Renderer.create, model)
    lent = Lent(model, renderer, policy, start_engines, setup.api_keys, setup.gpus)
    return await Scorer.create(reward, lent)


async def _started(starting: Awaitable[T], link: Link) -> T | None:
    """What was to be started; or None, when the driver has been told why it was not."""
    try:
        return await starting
    except ConfigError as error:
        link.send(Ready(error))
    except (TreadleError, OSError) as error:
        link.send(Ready(f"{type(error).__name__}: {error}"))
    return None
