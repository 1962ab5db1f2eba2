"""Framed channel between two processes: an asyncio end and a blocking end.

Owns the frames (eight bytes of length, then the message), their size limit, and writes that leave together at the end
of the event loop's turn. What a message is, a codec says: pickles from processes that run our own code alone, and
`codec.RecordCodec` from those that have run anything else.
Invariant: bytes that are no message close the channel, with the problem; they are never an error of this process.
"""

import asyncio
import copyreg
import io
import pickle
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, Self, cast

HEADER = struct.Struct("!Q")

MAX_FRAME_BYTES = 1 << 40
"""Of a process that is trusted."""

_READ_BYTES = 1 << 20


class ChannelClosed(Exception):
    """The other end has gone, or was refused."""


_FAST: dict[type, Callable[[Any], Any]] = {}


def pickle_by_fields(*records: type) -> None:
    """Pickle these dataclasses as calls with their fields: two thirds of the time that they take by themselves."""
    _FAST.update(copyreg.dispatch_table)
    for record in records:
        names = [item.name for item in fields(record)]
        _FAST[record] = partial(_reduce_one if len(names) == 1 else _reduce, record, attrgetter(*names))


def _reduce(record: type, values: Callable[[Any], tuple[Any, ...]], item: Any) -> tuple[type, tuple[Any, ...]]:
    return record, values(item)


def _reduce_one(record: type, value: Callable[[Any], Any], item: Any) -> tuple[type, tuple[Any, ...]]:
    return record, (value(item),)


