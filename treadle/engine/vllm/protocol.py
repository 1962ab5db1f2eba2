"""Protocol between client and server of a vLLM replica: frames on a Unix socket.

Owns the frames and the two frequent messages, a sampling request and its result, as plain arrays. Everything rare is a
pickle: both ends run our own code as the same user, and nothing from outside reaches this socket. Imports no vLLM.
Invariant: a frame that is read is whole; `ReplicaSocketClosed` says that there will be no more.
"""

import asyncio
import pickle
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from treadle.config.rollout import ModelConfig, RolloutConfig
from treadle.types import StopReason

_FRAME = struct.Struct("<IBQ")
_REQUEST = struct.Struct("<IIIdddddddiQII")
_RESULT = struct.Struct("<BIIBd")
_STOPS = (StopReason.STOP, StopReason.LENGTH, StopReason.ABORT)
_PART = 1 << 20
"""Bytes a stream reader holds before the other end has to wait."""


class ReplicaSocketClosed(Exception):
    """The other end has closed the socket."""


class FrameKind(IntEnum):
    """Kind of frame."""

    REQUEST = 1
    """To the server: sample. Answered by SAMPLED or FAILURE."""
    CANCEL = 2
    """To the server: the request was cancelled."""
    CALL = 3
    """To the server: a method by name. Answered by RESULT or FAILURE."""
    SAMPLED = 4
    RESULT = 5
    FAILURE = 6


@dataclass(frozen=True, slots=True)
class VLLMServerSetup:
    """Setup message to a server."""

    rollout: RolloutConfig
    model: ModelConfig
    directory: str
    path: tuple[str, ...]
    """Where the owner finds modules, so that the server finds the same."""


@dataclass(frozen=True, slots=True)
class ServerHello:
    """First message of a server to each client."""

    vocabulary: int
    pid: int


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request as the server needs it. `stream` and `position` say which noise is drawn."""

    ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    stream: int
    position: int
    min_p: float = 0.0
    penalties: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 1.0)
    """See `SamplingParams.penalties`."""
    num_begun: int = 0
    """How many of the last ids belong to this answer."""

    @property
    def is_penalized(self) -> bool:
        return self.penalties != (1.0, 0.0, 0.0, 1.0)

    @property
    def is_processed(self) -> bool:
        """Whether tokens are drawn from another distribution than the whole softmax."""
        filtered = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return self.is_penalized or (filtered and self.temperature > 0)

    def pack(self) -> bytes:
        head = _REQUEST.pack(
            self.max_tokens,
            self.position,
            self.num_begun,
            self.temperature,
            self.top_p,
            self.min_p,
            *self.penalties,
            self.top_k,
            self.stream,
            len(self.ids),
            len(self.stop_token_ids),
        )
        return head + array("i", (*self.ids, *self.stop_token_ids)).tobytes()

    @classmethod
    def unpack(cls, body: bytes) -> "SampleRequest":
        tokens, position, num_begun, temperature, top_p, min_p, *rest = _REQUEST.unpack_from(body)
        *penalties, top_k, stream, num_ids, _ = rest
        numbers = array("i", body[_REQUEST.size :]).tolist()
        ids, stops = tuple(numbers[:num_ids]), tuple(numbers[num_ids:])
        given = (ids, tokens, temperature, top_p, top_k, stops, stream, position)
        return cls(*given, min_p, tuple(penalties), num_begun)


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What was sampled. `spans` gives, for each policy version in turn, how many tokens it sampled."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[tuple[int, int], ...]
    stop: StopReason
    processed: tuple[float, ...] = ()
    """Logprobs of the distribution sampled from, where that is another."""
    queue_s: float = 0.0
    """In vLLM's queue, where its statistics are on."""

    def pack(self) -> bytes:
        counts = (len(self.ids), len(self.spans), bool(self.processed))
        head = _RESULT.pack(_STOPS.index(self.stop), *counts, self.queue_s)
        spans = array("q", [number for span in self.spans for number in span])
        floats = array("d", (*self.logprobs, *self.processed))
        return head + spans.tobytes() + floats.tobytes() + array("i", self.ids).tobytes()

    @classmethod
    def unpack(cls, body: bytes) -> "SampleResult":
        stop, num_ids, num_spans, has_processed, queue_s = _RESULT.unpack_from(body)
        spans_end = _RESULT.size + 16 * num_spans
        floats_end = spans_end + 8 * num_ids * (1 + has_processed)
        flat = array("q", body[_RESULT.size : spans_end]).tolist()
        spans = tuple(zip(flat[::2], flat[1::2], strict=True))
        floats = tuple(array("d", body[spans_end:floats_end]))
        ids = tuple(array("i", body[floats_end:]))
        return cls(ids, floats[:num_ids], spans, _STOPS[stop], floats[num_ids:], queue_s)

    def versions(self) -> tuple[int, ...]:
        """The policy version of each token."""
        return tuple(version for version, count in self.spans for _ in range(count))


class ReplicaSocket:
    """One end of the socket. `send` does not wait: what is under way is bounded by the requests that are open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, path: str) -> "ReplicaSocket":
        """Reach the server that listens at `path`."""
        return cls(*await asyncio.open_unix_connection(path, limit=_PART))

    def send(self, kind: FrameKind, number: int, body: bytes = b"") -> None:
        if self._writer.is_closing():
            raise ReplicaSocketClosed
        self._writer.write(_FRAME.pack(len(body), kind, number) + body)

    def send_object(self, kind: FrameKind, number: int, body: Any) -> None:
        self.send(kind, number, pickle.dumps(body, pickle.HIGHEST_PROTOCOL))

    async def receive(self) -> tuple[FrameKind, int, bytes]:
        """The next frame."""
        try:
            size, kind, number = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
            return FrameKind(kind), number, await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ReplicaSocketClosed from error

    def close(self) -> None:
        self._writer.close()

    async def wait_closed(self) -> None:
        """Return when nothing of the connection is left here."""
        with suppress(ConnectionError):
            await self._writer.wait_closed()


def merge_spans(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbours of one version as one span; empty ones left out."""
    merged: list[tuple[int, int]] = []
    for version, count in spans:
        if merged and merged[-1][0] == version:
            merged[-1] = version, merged[-1][1] + count
        elif count:
            merged.append((version, count))
    return tuple(merged)
