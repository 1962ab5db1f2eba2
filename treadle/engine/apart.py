"""An engine in a process of its own: sampling and training then share neither the interpreter nor its lock.

Owns the process and the hand-over of calls. The engine in there is any engine, so everything that it promises holds.
Waits: a call waits for its answer or for the process to die, which fails every open call with its status; the process
waits for its channel, and ends when this end closes, however this process ended.
"""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from treadle.config.model import ModelConfig
from treadle.config.rollout import LimitsConfig, RolloutConfig
from treadle.engine.channel import Channel, ChannelClosed, Peer
from treadle.engine.protocol import Engine, EngineGone, WeightUpdate
from treadle.errors import ConfigError, DeadlineError, EngineFailure, RunError, TreadleError
from treadle.exit_status import describe_exit
from treadle.types import Completion, Request

Start = Callable[[], Awaitable[Engine]]
"""Starts an engine. It travels to the process, so it is a function of a module, with arguments that can be pickled."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The process's answer: the version of the engine's weights, or why there is no engine."""

    version: int = 0
    problem: ConfigError | str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A method of the engine, and what it is called with."""

    method: str
    arguments: Sequence[Any] = ()


class EngineApart:
    """An `Engine`, built by `create`."""

    def __init__(
        self, name: str, limits: LimitsConfig, process: asyncio.subprocess.Process, channel: Channel, version: int
    ) -> None:
        self.name = name
        self.version = version
        self._limits = limits
        self._process = process
        self._channel = channel
        self._peer = Peer(channel, _refuse, TreadleError)
        self._serving = asyncio.ensure_future(self._peer.serve())
        self._closed = False
        self._exit: str | None = None

    @classmethod
    async def create(cls, start: Start, *, name: str, limits: LimitsConfig) -> Self:
        """A process whose engine has started, or an error within the launch deadline."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-m", "treadle.engine.apart_main", str(theirs.fileno()), name)  # seen in `ps`
            process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
        channel = await Channel.open(ours)
        try:
            version = await _greet(start, name, limits, process, channel)
        except BaseException:
            channel.close()
            if process.returncode is None:
                process.kill()
            await process.wait()
            raise
        return cls(name, limits, process, channel, version)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def generate(self, request: Request) -> Completion:
        completion: Completion = await self._ask("generate", request)
        return completion

    async def abort(self, session: str | None = None) -> None:
        await self._ask("abort", session)

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self) -> None:
        await self._ask("resume")

    async def sleep(self, level: int = 1) -> None:
        """Where the engine in there can."""
        await self._ask("sleep", level)

    async def health(self) -> None:
        await self._ask("health")

    async def update_weights(self, update: WeightUpdate) -> str:
        confirmed: str = await self._ask("update_weights", update)
        self.version = update.version
        return confirmed

    async def gone(self) -> str:
        """Wait until the process has ended; how it did."""
        await asyncio.shield(self._serving)
        return f"its process ended: {await self._describe_exit()}"

    async def close(self) -> None:
        """End the engine, then the process; by force if that takes too long."""
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(self._limits.close_timeout_s):
                with suppress(ChannelClosed):
                    await self._peer.ask(Call("close"))
                self._channel.close()
                await self._process.wait()
        except TimeoutError:
            self._channel.close()
            self._process.kill()
            await self._process.wait()
        await self._serving

    async def _ask(self, method: str, *arguments: Any) -> Any:
        if self._closed:
            raise EngineFailure(f"{self.name} is closed")
        try:
            return await self._peer.ask(Call(method, arguments))
        except ChannelClosed:
            raise EngineGone(f"the process of {self.name} died: {await self._describe_exit()}") from None

    async def _describe_exit(self) -> str:
        status = await self._process.wait()
        if self._exit is None:
            self._exit = describe_exit(status)
        return self._exit


async def start_native_apart(
    rollout: RolloutConfig, model: ModelConfig, name: str, device: str, num_threads: int | None
) -> EngineApart:
    """A native engine in a process of its own: torch is imported, and computes, there alone."""
    start = partial(start_native_engine, rollout, model, name, device, num_threads)
    return await EngineApart.create(start, name=name, limits=rollout.limits)


async def start_native_engine(
    rollout: RolloutConfig, model: ModelConfig, name: str, device: str, num_threads: int | None
) -> Engine:
    """In the engine's own process. `num_threads` of torch, where it shares the processor with others."""
    import torch

    from treadle.engine.native.engine import NativeEngine

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return await NativeEngine.create(rollout, model, name=name, device=device)


async def _greet(
    start: Start, name: str, limits: LimitsConfig, process: asyncio.subprocess.Process, channel: Channel
) -> int:
    """Tell the process what to start, and wait until it has; the version of its weights."""
    limit = limits.launch_timeout_s
    try:
        channel.send(tuple(sys.path))  # first, so that the process finds what `start` names
        channel.send(start)
        async with asyncio.timeout(limit):
            ready: Ready = await channel.receive()
    except TimeoutError:
        raise DeadlineError(f"{name} did not start within rollout.limits.launch_timeout_s = {limit:g}") from None
    except ChannelClosed:
        raise RunError(f"{name} died while it started: {describe_exit(await process.wait())}") from None
    if isinstance(ready.problem, ConfigError):
        raise ready.problem
    if ready.problem is not None:
        raise RunError(f"{name}: {ready.problem}")
    return ready.version


async def _refuse(question: Any) -> Any:
    raise AssertionError(f"an engine asks nothing, but it asked {question!r}")
