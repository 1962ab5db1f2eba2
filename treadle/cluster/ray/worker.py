"""An agent worker on the cluster, as the dispatcher sees it.

Owns the jobs it was given. The engines and the scorer stay with the manager: the worker sends each request up its
socket and gets the completion back, as a worker process does.
Waits: a job waits for its result, or for the actor's death; then that attempt has failed, and the next job starts anew.
"""

import asyncio
import sys
from collections.abc import Iterator, Sequence

from treadle.cluster.ray.actors import AgentActor
from treadle.cluster.ray.life import Life
from treadle.cluster.ray.placement import Seat
from treadle.config import ModelConfig, RolloutConfig
from treadle.engine.channel import ChannelClosed
from treadle.errors import Failure, LoopFailure, RunError
from treadle.observe import Wait
from treadle.rollout.process import Setup
from treadle.rollout.services import Generator
from treadle.rollout.worker import Dropped, Job
from treadle.types import Outcome, Trajectory


class RemoteWorker:
    """A `Worker` in an actor. An actor that dies is replaced when the next job comes."""

    def __init__(self, setup: Setup, engine: Generator, seats: Sequence[Seat], name: str) -> None:
        self._setup = setup
        self._engine = engine
        self._seats = seats
        self._name = name
        self._life: Life | None = None
        self._running: dict[int, tuple[Job, float]] = {}
        self._starting = asyncio.Lock()

    @classmethod
    async def create(
        cls, *, rollout: RolloutConfig, model: ModelConfig, engine: Generator, seats: Sequence[Seat], name: str
    ) -> "RemoteWorker":
        """A worker whose actor has answered, or an error. It sits in the first seat whose machine is there."""
        worker = cls(Setup(rollout, model, tuple(sys.path)), engine, seats, name)
        await worker._alive()
        return worker

    async def run(self, job: Job) -> Trajectory | Dropped:
        """Make one attempt in the actor. If the actor dies, that attempt has failed."""
        life = await self._alive()
        self._running[id(job)] = job, asyncio.get_running_loop().time()
        try:
            result: Trajectory | Dropped = await life.peer.ask(job)
            return result
        except ChannelClosed:
            failure = LoopFailure(f"{self._name} died: {await life.cause()}")
            return Trajectory(job.task.uid, job.sample, (), Outcome.failed(failure), attempt=job.attempt)
        finally:
            del self._running[id(job)]

    def waits(self) -> Iterator[Wait]:
        """What every open job is waiting for, as far as it can be seen from here."""
        for job, since in self._running.values():
            yield Wait(job.task.uid, job.sample, "agent loop", since, self._name, "sent to the worker")

    async def _alive(self) -> Life:
        if self._life is not None and not self._life.over:
            return self._life
        async with self._starting:
            if self._life is None or self._life.over:
                await self.close()
                self._life = await self._start()
            return self._life

    async def _start(self) -> Life:
        limits = self._setup.rollout.limits
        seat = next((seat for seat in self._seats if seat.there()), None)
        if seat is None:
            raise RunError(f"{self._name} has nowhere to run: every machine of the rollout has left the cluster")
        return await Life.start(
            AgentActor,
            seat,
            self._setup,
            name=self._name,
            answer=self._engine.generate,
            expected=Failure,
            timeout_s=limits.launch_timeout_s,
        )

    async def close(self) -> None:
        """End the actor."""
        if self._life is not None:
            await self._life.end()
            self._life = None
