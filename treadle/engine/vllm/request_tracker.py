"""Request tracker of a vLLM server: requests across weight updates. Knows nothing of vLLM itself.

Owns every request from its arrival to its result, the policy version, and the lock between sampling and updates. A
request is sampled in segments: an update ends the segments that run, loads, and lets each request go on from the tokens
it has. So every token was sampled by exactly one version, and what follows an update is computed with the new weights
alone. Invariant: while the lock is held, each request is either registered with the sampler or not begun.

What waits for what: a segment waits for the lock, then for its tokens; an update holds the lock and waits for the
segments to end, then for the weights. Each of these waits has `timeout_s`, or the client's own deadline.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from treadle.engine.vllm.protocol import SampleRequest, SampleResult, merge_spans
from treadle.errors import EngineFailure
from treadle.types import StopReason

RequestKey = tuple[int, int]
"""Which client, and which of its requests."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What one segment came to."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    stop: StopReason
    processed: Sequence[float] = ()
    """Of the distribution sampled from, where that is another; not numbers where vLLM tells only one of the two."""
    queue_s: float = 0.0
    """In vLLM's queue; 0 where its statistics are off."""


SegmentHandle = TypeVar("SegmentHandle")


class SegmentSampler(Protocol[SegmentHandle]):
    """What the server asks of vLLM; see `adapter` for the real one."""

    async def begin(self, order: SampleRequest, kept: Sequence[int]) -> SegmentHandle:
        """Register a segment that goes on after `kept`."""
        ...

    async def finish(self, ticket: SegmentHandle) -> Segment:
        """Wait for a segment's end. Cancelling it ends the segment."""
        ...

    async def end(self, tickets: Sequence[SegmentHandle]) -> None:
        """Make segments end, with what they have."""
        ...

    async def load(self, transfer: bytes) -> str:
        """Take new weights while nothing is sampled, and forget what was computed with the old ones."""
        ...

    async def sleep(self, level: int) -> None: ...

    async def wake(self) -> None: ...

    async def serve_openai(self, served_as: str, host: str, port: int, api_key: str) -> str:
        """Open a door for OpenAI's API, for those who have the key; its base URL."""
        ...

    async def check(self) -> None:
        """Raise EngineFailure if nothing can be sampled any more."""
        ...


@dataclass(slots=True, eq=False)
class _TrackedRequest(Generic[SegmentHandle]):
    """One request. `ticket` is there while a segment of it is being sampled."""

    order: SampleRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    queue_s: float = 0.0
    spans: list[tuple[int, int]] = field(default_factory=list)
    ticket: SegmentHandle | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """No segment of it is being sampled."""
    aborted: bool = False

    def answer(self, stop: StopReason) -> SampleResult:
        columns = (tuple(self.ids), tuple(self.logprobs), merge_spans(self.spans))
        return SampleResult(*columns, stop, tuple(self.processed), self.queue_s)

    def extend(self, piece: Segment, version: int) -> None:
        known = piece.processed or piece.logprobs
        if any(one != one and other != other for one, other in zip(piece.logprobs, known, strict=True)):
            raise EngineFailure(f"token {self.order.position + len(self.ids)}: the model's logits are not numbers")
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.processed += piece.processed
        self.queue_s += piece.queue_s
        self.spans.append((version, len(piece.ids)))


class RequestTracker(Generic[SegmentHandle]):
    """The requests of one server."""

    def __init__(self, sampler: SegmentSampler[SegmentHandle], *, timeout_s: float) -> None:
        self.version = 0
        self._sampler = sampler
        self._timeout_s = timeout_s
        self._flights: dict[RequestKey, _TrackedRequest[SegmentHandle]] = {}
        self._door = asyncio.Lock()
        self._asleep = 0
        self._confirmed = ""
        self._damage: str | None = None

    async def generate(self, key: RequestKey, order: SampleRequest) -> SampleResult:
        """Sample until the order's own end, or an abort."""
        flight: _TrackedRequest[SegmentHandle] = _TrackedRequest(order)
        self._flights[key] = flight
        flight.ended.set()
        try:
            while True:
                piece = await self._segment(flight)
                if piece is None:
                    return flight.answer(StopReason.ABORT)
                if piece.stop is not StopReason.ABORT:
                    return flight.answer(piece.stop)
        finally:
            del self._flights[key]

    async def _segment(self, flight: _TrackedRequest[SegmentHandle]) -> Segment | None:
        """Sample up to the next interruption; None where the request was aborted."""
        async with self._door:
            if flight.aborted:
                return None
            self._refuse()
            version = self.version
            flight.ended.clear()
            try:
                flight.ticket = await self._sampler.begin(flight.order, flight.ids)
            except BaseException:
                flight.ended.set()
                raise
        try:
            piece = await self._sampler.finish(flight.ticket)
            flight.extend(piece, version)
        finally:
            flight.ticket = None
            flight.ended.set()
        return None if flight.aborted and piece.stop is StopReason.ABORT else piece

    def _refuse(self) -> None:
        if self._damage:
            raise EngineFailure(self._damage)
        if self._asleep:
            raise EngineFailure("the engine is asleep: wake it, or give it weights")

    async def abort(self, keys: Sequence[RequestKey]) -> None:
        """End these requests with the tokens they have; return when they have ended."""
        async with self._door:
            flights = [self._flights[key] for key in keys if key in self._flights]
            for flight in flights:
                flight.aborted = True
            await self._stop(flights)

    async def _stop(self, flights: Sequence[_TrackedRequest[SegmentHandle]]) -> None:
        tickets = [flight.ticket for flight in flights if flight.ticket is not None]
        if tickets:
            await self._sampler.end(tickets)
        await self._within(asyncio.gather(*(flight.ended.wait() for flight in flights)), "running requests to end")

    async def update(self, version: int, transfer: bytes | None, expected: str = "") -> str:
        """Swap the weights under all requests, which go on with the new ones; the checksum of what is held then.

        Without a parcel only the version changes. A load that fails, or has another checksum than `expected`, leaves
        the weights damaged: nothing is served until a later one succeeds.
        """
        async with self._door:
            await self._stop(list(self._flights.values()))
            if transfer is not None:
                self._damage = f"the weights of version {version} did not arrive as they were sent"
                self._confirmed = await self._sampler.load(transfer)
                self._asleep = 0
                if self._confirmed == expected:
                    self._damage = None
            self.version = version
            return self._confirmed

    async def sleep(self, level: int) -> None:
        """Give memory back: the cache, and with level 2 the weights too, until `wake` or an update."""
        async with self._door:
            await self._stop(list(self._flights.values()))
            self._asleep = level
            if level > 1:
                self._damage = "the weights were given up in sleep: they come back with the next update"
            await self._sampler.sleep(level)

    async def wake(self) -> None:
        async with self._door:
            await self._sampler.wake()
            self._asleep = 0

    async def serve_openai(self, served_as: str, host: str, port: int, api_key: str) -> str:
        return await self._sampler.serve_openai(served_as, host, port, api_key)

    async def is_dead(self) -> bool:
        """Whether nothing will be sampled any more, whatever comes."""
        try:
            await self._sampler.check()
        except EngineFailure:
            return True
        return False

    async def health(self) -> None:
        await self._sampler.check()
        if self._damage and not self._asleep:
            raise EngineFailure(self._damage)

    async def _within(self, work: Awaitable[object], what: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await work
        except TimeoutError:
            raise EngineFailure(f"waited {self._timeout_s:g} s for {what}") from None
