"""An agent worker somewhere else, as the dispatcher sees it: in a process of this machine, or in an actor of a cluster.

Owns the jobs it was given. The engines and the scorer stay with the manager: a worker sends each request up its channel
and gets its completion back. Knows a worker's place as a life that can end.
Waits: a job waits for its result, or for the end of the life; then that attempt has failed, and the next job starts
another.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol, Self

from treadle.engine.channel import ChannelClosed, Peer
from treadle.errors import LoopFailure
from treadle.observe import Wait
from treadle.rollout.worker import Dropped, Job
from treadle.types import Outcome, Trajectory


class Life(Protocol):
    """One process or actor, from the moment it is ready to its death."""

    @property
    def peer(self) -> Peer: ...

    @property
    def over(self) -> bool: ...

    async def cause(self) -> str:
        """Why it is over."""
        ...

    async def end(self) -> None: ...


class Succession:
    """One life after another: when one is over, the next begins as soon as it is needed."""

    def __init__(self, start: Callable[[], Awaitable[Life]]) -> None:
        self._start = start
        self._life: Life | None = None
        self._starting = asyncio.Lock()

    async def present(self) -> Life:
        """The life that goes on, begun if it has to be; an error where none begins."""
        if self._life is not None and not self._life.over:
            return self._life
        async with self._starting:
            if self._life is None or self._life.over:
                await self.end()
                self._life = await self._start()
            return self._life

    async def end(self) -> None:
        """End the life that goes on, if there is one."""
        if self._life is not None:
            await self._life.end()
            self._life = None


class DistantWorker:
    """A `HiredWorker`. One that dies is replaced when the next job comes."""

    def __init__(self, name: str, start: Callable[[], Awaitable[Life]]) -> None:
        self._name = name
        self._lives = Succession(start)
        self._running: dict[int, tuple[Job, float]] = {}

    @classmethod
    async def started(cls, name: str, start: Callable[[], Awaitable[Life]]) -> Self:
        """A worker that has answered, or an error."""
        worker = cls(name, start)
        await worker._lives.present()
        return worker

    async def run(self, job: Job) -> Trajectory | Dropped:
        """Make one attempt over there. If the worker dies, that attempt has failed."""
        life = await self._lives.present()
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

    async def close(self) -> None:
        """End the process or actor."""
        await self._lives.end()
