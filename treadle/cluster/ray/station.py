"""An engine in an actor: requests from the driver in, completions out, tokens brought to safety in between.

Owns what the driver may order of the engine in this process. Requests run in slices (`engine.partial`), and what each
slice sampled is sent to the driver. Invariant: only an order from the driver ends a request with ABORT.
"""

import asyncio
from inspect import isawaitable
from typing import Any

from treadle.cluster.ray.messages import Call, Generate, Saved
from treadle.engine.channel import Peer
from treadle.engine.partial import PartialRequests
from treadle.engine.protocol import Engine
from treadle.errors import EngineFailure, RequestRefused
from treadle.types import Completion, Request

ENDING = ("abort", "pause", "sleep")
"""Calls that end requests: those of one session where an abort names one, else all."""

OPTIONAL = ("sleep", "forget")

_HEALTH_TIMEOUT_S = 5.0


class Station:
    """See the module. `answer` is for a `Peer`, whose `ask` brings tokens to safety."""

    peer: Peer

    def __init__(self, engine: Engine, save_s: float | None, tasks: asyncio.TaskGroup) -> None:
        self.engine = engine
        self._requests = PartialRequests(save_s, tasks.create_task)
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
            self._requests.end(order.arguments[0] if order.method == "abort" else None)
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
        return await self._requests.generate(self.engine, request, lambda part: self.peer.ask(Saved(number, part)))

    async def _close(self) -> None:
        """Close the engine; answer when every request has had its own answer. The driver has a deadline for that."""
        self._closing = True
        self._requests.end()
        await self.engine.close()
        await self._requests.drain()
