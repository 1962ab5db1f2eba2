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

from treadle.engine.protocol import ConfirmedWeights
from treadle.engine.vllm.protocol import SampleRequest, SampleResult, merge_spans
from treadle.errors import EngineFailure
from treadle.types import StopReason

RequestKey = tuple[int, int]
"""Which client, and which of its requests."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Result of one segment."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    stop: StopReason
    processed: Sequence[float] = ()
    """Of the distribution sampled from, where that is another; NaN where vLLM reports only one of the two."""
    queue_s: float = 0.0
    """In vLLM's queue; 0 where its statistics are off."""


SegmentHandle = TypeVar("SegmentHandle")


class SegmentSampler(Protocol[SegmentHandle]):
    """Sampler interface of the server; `async_llm` implements it with vLLM."""

    async def begin(self, sample: SampleRequest, kept: Sequence[int]) -> SegmentHandle:
        """Register a segment that goes on after `kept`."""
        ...

    async def finish(self, handle: SegmentHandle) -> Segment:
        """Wait for a segment's end. Cancelling it ends the segment."""
        ...

    async def end(self, handles: Sequence[SegmentHandle]) -> None:
        """Make segments end, with what they have."""
        ...

    async def load(self, transfer: bytes) -> str:
        """Load new weights while nothing is sampled, and drop what was cached with the old ones."""
        ...

    async def sleep(self, level: int) -> None: ...

    async def wake(self) -> None: ...

    async def serve_openai(self, served_as: str, host: str, port: int, api_key: str) -> str:
        """Serve OpenAI's API, with an API key; returns its base URL."""
        ...

    async def check(self) -> None:
        """Raise EngineFailure if nothing can be sampled any more."""
        ...


@dataclass(slots=True, eq=False)
class _TrackedRequest(Generic[SegmentHandle]):
    """One request. `handle` is set while a segment of it is being sampled."""

    sample: SampleRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    queue_s: float = 0.0
    spans: list[tuple[int, int]] = field(default_factory=list)
    handle: SegmentHandle | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """No segment of it is being sampled."""
    aborted: bool = False

    def result(self, stop: StopReason) -> SampleResult:
        columns = (tuple(self.ids), tuple(self.logprobs), merge_spans(self.spans))
        return SampleResult(*columns, stop, tuple(self.processed), self.queue_s)

    def extend(self, segment: Segment, version: int) -> None:
        known = segment.processed or segment.logprobs
        if any(one != one and other != other for one, other in zip(segment.logprobs, known, strict=True)):
            raise EngineFailure(f"token {self.sample.position + len(self.ids)}: the model's logits are not numbers")
        self.ids += segment.ids
        self.logprobs += segment.logprobs
        self.processed += segment.processed
        self.queue_s += segment.queue_s
        self.spans.append((version, len(segment.ids)))


class RequestTracker(Generic[SegmentHandle]):
    """The requests of one server."""

    def __init__(self, sampler: SegmentSampler[SegmentHandle], *, timeout_s: float) -> None:
        self.version = 0
        self._sampler = sampler
        self._timeout_s = timeout_s
        self._requests: dict[RequestKey, _TrackedRequest[SegmentHandle]] = {}
        self._lock = asyncio.Lock()
        self._asleep = 0
        self._confirmed = ""
        self._corrupt: str | None = None

    async def generate(self, key: RequestKey, sample: SampleRequest) -> SampleResult:
        """Sample until the request's own end, or an abort."""
        request: _TrackedRequest[SegmentHandle] = _TrackedRequest(sample)
        self._requests[key] = request
        request.ended.set()
        try:
            while True:
                segment = await self._segment(request)
                if segment is None:
                    return request.result(StopReason.ABORT)
                if segment.stop is not StopReason.ABORT:
                    return request.result(segment.stop)
        finally:
            del self._requests[key]

    async def _segment(self, request: _TrackedRequest[SegmentHandle]) -> Segment | None:
        """Sample up to the next interruption; None where the request was aborted."""
        async with self._lock:
            if request.aborted:
                return None
            self._require_ready()
            version = self.version
            request.ended.clear()
            try:
                request.handle = await self._sampler.begin(request.sample, request.ids)
            except BaseException:
                request.ended.set()
                raise
        try:
            segment = await self._sampler.finish(request.handle)
            request.extend(segment, version)
        finally:
            request.handle = None
            request.ended.set()
        return None if request.aborted and segment.stop is StopReason.ABORT else segment

    def _require_ready(self) -> None:
        if self._corrupt:
            raise EngineFailure(self._corrupt)
        if self._asleep:
            raise EngineFailure("the engine is asleep: wake it, or give it weights")

    async def abort(self, keys: Sequence[RequestKey]) -> None:
        """End these requests with the tokens they have; return when they have ended."""
        async with self._lock:
            requests = [self._requests[key] for key in keys if key in self._requests]
            for request in requests:
                request.aborted = True
            await self._stop(requests)

    async def _stop(self, requests: Sequence[_TrackedRequest[SegmentHandle]]) -> None:
        handles = [request.handle for request in requests if request.handle is not None]
        if handles:
            await self._sampler.end(handles)
        await self._within(asyncio.gather(*(request.ended.wait() for request in requests)), "running requests to end")

    async def update(self, version: int, transfer: bytes | None, expected: str = "") -> ConfirmedWeights:
        """Swap the weights under all requests, which go on with the new ones; what is held then.

        Without a transfer only the version changes. A load that fails, or has another checksum than `expected`, leaves
        the weights damaged: nothing is served until a later one succeeds.
        """
        async with self._lock:
            clock = asyncio.get_running_loop().time
            stopped = clock()
            await self._stop(list(self._requests.values()))
            if transfer is not None:
                self._corrupt = f"the weights of version {version} did not arrive as they were sent"
                self._confirmed = await self._sampler.load(transfer)
                self._asleep = 0
                if self._confirmed == expected:
                    self._corrupt = None
            self.version = version
            return ConfirmedWeights(self._confirmed, clock() - stopped)

    async def sleep(self, level: int) -> None:
        """Release memory: the KV cache, and with level 2 the weights too, until `wake` or an update."""
        async with self._lock:
            await self._stop(list(self._requests.values()))
            self._asleep = level
            if level > 1:
                self._corrupt = "the weights were given up in sleep: they come back with the next update"
            await self._sampler.sleep(level)

    async def wake(self) -> None:
        async with self._lock:
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
        if self._corrupt and not self._asleep:
            raise EngineFailure(self._corrupt)

    async def _within(self, work: Awaitable[object], what: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await work
        except TimeoutError:
            raise EngineFailure(f"waited {self._timeout_s:g} s for {what}") from None
