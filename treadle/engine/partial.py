"""Partial completions: a long request is sampled in slices, so that an engine that dies takes few of its tokens along.

Owns the requests that run through here. One that runs for long is interrupted every `save_s` seconds, hands its tokens
over and goes on from there: by the Engine contract an interrupted answer goes on as if nothing had happened. So a
replica that dies takes the last `save_s` seconds of its requests with it, and no more; where it runs (a process of its
own, an actor on a cluster) makes no difference.
Invariant: only an order from outside ends a request with ABORT; our own interruptions are never seen.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from treadle.engine.protocol import Engine
from treadle.types import Completion, Request, StopReason

SAVE_S = 10.0
"""How often the tokens of a running request are brought to safety. It costs an engine one short prefill."""

Keep = Callable[[Completion], Awaitable[object]]
"""Brings the tokens of a slice to safety."""


class _Turn:
    """One request that runs."""

    __slots__ = ("ended", "save_s", "session", "timer")

    def __init__(self, session: str, save_s: float | None) -> None:
        self.session = session
        self.save_s = save_s
        self.ended = False
        """Whether its end was ordered."""
        self.timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class PartialRequests:
    """See the module. Without `save_s` requests are only counted. `spawn` starts the calls that interrupt."""

    def __init__(self, save_s: float | None, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._save_s = save_s
        self._spawn = spawn
        self._turns: dict[_Turn, None] = {}
        self._idle = asyncio.Event()

    async def generate(self, engine: Engine, request: Request, keep: Keep) -> Completion:
        """What is left of a request's answer after the slices that `keep` was given."""
        turn = _Turn(request.session, self._save_s)
        self._turns[turn] = None
        try:
            part = await self._sample(engine, turn, request)
            while part.stop is StopReason.ABORT and not turn.ended:
                if part.ids:
                    await keep(part)
                    request = rest_of(request, part)
                if turn.ended:  # ordered while the tokens were on their way
                    return Completion((), (), (), StopReason.ABORT, replica=part.replica)
                part = await self._sample(engine, turn, request)
            return part
        finally:
            del self._turns[turn]
            if not self._turns:
                self._idle.set()

    def end(self, session: str | None = None) -> None:
        """The end of a session's requests, or of all, was ordered: the next interruption is that."""
        for turn in self._turns:
            if session is None or turn.session == session:
                turn.ended = True
                turn.stop_timer()

    async def drain(self) -> None:
        """Wait until no request runs; the caller has a deadline."""
        while self._turns:
            self._idle.clear()
            await self._idle.wait()

    async def _sample(self, engine: Engine, turn: _Turn, request: Request) -> Completion:
        """One slice: to the end, or to the next interruption."""
        if turn.save_s is not None:
            loop = asyncio.get_running_loop()
            turn.timer = loop.call_later(turn.save_s, lambda: self._spawn(engine.abort(turn.session)))
            turn.save_s *= 2  # a request that is still in the queue must not be sent to its end for ever
        try:
            part = await engine.generate(request)
        finally:
            turn.stop_timer()
        if part.ids:
            turn.save_s = self._save_s
        return part


def rest_of(request: Request, part: Completion) -> Request:
    """The rest of a request, after a part of it."""
    count, sampling = len(part.ids), request.sampling
    return replace(
        request,
        ids=request.ids + part.ids,
        sampling=replace(sampling, max_tokens=sampling.max_tokens - count),
        position=request.position + count,
        said=request.said + count,
    )


def join_parts(saved: Sequence[Completion], last: Completion, replica: str) -> Completion:
    """The parts of an answer as one. Its text is left for whoever has the whole turn: a part may end in mid-letter."""
    if not saved:
        return last
    parts = (*saved, last)
    processed: tuple[float, ...] = ()
    if any(part.processed_logprobs for part in parts):
        processed = tuple(value for part in parts for value in part.processed_logprobs or part.logprobs)
    return Completion(
        ids=tuple(token for part in parts for token in part.ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        versions=tuple(version for part in parts for version in part.versions),
        stop=last.stop,
        replica=last.replica or replica,
        calls=last.calls,
        preemptions=sum(part.preemptions for part in parts),
        processed_logprobs=processed,
        queue_s=sum(part.queue_s for part in parts),
    )
