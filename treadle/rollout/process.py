"""Agent workers in processes of their own, for loops and tools that need more than one core.

Owns how a process is started and ended, and what it is told first. Waits: `start` waits for its answer, until a
deadline; a process waits for its channel, and ends when the manager's end closes, however the manager ended.
"""

import asyncio
import socket
import sys
from dataclasses import dataclass
from functools import partial
from typing import Self

from treadle.config import ModelConfig, RolloutConfig
from treadle.engine.channel import Channel, ChannelClosed, Peer
from treadle.errors import ConfigError, DeadlineError, Failure, RunError
from treadle.rollout.distant import DistantWorker
from treadle.rollout.services import Generator


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


class ProcessWorker(DistantWorker):
    """The manager's end of one worker process."""

    @classmethod
    async def create(cls, *, rollout: RolloutConfig, model: ModelConfig, engine: Generator, name: str) -> Self:
        """A worker whose process has answered, or an error."""
        setup = Setup(rollout, model, tuple(sys.path))
        return await cls.started(name, partial(_ProcessLife.start, setup, engine, name))


class _ProcessLife:
    """One process from start to death; it may take `close_timeout_s` to end."""

    def __init__(
        self, process: asyncio.subprocess.Process, channel: Channel, engine: Generator, close_timeout_s: float
    ) -> None:
        self.peer = Peer(channel, engine.generate, Failure)
        self._process = process
        self._channel = channel
        self._close_timeout_s = close_timeout_s
        self._serving = asyncio.ensure_future(self.peer.serve())

    @classmethod
    async def start(cls, setup: Setup, engine: Generator, name: str) -> "_ProcessLife":
        limits = setup.rollout.limits
        ours, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-m", "treadle.rollout.process_main", str(theirs.fileno()))
            process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
        channel = await Channel.open(ours)
        problem: Exception
        try:
            channel.send(setup)
            async with asyncio.timeout(limits.launch_timeout_s):
                ready: Ready = await channel.receive()
            if ready.problem is None:
                return cls(process, channel, engine, limits.close_timeout_s)
            problem = ready.problem if isinstance(ready.problem, ConfigError) else RunError(f"{name}: {ready.problem}")
        except TimeoutError:
            limit = f"rollout.limits.launch_timeout_s = {limits.launch_timeout_s:g}"
            problem = DeadlineError(f"{name} did not start within {limit}")
        except ChannelClosed:
            problem = RunError(f"{name} died while it started, with status {await process.wait()}")
        channel.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
        raise problem

    @property
    def over(self) -> bool:
        return self._serving.done()

    async def cause(self) -> str:
        return f"exit status {await self._process.wait()}"

    async def end(self) -> None:
        """Close the channel, which ends the process; kill it if it does not end by itself."""
        self._channel.close()
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._serving
