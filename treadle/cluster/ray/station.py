"""An engine in an actor: requests from the driver in, completions out, tokens brought to safety in between.

Owns the requests that run in this process. A request that runs for long is interrupted every `save_s` seconds, sends
its tokens to the driver and goes on from there: by the Engine contract an interrupted answer goes on as if nothing had
happened. So a replica that dies takes the last `save_s` seconds of its requests with it, and no more.
Invariant: only an order from the driver ends a request with ABORT; our own interruptions are never seen outside.
"""

import asyncio
from dataclasses import replace
from inspect import isawaitable
from typing import Any

from treadle.cluster.ray.messages import Call, Generate, Saved
from treadle.engine.channel import Peer
from treadle.engine.protocol import Engine
from treadle.errors import EngineFailure, RequestRefused
from treadle.types import Completion, Request, StopReason

ENDING = ("abort", "pause", "sleep")
"""Calls that end requests: those of one session where an abort names one, else all."""

OPTIONAL = ("sleep", "forget")

_HEALTH_TIMEOUT_S = 5.0

_NOTHING = Completion((), (), (), StopReason.ABORT)


class _Turn:
    """One request that runs here."""

    __slots__ = ("ended", "save_s", "session", "timer")

    def __init__(self, session: str, save_s: float | None) -> None:
        self.session = session
        self.save_s = save_s
        self.ended = False
        """Whether the driver ordered its end."""
        self.timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class Station:
    """See the module. `answer` is for a `Peer`, whose `ask` brings tokens to safety."""

    peer: Peer

    def __init__(self, engine: Engine, save_s: float | None, tasks: asyncio.TaskGroup) -> None:
        self.engine = engine
        self._save_s = save_s
        self._tasks = tasks
        self._turns: dict[_Turn, None] = {}
        self._idle = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = False

    async def answer(self, order: Generate | Call) -> Any:
        """Carry out one order of the driver."""
        try:
            return await self._carry_out(order)
        except RequestRefused:
            raise
        except EngineFailure:
            await self._judge()
            raise

    async def watch(self) -> None:
        """Raise why the engine can serve no more, once it cannot: then this process has no use."""
        await self._broken

    async def _judge(self) -> None:
        """After a failure: is it the request's alone, or the engine's?"""
        if self._closing or self._broken.done():
            return
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                await self.engine.health()
        except (EngineFailure, TimeoutError) as error:
            why = str(error) or f"no answer to a health check in {_HEALTH_TIMEOUT_S:g} s"
            if not self._broken.done():
                self._broken.set_exception(EngineFailure(f"the engine can serve no more: {why}"))

    async def _carry_out(self, order: Generate | Call) -> Any:
        if isinstance(order, Generate):
            return await self._generate(order.number, order.request)
        if order.method == "close":
            return await self._close()
        if order.method in ENDING:
            self._end(order.arguments[0] if order.method == "abort" else None)
        return await self._call(order)

    async def _call(self, order: Call) -> Any:
        """A method of the engine; those that not every engine has do nothing where they are missing."""
        method = getattr(self.engine, order.method, None)
        if method is None and order.method in OPTIONAL:
            return None
        assert method is not None, f"no engine has {order.method}"
        result = method(*order.arguments)
        return await result if isawaitable(result) else result

    async def _generate(self, number: int, request: Request) -> Completion:
        turn = _Turn(request.session, self._save_s)
        self._turns[turn] = None
        try:
            part = await self._sample(turn, request)
            while part.stop is StopReason.ABORT and not turn.ended:
                if part.ids:
                    await self.peer.ask(Saved(number, part))
                    request = _go_on(request, part)
                if turn.ended:  # ordered while the tokens were on their way
                    return replace(_NOTHING, replica=part.replica)
                part = await self._sample(turn, request)
            return part
        finally:
            del self._turns[turn]
            if not self._turns:
                self._idle.set()

    async def _sample(self, turn: _Turn, request: Request) -> Completion:
        """One part: to the end, or to the next interruption."""
        if turn.save_s is not None:
            turn.timer = asyncio.get_running_loop().call_later(turn.save_s, self._interrupt, turn)
            turn.save_s *= 2  # a request that is still in the queue must not be sent to its end for ever
        try:
            part = await self.engine.generate(request)
        finally:
            turn.stop_timer()
        if part.ids:
            turn.save_s = self._save_s
        return part

    def _interrupt(self, turn: _Turn) -> None:
        self._tasks.create_task(self.engine.abort(turn.session))

    def _end(self, session: str | None) -> None:
        for turn in self._turns:
            if session is None or turn.session == session:
                turn.ended = True
                turn.stop_timer()

    async def _close(self) -> None:
        """Close the engine; answer when every request has had its own answer. The driver has a deadline for that."""
        self._closing = True
        self._end(None)
        await self.engine.close()
        while self._turns:
            self._idle.clear()
            await self._idle.wait()


def _go_on(request: Request, part: Completion) -> Request:
    """The rest of a request, after a part of it."""
    count, sampling = len(part.ids), request.sampling
    return replace(
        request,
        ids=request.ids + part.ids,
        sampling=replace(sampling, max_tokens=sampling.max_tokens - count),
        position=request.position + count,
    )
