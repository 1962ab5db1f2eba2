"""Engine in another process: sampling and training then share neither the interpreter nor its lock.

Owns the calls between both ends; the process is the launcher's. The engine over there is any engine, so everything that
it promises holds.

    RemoteEngine     this end, an `Engine`: a call waits for its reply or for the process to die, which fails every open
                     call with `EngineGone` and the cause
    serve_engine     the other end: starts the engine, and does as told until the channel closes. An engine that fails a
                     request and then its health check ends its process, for a supervisor to start another
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import isawaitable
from typing import Any, Self

from treadle.config.rollout import LimitsConfig, ModelConfig, RolloutConfig
from treadle.engine.protocol import ConfirmedWeights, Decode, Engine, EngineGone, WeightUpdate
from treadle.errors import EngineFailure, RequestRefused
from treadle.process.channel import ChannelClosed, pickle_by_fields
from treadle.process.child_handle import ProcessSpec
from treadle.process.child_main import ParentConnection
from treadle.process.launcher import Launcher, RemoteProcess, SubprocessLauncher
from treadle.types import Completion, OnTokens, Request, SamplingParams, ToolCall

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
    stream: int | None = None
    """Of `generate`: the number under which tokens are reported while they are sampled; None: they are not."""


@dataclass(frozen=True, slots=True)
class TokenReport:
    """Tokens of a request that is still being sampled, on their way to `Request.on_tokens`."""

    stream: int
    start: int
    ids: tuple[int, ...]


pickle_by_fields(EngineCall, TokenReport, Request, SamplingParams, Completion, ToolCall)

TokenStreams = dict[int, OnTokens]
"""What is called with the tokens of open requests, by the numbers of their calls."""


class RemoteEngine:
    """An `Engine`, built by `create`."""

    def __init__(
        self, process: RemoteProcess, limits: LimitsConfig, sends_text: bool, streams: TokenStreams | None = None
    ) -> None:
        self.name = process.name
        self.version: int = process.started
        self.process = process
        self._limits = limits
        self._sends_text = sends_text
        self._closed = False
        self._streams = streams
        """None: nothing is reported from over there before an answer is whole."""
        self._numbers = itertools.count()

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
        streams: TokenStreams = {}
        process = await launcher.launch(spec, partial(_take_report, streams), EngineFailure)
        return cls(process, limits, sends_text, streams)

    @property
    def pid(self) -> int:
        """The id of the engine's process."""
        return self.process.pid

    async def generate(self, request: Request) -> Completion:
        if not self._sends_text and (request.messages or request.tools):
            request = replace(request, messages=(), tools=())
        if request.on_tokens is not None:
            return await self._generate_streamed(replace(request, on_tokens=None), request.on_tokens)
        async with self._translated():
            completion: Completion = await self.process.peer.request(EngineCall("generate", (request,)))
            return completion

    async def _generate_streamed(self, request: Request, on_tokens: OnTokens) -> Completion:
        if self._streams is None:
            return await self.generate(request)
        number = next(self._numbers)
        self._streams[number] = on_tokens
        try:
            async with self._translated():
                call = EngineCall("generate", (request,), number)
                completion: Completion = await self.process.peer.request(call)
                return completion
        finally:
            del self._streams[number]

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

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        confirmed: ConfirmedWeights = await self._call("update_weights", update)
        self.version = update.version
        return confirmed

    async def gone(self) -> str:
        """Wait until the process has ended; how it did."""
        return f"its process ended: {await self.process.gone()}"

    async def close(self) -> None:
        """End the engine, then the process; by force after half of the deadline, so that the other half is left for it
        to be gone."""
        if self._closed:
            return
        self._closed = True
        clock, limit = asyncio.get_running_loop().time, self._limits.close_timeout_s / 2
        deadline = clock() + limit
        with suppress(ChannelClosed, TimeoutError):
            async with asyncio.timeout(limit):
                await self.process.peer.request(EngineCall("close"))
        await self.process.end(max(0.0, deadline - clock()))

    def kill(self) -> None:
        """Kill the process; open calls fail with `EngineGone`."""
        self.process.kill()

    async def _call(self, method: str, *arguments: Any) -> Any:
        async with self._translated():
            return await self.process.peer.request(EngineCall(method, arguments))

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        """Around a request: the end of the process as EngineGone, with the cause."""
        if self._closed:
            raise EngineFailure(f"{self.name} is closed")
        try:
            yield
        except ChannelClosed:
            raise EngineGone(f"the process of {self.name} died: {await self.process.cause()}") from None


async def _take_report(streams: TokenStreams, report: Any) -> None:
    """Pass tokens on to their request, unless that has ended meanwhile."""
    assert isinstance(report, TokenReport), f"an engine asks nothing, but it asked {report!r}"
    on_tokens = streams.get(report.stream)
    if on_tokens is not None:
        on_tokens(report.start, report.ids)


async def serve_engine(parent: ParentConnection, start: StartEngine) -> None:
    """Start an engine, then do as told until the parent goes, or the engine can serve no more."""
    engine = await start()
    server = EngineServer(engine)
    peer = parent.peer(server.handle)
    server.notify = peer.notify
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
        self.notify: Callable[[TokenReport], None] | None = None
        """Sends tokens of a request that is being sampled."""

    async def handle(self, call: EngineCall) -> Any:
        """Carry out one call."""
        if call.method == "close":
            return await self._close()
        method = getattr(self._engine, call.method, None)
        if method is None and call.method in OPTIONAL:
            return None
        assert method is not None, f"no engine has {call.method}"
        arguments = call.arguments if call.stream is None else self._with_reports(call.arguments[0], call.stream)
        self._open += 1
        try:
            result = method(*arguments)
            return await result if isawaitable(result) else result
        except RequestRefused:
            raise
        except EngineFailure:
            await self._check_health()
            raise
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    def _with_reports(self, request: Request, stream: int) -> tuple[Request]:
        notify = self.notify
        assert notify is not None

        def report(start: int, ids: tuple[int, ...]) -> None:
            with suppress(ChannelClosed):  # the request ends with the channel
                notify(TokenReport(stream, start, ids))

        return (replace(request, on_tokens=report),)

    async def broken(self) -> None:
        """Raise why the engine can serve no more, once it cannot: then this process has no use."""
        await self._broken

    async def _close(self) -> None:
        """Close the engine, and wait until every request has its own reply; the other end has a deadline for that."""
        self._closing = True
        await self._engine.close()
        while self._open:
            self._idle.clear()
            await self._idle.wait()

    async def _check_health(self) -> None:
        """After a failure: was it the request's alone, or can the engine serve no more?"""
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
    load_decode = partial(load_decoder, model)
    return await NativeEngine.create(rollout, model, name=name, device=device, load_decode=load_decode)


def load_decoder(model: ModelConfig) -> Decode:
    """The tokenizer of a model, as far as stop strings need it."""
    from treadle.data.encoder import Encoder
    from treadle.model.tokenizer import load_tokenizer

    return Encoder(load_tokenizer(model)).decode