def to_pickle(message: Any) -> bytes:
    """A message as a pickle."""
    body = io.BytesIO()
    pickler = pickle.Pickler(body, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _FAST or copyreg.dispatch_table
    pickler.dump(message)
    return body.getvalue()


def as_bytes(message: Any) -> bytes:
    """A message that is bytes already."""
    return bytes(message)


@dataclass(frozen=True, slots=True)
class FrameCodec:
    """How messages of one direction become bytes and messages again."""

    encode: Callable[[Any], bytes] = to_pickle
    decode: Callable[[bytes | memoryview], Any] = pickle.loads
    garbage: tuple[type[Exception], ...] = ()
    """What `decode` raises for bytes that are no message. A pickle that cannot be read is a bug of ours."""
    max_bytes: int = MAX_FRAME_BYTES


PICKLE = FrameCodec()
RAW = FrameCodec(as_bytes, as_bytes)


@dataclass(frozen=True, slots=True)
class ChannelCodec:
    """Both directions of a channel between a parent and its child. Travels to the child as a pickle."""

    to_child: FrameCodec = PICKLE
    to_parent: FrameCodec = PICKLE


PICKLES = ChannelCodec()
"""For processes that run our own code alone."""


class Channel(asyncio.Protocol):
    """The asyncio end: reads and writes once in a turn of the event loop, however much there is.

    `send` does not wait: what is under way is bounded by the requests that are open. Messages are handed to `each` as
    they arrive, with no task in between: that is most of what a message costs where few are under way.
    """

    _transport: asyncio.Transport

    def __init__(self, outgoing: FrameCodec = PICKLE, incoming: FrameCodec = PICKLE) -> None:
        self.problem: str | None = None
        """What the other end sent that is no message, or no answer; the channel is closed then."""
        self.flooded = False
        """Whether that was a message above the limit."""
        self._outgoing_codec, self._incoming_codec = outgoing, incoming
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[bytes] = []
        self._incoming = bytearray()
        self._frames: deque[bytes] = deque()
        """Not decoded yet: the codec may change after the first."""
        self._handle: Callable[[Any], None] | None = None
        self._news: asyncio.Future[None] | None = None
        """What the reader waits for: a message, or the end."""
        self._end: Exception | None = None

    @classmethod
    async def open(cls, end: socket.socket, outgoing: FrameCodec = PICKLE, incoming: FrameCodec = PICKLE) -> Self:
        """Take over a connected socket."""
        loop, make = asyncio.get_running_loop(), partial(cls, outgoing, incoming)
        if end.family == socket.AF_UNIX:
            _, channel = await loop.create_unix_connection(make, sock=end)
        else:
            _, channel = await loop.create_connection(make, sock=end)
        return channel

    def use(self, outgoing: FrameCodec, incoming: FrameCodec) -> None:
        """Other codecs, from the next message on."""
        self._outgoing_codec, self._incoming_codec = outgoing, incoming

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # other event loops have classes of their own
        end: socket.socket = transport.get_extra_info("socket")
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._incoming += data
        at, have = 0, len(self._incoming)
        while have - at >= HEADER.size:
            (size,) = HEADER.unpack_from(self._incoming, at)
            if size > self._incoming_codec.max_bytes:
                self.flooded = True
                return self.refuse(f"a message of {size:,} bytes")
            if have - at < HEADER.size + size:
                break
            at += HEADER.size
            if self._handle is None:
                self._frames.append(bytes(self._incoming[at : at + size]))
            else:
                with memoryview(self._incoming) as whole, whole[at : at + size] as body:
                    try:
                        message = self._incoming_codec.decode(body)
                    except self._incoming_codec.garbage as error:
                        return self.refuse(str(error))
                self._handle(message)
            at += size
        del self._incoming[:at]
        if self._frames:
            self._wake()

    def refuse(self, problem: str) -> None:
        """Close at once, because of something that the other end sent."""
        self.problem = self.problem or problem
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end = ChannelClosed(*filter(None, [self.problem])) if exc is None or isinstance(exc, OSError) else exc
        self._wake()

    async def receive(self) -> Any:
        """The next message; ChannelClosed when there will be none."""
        while not self._frames:
            await self._wait()
        return self._decode(self._frames.popleft())

    async def each(self, handle: Callable[[Any], None]) -> None:
        """Hand over every message as it comes; ChannelClosed when there will be none."""
        while self._frames:
            handle(self._decode(self._frames.popleft()))
        self._handle = handle
        try:
            while True:
                await self._wait()
        finally:
            self._handle = None

    def _decode(self, frame: bytes) -> Any:
        try:
            return self._incoming_codec.decode(frame)
        except self._incoming_codec.garbage as error:
            self.refuse(str(error))
            raise ChannelClosed(str(error)) from error

    def send(self, message: Any) -> None:
        if self._transport.is_closing():
            raise ChannelClosed(*filter(None, [self.problem]))
        body = self._outgoing_codec.encode(message)
        if not self._outgoing:
            self._loop.call_soon(self.flush)
        self._outgoing += (HEADER.pack(len(body)), body)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    async def _wait(self) -> None:
        """Until there is news. What has ended brings none any more."""
        if self._end is not None:
            raise self._end
        self._news = self._loop.create_future()
        await self._news

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def flush(self) -> None:
        """Write what was sent in this turn of the loop."""
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and not self._transport.is_closing():
            self._transport.write(b"".join(outgoing))


@dataclass(slots=True)
class BlockingChannel:
    """The blocking end. One thread sends at a time, and one receives."""

    end: socket.socket
    outgoing: FrameCodec = PICKLE
    incoming: FrameCodec = PICKLE
    problem: str | None = field(default=None, init=False)
    """What the other end sent that is no message; the channel is closed then."""

    def send(self, message: Any) -> None:
        """Waits as long as it takes; ChannelClosed if the other end has gone."""
        body = self.outgoing.encode(message)
        try:
            self.end.settimeout(None)
            if len(body) < _READ_BYTES:
                self.end.sendall(HEADER.pack(len(body)) + body)
            else:
                self.end.sendall(HEADER.pack(len(body)))
                self.end.sendall(body)
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message; ChannelClosed when there will be none, TimeoutError when there is none in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (size,) = HEADER.unpack(self._read(HEADER.size, deadline))
        if size > self.incoming.max_bytes:
            raise self._refuse(f"a message of {size:,} bytes")
        body = self._read(size, deadline)
        try:
            return self.incoming.decode(body)
        except self.incoming.garbage as error:
            raise self._refuse(str(error)) from error

    def close(self) -> None:
        self.end.close()

    def _refuse(self, problem: str) -> ChannelClosed:
        self.problem = self.problem or problem
        self.end.close()
        return ChannelClosed(problem)

    def _read(self, size: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                if deadline is not None:
                    self.end.settimeout(max(1e-3, deadline - time.monotonic()))
                piece = self.end.recv(min(size - len(data), _READ_BYTES))
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosed from error
            if not piece:
                raise ChannelClosed
            data += piece
        return bytes(data)
