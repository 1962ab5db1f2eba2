"""Engine in another process: sampling and training then share neither the interpreter nor its lock.

Owns the calls between both ends; the process is the launcher's. The engine over there is any engine, so everything that
it promises holds.

    RemoteEngine     this end, an `Engine`: a call waits for its reply or for the process to die, which fails every open
                     call with `EngineGone` and the cause
    serve_engine     the other end: starts the engine, and does as told until the channel closes. An engine that fails a
                     request and then its health check ends its process, for a supervisor to start another
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import isawaitable
from typing import Any, Self

from treadle.config.rollout import LimitsConfig, ModelConfig, RolloutConfig
from treadle.engine.protocol import Engine, EngineGone, WeightUpdate
from treadle.errors import EngineFailure, RequestRefused
from treadle.process.channel import ChannelClosed, pickle_by_fields
from treadle.process.launcher import Launcher, ProcessSpec, RemoteProcess, SubprocessLauncher
from treadle.process.main import ParentConnection
from treadle.types import Completion, Request, SamplingParams, ToolCall

StartEngine = Callable[[], Awaitable[Engine]]
"""Starts an engine. It travels to the process, so it is a function of a module, with arguments that can be pickled."""

OPTIONAL = ("sleep", "forget")
"""Calls that do nothing where an engine does not have them."""

HEALTH_TIMEOUT_S = 5.0

_HERE = SubprocessLauncher()


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A method of the engine, and what it is called with."""

    method: str
    arguments: Sequence[Any] = ()


pickle_by_fields(EngineCall, Request, SamplingParams, Completion, ToolCall)


class RemoteEngine:
    """An `Engine`, built by `create`."""

    def __init__(self, process: RemoteProcess, limits: LimitsConfig, sends_text: bool) -> None:
        self.name = process.name
        self.version: int = process.started
        self.process = process
        self._limits = limits
        self._sends_text = sends_text
        self._closed = False

    @classmethod
    async def create(
        cls,
        start: StartEngine,
        *,
        name: str,
        limits: LimitsConfig,
        launcher: Launcher = _HERE,
        sends_text: bool = True,
    ) -> Self:
        """A process whose engine has started, or an error within the launch deadline.

        Without `sends_text` requests leave their messages and tools here: engines with a model of ours read tokens.
        """
        spec = ProcessSpec(
            name,
            f"{__name__}:{serve_engine.__name__}",
            start,
            limits.launch_timeout_s,
            "rollout.limits.launch_timeout_s",
        )
        return cls(await launcher.launch(spec, _refuse, EngineFailure), limits, sends_text)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    async def generate(self, request: Request) -> Completion:
        if not self._sends_text and (request.messages or request.tools):
            request = replace(request, messages=(), tools=())
        completion: Completion = await self._call("generate", request)
        return completion

    async def abort(self, session: str | None = None) -> None:
        await self._call("abort", session)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self, level: int = 1) -> None:
        """Where the engine over there can."""
        await self._call("sleep", level)

    def forget(self, session: str) -> None:
        """A session is over: what the engine keeps for it may go."""
        if not self._closed:
            with suppress(ChannelClosed):
                self.process.peer.notify(EngineCall("forget", (session,)))

    async def health(self) -> None:
        await self._call("health")

    async def update_weights(self, update: WeightUpdate) -> str:
        confirmed: str = await self._call("update_weights", update)
        self.version = update.version
        return confirmed

    async def gone(self) -> str:
        """Wait until the process has ended; how it did."""
        return f"its process ended: {await self.process.gone()}"

    async def close(self) -> None:
        """End the engine, then the process; by force if that takes too long."""
        if self._closed:
            return
        self._closed = True
        clock, limit = asyncio.get_running_loop().time, self._limits.close_timeout_s
        deadline = clock() + limit
        with suppress(ChannelClosed, TimeoutError):
            async with asyncio.timeout(limit):
                await self.process.peer.request(EngineCall("close"))
        await self.process.end(max(0.0, deadline - clock()))

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._closed:
            raise EngineFailure(f"{self.name} is closed")
        try:
            return await self.process.peer.request(EngineCall(method, arguments))
        except ChannelClosed:
            raise EngineGone(f"the process of {self.name} died: {await self.process.cause()}") from None


async def _refuse(request: Any) -> Any:
    raise AssertionError(f"an engine asks nothing, but it asked {request!r}")


async def serve_engine(parent: ParentConnection, start: StartEngine) -> None:
    """Start an engine, then do as told until the parent goes, or the engine can serve no more."""
    engine = await start()
    server = EngineServer(engine)
    peer = parent.peer(server.handle)
    parent.started(engine.version)
    serving, broken = asyncio.ensure_future(peer.serve()), asyncio.ensure_future(server.broken())
    try:
        await asyncio.wait({serving, broken}, return_when=asyncio.FIRST_COMPLETED)
        for done in (serving, broken):
            if done.done():
                done.result()
    finally:
        serving.cancel()
        broken.cancel()
        await engine.close()


class EngineServer:
    """What may be ordered of the engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = 0
        """Calls that are being carried out."""
        self._idle = asyncio.Event()
        self._closing = False

    async def handle(self, call: EngineCall) -> Any:
        """Carry out one call."""
        if call.method == "close":
            return await self._close()
        self._open += 1
        try:
            return await self._carry_out(call)
        except RequestRefused:
            raise
        except EngineFailure:
            await self._judge()
            raise
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def broken(self) -> None:
        """Raise why the engine can serve no more, once it cannot: then this process has no use."""
        await self._broken

    async def _carry_out(self, call: EngineCall) -> Any:
        method = getattr(self._engine, call.method, None)
        if method is None and call.method in OPTIONAL:
            return None
        assert method is not None, f"no engine has {call.method}"
        result = method(*call.arguments)
        return await result if isawaitable(result) else result

    async def _close(self) -> None:
        """Close the engine, and wait until every request has its own reply; the other end has a deadline for that."""
        self._closing = True
        await self._engine.close()
        while self._open:
            self._idle.clear()
            await self._idle.wait()

    async def _judge(self) -> None:
        """After a failure: is it the request's alone, or the engine's?"""
        if self._closing or self._broken.done():
            return
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._engine.health()
        except (EngineFailure, TimeoutError) as error:
            why = str(error) or f"no answer to a health check in {HEALTH_TIMEOUT_S:g} s"
            if not self._broken.done():
                self._broken.set_exception(EngineFailure(f"the engine can serve no more: {why}"))


async def start_native_remote(
    rollout: RolloutConfig, model: ModelConfig, name: str, device: str, num_threads: int | None
) -> RemoteEngine:
    """A native engine in a process of its own: torch is imported, and computes, there alone."""
    start = partial(start_native_engine, rollout, model, name, device, num_threads)
    return await RemoteEngine.create(start, name=name, limits=rollout.limits, sends_text=False)


async def start_native_engine(
    rollout: RolloutConfig, model: ModelConfig, name: str, device: str, num_threads: int | None
) -> Engine:
    """In the engine's own process. `num_threads` of torch, where it shares the processor with others."""
    import torch

    from treadle.engine.native.engine import NativeEngine

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return await NativeEngine.create(rollout, model, name=name, device=device)
