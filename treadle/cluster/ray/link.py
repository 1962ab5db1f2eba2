"""A socket between the driver and an actor, which may be on another machine.

Owns the door an actor opens, the key that the visitor must show before anything it sends is read as a pickle, and
writes that wait for the end of the loop's turn, so that many small messages leave together.
Invariant: one visitor, the one who has the key; the door shuts behind it.
"""

import asyncio
import hmac
import io
import os
import pickle
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any, Self, cast

from treadle.cluster.ray.messages import Call, Generate
from treadle.engine.channel import Answer, Ask, ChannelClosed, Form, Tell
from treadle.errors import DeadlineError
from treadle.rollout.worker import Job
from treadle.types import (
    Completion,
    Outcome,
    Request,
    Row,
    SamplingParams,
    Task,
    Timing,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

_HEADER = struct.Struct("!I")
_KEY_BYTES = 32
_KEY_TIMEOUT_S = 5.0
"""Time a visitor has to show its key: it sends it at once."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where an actor listens, the key to it, and which process it is."""

    host: str
    port: int
    key: bytes
    pid: int

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"  # the key is nobody's to read in a log


class Door:
    """The actor's end before the driver has come."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_bytes(_KEY_BYTES), os.getpid())

    async def admit(self, timeout_s: float) -> socket.socket:
        """The visitor that has the key, within a deadline; others are turned away."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    visitor, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                    if await _shows(visitor, self.address.key):
                        return visitor
                    visitor.close()
        except TimeoutError as error:
            raise DeadlineError(f"nobody came to {self.address} within {timeout_s:g} s") from error
        finally:
            self._listener.close()


async def _shows(visitor: socket.socket, key: bytes) -> bool:
    visitor.setblocking(False)
    shown = b""
    try:
        async with asyncio.timeout(_KEY_TIMEOUT_S):
            while len(shown) < len(key):
                more = await asyncio.get_running_loop().sock_recv(visitor, len(key) - len(shown))
                if not more:
                    return False
                shown += more
    except (TimeoutError, OSError):
        return False
    return hmac.compare_digest(shown, key)


def _by_fields(record: type) -> Callable[[Any], tuple[type, tuple[Any, ...]]]:
    """Pickle a record as a call with its fields: two thirds of the time that dataclasses take by themselves."""
    names = [field.name for field in fields(record)]
    values = attrgetter(*names)
    if len(names) == 1:
        return lambda item: (record, (values(item),))
    return lambda item: (record, values(item))


_RECORDS = (
    *(Ask, Answer, Tell, Call, Generate, Request, SamplingParams, Completion),
    *(Job, Task, Trajectory, Row, Turn, ToolCall, ToolResult, Outcome, Timing),
)
_TABLE: Mapping[type, Callable[[Any], tuple[type, tuple[Any, ...]]]] = {item: _by_fields(item) for item in _RECORDS}


def _dump(message: Any) -> bytes:
    body = io.BytesIO()
    pickler = pickle.Pickler(body, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _TABLE
    pickler.dump(message)
    return body.getvalue()


PICKLES = Form(encode=_dump)


class Link(asyncio.Protocol):
    """A channel that reads and writes once in a turn of the loop, however much there is.

    Messages are handed on as they arrive, with no task between the socket and whoever reads: that is most of what a
    message costs where few are under way.
    """

    _transport: asyncio.Transport

    def __init__(self, form: Form = PICKLES) -> None:
        self._form = form
        self.problem: str | None = None
        """What the other end sent that is no message; the link is closed then."""
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[bytes] = []
        self._incoming = bytearray()
        self._messages: deque[Any] = deque()
        self._handle: Callable[[Any], None] = self._messages.append
        self._news: asyncio.Future[None] | None = None
        """What whoever reads waits for: a message, or the end."""
        self._end: Exception | None = None

    @classmethod
    async def open(cls, end: socket.socket, form: Form = PICKLES) -> Self:
        """Take over a connected socket."""
        _, link = await asyncio.get_running_loop().create_connection(partial(cls, form), sock=end)
        return link

    @classmethod
    async def connect(cls, address: Address, form: Form = PICKLES) -> Self:
        """The driver's end. The caller's deadline applies."""
        _, link = await asyncio.get_running_loop().create_connection(partial(cls, form), address.host, address.port)
        link._transport.write(address.key)
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # Ray's loop has classes of its own
        end: socket.socket = transport.get_extra_info("socket")
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._incoming += data
        at, have = 0, len(self._incoming)
        while have - at >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._incoming, at)
            if size > self._form.max_bytes:
                return self._refuse(f"a message of {size:,} bytes")
            if have - at < _HEADER.size + size:
                break
            at += _HEADER.size
            with memoryview(self._incoming) as whole, whole[at : at + size] as body:
                try:
                    message = self._form.decode(body)
                except self._form.garbage as error:
                    return self._refuse(str(error))
            at += size
            self._handle(message)
        del self._incoming[:at]
        if self._messages:
            self._wake()

    def _refuse(self, problem: str) -> None:
        self.problem = problem
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end = ChannelClosed() if exc is None or isinstance(exc, OSError) else exc
        self._wake()

    async def receive(self) -> Any:
        """The next message; ChannelClosed when there will be none."""
        while not self._messages:
            await self._wait()
        return self._messages.popleft()

    async def each(self, handle: Callable[[Any], None]) -> None:
        """Hand over every message as it comes; ChannelClosed when there will be none."""
        while self._messages:
            handle(self._messages.popleft())
        self._handle = handle
        try:
            while True:
                await self._wait()
        finally:
            self._handle = self._messages.append

    def send(self, message: Any) -> None:
        if self._transport.is_closing():
            raise ChannelClosed
        body = self._form.encode(message)
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing += (_HEADER.pack(len(body)), body)

    def close(self) -> None:
        self._flush()
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

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and not self._transport.is_closing():
            self._transport.write(b"".join(outgoing))
