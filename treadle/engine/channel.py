"""Questions and answers between a process and those it started, over a socket pair.

Messages are pickles, which is safe from a process that runs our own code alone. Where the other end has run tools or
model text, its messages are read by a decoder that runs nothing (`treadle.rollout.serialization`); what that refuses
ends the channel, with the problem.
Waits: `ask` waits for its answer or for the other end to go; `serve` waits for messages until the other end goes.
"""

import asyncio
import itertools
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self

_HEADER = struct.Struct("!I")


class ChannelClosed(Exception):
    """The other end has gone."""


def _to_pickle(message: Any) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


@dataclass(frozen=True, slots=True)
class Form:
    """How messages of one end become bytes, and those of the other end messages."""

    encode: Callable[[Any], bytes] = _to_pickle
    decode: Callable[[bytes | memoryview], Any] = pickle.loads
    garbage: tuple[type[Exception], ...] = ()
    """What `decode` raises for bytes that are no message. A pickle that cannot be read is a bug of ours."""
    max_bytes: int = 1 << 32


class Channel:
    """One end. `send` does not wait: what is under way is bounded by the questions that are open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, form: "Form") -> None:
        self._reader = reader
        self._writer = writer
        self._form = form
        self.problem: str | None = None
        """What the other end sent that is no message; the channel is closed then."""

    @classmethod
    async def open(cls, end: socket.socket, form: "Form | None" = None) -> Self:
        """Take over a connected socket."""
        return cls(*await asyncio.open_connection(sock=end), form or Form())

    def send(self, message: Any) -> None:
        if self._writer.is_closing():
            raise ChannelClosed
        body = self._form.encode(message)
        self._writer.write(_HEADER.pack(len(body)) + body)

    async def receive(self) -> Any:
        """The next message; ChannelClosed when there will be none."""
        try:
            (size,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            if size > self._form.max_bytes:
                raise self._refuse(f"a message of {size:,} bytes")
            body = await self._reader.readexactly(size)
            try:
                return self._form.decode(body)
            except self._form.garbage as error:
                raise self._refuse(str(error)) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChannelClosed from error

    def _refuse(self, problem: str) -> ChannelClosed:
        self.problem = problem
        self.close()
        return ChannelClosed(problem)

    async def each(self, handle: Callable[[Any], None]) -> None:
        """Hand over every message that comes; ChannelClosed when there will be none."""
        while True:
            handle(await self.receive())

    def close(self) -> None:
        self._writer.close()


class Wire(Protocol):
    """What a `Peer` needs of a channel."""

    def send(self, message: Any) -> None: ...

    async def each(self, handle: Callable[[Any], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """A question with its number."""

    number: int
    body: Any


@dataclass(frozen=True, slots=True)
class Tell:
    """Something that has no answer."""

    body: Any


@dataclass(frozen=True, slots=True)
class Answer:
    """What the question with that number came to: a value, or an error to be raised."""

    number: int
    body: Any
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Whoever asked has been cancelled; the answer is not wanted."""

    number: int


class Peer:
    """Asks over a channel, and answers what the other end asks."""

    def __init__(self, channel: Wire, answer: Callable[[Any], Awaitable[Any]], expected: type[Exception]) -> None:
        self._channel = channel
        self._answer = answer
        self._expected = expected
        """Errors that travel to whoever asked; any other is a bug of this end and ends `serve`."""
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._gone = False
        """Whether the other end has: nothing that is asked from then on will be answered."""

    async def ask(self, body: Any) -> Any:
        """The other end's answer. ChannelClosed if it goes first, or has gone."""
        if self._gone:
            raise ChannelClosed
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            self._channel.send(Ask(number, body))
            return await future
        except asyncio.CancelledError:
            self._withdraw(number)
            raise
        finally:
            del self._asked[number]

    def tell(self, body: Any) -> None:
        """Say something that nobody waits for; ChannelClosed if the other end has gone."""
        self._channel.send(Tell(body))

    def _withdraw(self, number: int) -> None:
        try:
            self._channel.send(Withdraw(number))
        except ChannelClosed:
            return  # then the question has gone with the other end

    async def serve(self) -> None:
        """Answer until the other end goes; then every open question fails with ChannelClosed."""
        try:
            async with asyncio.TaskGroup() as work:
                await self._channel.each(lambda message: self._handle(message, work))
        except* ChannelClosed:
            pass
        finally:
            self._gone = True
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(ChannelClosed())

    def _handle(self, message: Ask | Answer | Tell | Withdraw, work: asyncio.TaskGroup) -> None:
        if isinstance(message, Ask):
            self._answering[message.number] = work.create_task(self._reply(message))
        elif isinstance(message, Tell):
            work.create_task(self._hear(message.body))
        elif isinstance(message, Withdraw):
            if task := self._answering.get(message.number):
                task.cancel()
        else:
            self._settle(message)

    def _settle(self, answer: Answer) -> None:
        future = self._asked.get(answer.number)
        if future is None or future.done():
            return
        if answer.failed:
            future.set_exception(answer.body)
        else:
            future.set_result(answer.body)

    async def _hear(self, body: Any) -> None:
        with suppress(self._expected):  # nobody waits for it
            await self._answer(body)

    async def _reply(self, ask: Ask) -> None:
        try:
            answer = Answer(ask.number, await self._answer(ask.body))
        except self._expected as error:
            answer = Answer(ask.number, error, failed=True)
        finally:
            self._answering.pop(ask.number, None)
        self._channel.send(answer)
