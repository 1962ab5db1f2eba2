"""Agent workers in processes of their own, for loops and tools that need more than one core.

The engines and the scorer stay with the manager: a worker process sends each request up the channel and gets its
completion back. Waits: a job waits for its result or for the process to die; a process waits for its channel, and ends
when the manager's end closes, however the manager ended.
"""

import asyncio
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from treadle.config import ModelConfig, RolloutConfig
from treadle.engine.channel import Channel, ChannelClosed, Peer
from treadle.errors import ConfigError, DeadlineError, Failure, LoopFailure, RunError
from treadle.observe import Wait
from treadle.rollout.services import Generator
from treadle.rollout.worker import Dropped, Job
from treadle.types import Outcome, Trajectory


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker process is told first."""

    rollout: RolloutConfig
    model: ModelConfig
    path: tuple[str, ...]
    """Where the manager finds modules, so that the worker finds the same."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's answer: whether it can work, and if not, why."""

    problem: ConfigError | str | None = None


class ProcessWorker:
    """The manager's end of one worker process. A process that dies is replaced when the next job comes."""

    def __init__(self, setup: Setup, engine: Generator, name: str) -> None:
        self._setup = setup
        self._engine = engine
        self._name = name
        self._life: _Life | None = None
        self._running: dict[int, tuple[Job, float]] = {}
        self._starting = asyncio.Lock()

    @classmethod
    async def create(cls, *, rollout: RolloutConfig, model: ModelConfig, engine: Generator, name: str) -> Self:
        """A worker whose process has answered, or an error."""
        worker = cls(Setup(rollout, model, tuple(sys.path)), engine, name)
        await worker._alive()
        return worker

    async def run(self, job: Job) -> Trajectory | Dropped:
        """Make one attempt in the process. If the process dies, that attempt has failed."""
        life = await self._alive()
        self._running[id(job)] = job, asyncio.get_running_loop().time()
        try:
            result: Trajectory | Dropped = await life.peer.ask(job)
            return result
        except ChannelClosed:
            failure = LoopFailure(f"{self._name} died with status {await life.process.wait()}")
            return Trajectory(job.task.uid, job.sample, (), Outcome.failed(failure), attempt=job.attempt)
        finally:
            del self._running[id(job)]

    def waits(self) -> Iterator[Wait]:
        """What every open job is waiting for, as far as it can be seen from here."""
        for job, since in self._running.values():
            yield Wait(job.task.uid, job.sample, "agent loop", since, self._name, "sent to the worker")

    async def _alive(self) -> "_Life":
        if self._life is not None and not self._life.serving.done():
            return self._life
        async with self._starting:
            if self._life is None or self._life.serving.done():
                await self.close()
                self._life = await _Life.start(self._setup, self._engine, self._name)
            return self._life

    async def close(self) -> None:
        """End the process."""
        if self._life is not None:
            await self._life.end(self._setup.rollout.limits.close_timeout_s)
            self._life = None


class _Life:
    """One process from start to death."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel, engine: Generator) -> None:
        self.process = process
        self.peer = Peer(channel, engine.generate, Failure)
        self.serving = asyncio.ensure_future(self.peer.serve())
        self._channel = channel

    @classmethod
    async def start(cls, setup: Setup, engine: Generator, name: str) -> "_Life":
        ours, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-m", "treadle.rollout.process_main", str(theirs.fileno()))
            process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
        channel = await Channel.open(ours)
        problem: Exception
        try:
            channel.send(setup)
            async with asyncio.timeout(setup.rollout.limits.launch_timeout_s):
                ready: Ready = await channel.receive()
            if ready.problem is None:
                return cls(process, channel, engine)
            problem = ready.problem if isinstance(ready.problem, ConfigError) else RunError(f"{name}: {ready.problem}")
        except TimeoutError:
            limit = f"rollout.limits.launch_timeout_s = {setup.rollout.limits.launch_timeout_s:g}"
            problem = DeadlineError(f"{name} did not start within {limit}")
        except ChannelClosed:
            problem = RunError(f"{name} died while it started, with status {await process.wait()}")
        channel.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
        raise problem

    async def end(self, timeout_s: float) -> None:
        """Close the channel, which ends the process; kill it if it does not end by itself."""
        self._channel.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        await self.serving
