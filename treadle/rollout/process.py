"""Agent workers in processes of their own, for loops and tools that block or need more than one core.

Owns how a process is started and ended, what it is told first, and where one is needed. A process leads a session of
its own: Ctrl-C does not reach it, and what its tools started ends with it.
Waits: `start` waits for its answer, until a deadline; a process waits for its channel, and ends when the manager's end
closes, however the manager ended.
"""

import asyncio
import re
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Self

from treadle.aio import is_users
from treadle.config import ModelConfig, RolloutConfig
from treadle.engine.channel import Channel, ChannelClosed, Peer
from treadle.errors import ConfigError, DeadlineError, Failure, RunError
from treadle.exit_status import describe_exit
from treadle.reward.sandbox.limits import kill_group
from treadle.rollout.distant import Answer, DistantWorker
from treadle.rollout.environment import may_block
from treadle.rollout.serialization import DRIVER_END, Ready
from treadle.rollout.services import Generator
from treadle.rollout.tools.function import FunctionTool, Mode
from treadle.rollout.tools.offer import load_tools

_FRAME = re.compile(r'File "(.+)", line (\d+) in ')


def num_processes(rollout: RolloutConfig) -> int:
    """Worker processes: as told, or one where plain Python is called, which can hold the interpreter up."""
    if rollout.agent.num_workers is not None:
        return rollout.agent.num_workers
    tools = load_tools(rollout.multi_turn.tools)
    blocking = any(isinstance(tool, FunctionTool) and tool.mode is Mode.THREAD for tool in tools)
    environment = rollout.multi_turn.environment
    return 1 if blocking or (environment is not None and may_block(environment)) else 0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker process is told first."""

    rollout: RolloutConfig
    model: ModelConfig
    path: tuple[str, ...]
    """Where the manager finds modules, so that the worker finds the same."""


class ProcessWorker(DistantWorker):
    """The manager's end of one worker process."""

    @classmethod
    async def create(cls, *, rollout: RolloutConfig, model: ModelConfig, engine: Generator, name: str) -> Self:
        """A worker whose process has answered, or an error."""
        setup = Setup(rollout, model, tuple(sys.path))
        return await cls.started(name, partial(_ProcessLife.start, setup, name), rollout, engine)


class _ProcessLife:
    """One process from start to death; it may take `close_timeout_s` to end."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: Channel,
        answer: Answer,
        close_timeout_s: float,
        trace: IO[bytes],
    ) -> None:
        self.peer = Peer(channel, answer, Failure)
        self._process = process
        self._channel = channel
        self._close_timeout_s = close_timeout_s
        self._trace = trace
        self._exit: str | None = None
        self._serving = asyncio.ensure_future(self.peer.serve())
        self._serving.add_done_callback(self._refuse)

    @classmethod
    async def start(cls, setup: Setup, name: str, answer: Answer) -> "_ProcessLife":
        limits = setup.rollout.limits
        ours, theirs = socket.socketpair()
        trace = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  it lives as long as the process
        with theirs:
            ends = (theirs.fileno(), trace.fileno())
            command = (sys.executable, "-m", "treadle.rollout.process_main", *map(str, ends))
            process = await asyncio.create_subprocess_exec(*command, pass_fds=ends, start_new_session=True)
        channel = await Channel.open(ours, DRIVER_END)
        problem: Exception
        try:
            channel.send(setup)
            async with asyncio.timeout(limits.launch_timeout_s):
                ready = await channel.receive()
            if not isinstance(ready, Ready):
                raise ChannelClosed
            if ready.problem is None:
                return cls(process, channel, answer, limits.close_timeout_s, trace)
            problem = ready.problem if isinstance(ready.problem, ConfigError) else RunError(f"{name}: {ready.problem}")
        except TimeoutError:
            limit = f"rollout.limits.launch_timeout_s = {limits.launch_timeout_s:g}"
            problem = DeadlineError(f"{name} did not start within {limit}")
        except ChannelClosed:
            if channel.problem is not None:
                kill_group(process.pid)
            problem = RunError(f"{name} died while it started: {describe_exit(await process.wait())}")
        channel.close()
        trace.close()
        kill_group(process.pid)
        await process.wait()
        raise problem

    @property
    def over(self) -> bool:
        return self._serving.done()

    def _refuse(self, _: "asyncio.Future[None]") -> None:
        """End a process that sent something else than messages: its tools have the channel."""
        if self._channel.problem is not None:
            kill_group(self._process.pid)

    async def cause(self) -> str:
        if self._channel.problem is not None:
            return f"killed, because it sent what is no message ({self._channel.problem})"
        status = await self._process.wait()
        if self._exit is None:
            self._exit = describe_exit(status)
        return self._exit

    def probe(self) -> None:
        """Python's fault handler writes where every thread is, also while one of them holds the interpreter."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> str:
        kill_group(self._process.pid)
        self._trace.seek(0)
        found = _FRAME.findall(self._trace.read().decode(errors="replace"))
        places = dict.fromkeys(f"{file}:{line}" for file, line in found if is_users(file))
        return f" ({', '.join(list(places)[:3])})" if places else ""

    async def end(self) -> None:
        """Close the channel, which ends the process; kill it if it does not end by itself, and what it left behind."""
        self._channel.close()
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await self._process.wait()
        except TimeoutError:
            pass
        kill_group(self._process.pid)
        await self._process.wait()
        await self._serving
        self._trace.close()
