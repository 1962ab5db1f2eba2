"""RPC between two processes: requests with numbered replies, notifications, cancellations, and errors that travel.

Owns which request a reply belongs to, and the form of errors: kind, message and place, rebuilt at the other end as one
of `treadle.errors`. Knows no process; what carries messages is a `Channel`.
Waits: a request waits for its reply, its deadline, or the end of the other end; `serve` waits for messages until then.
Invariant: every request gets one reply, a cancelled one too. A reply to nothing that was asked, or a second one, closes
the channel.
"""

import asyncio
import itertools
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any, Protocol

from treadle import errors
from treadle.errors import ConfigError, DeadlineError, Mistake, RunError, TreadleError
from treadle.process.channel import BlockingChannel, ChannelClosed, pickle_by_fields

Handler = Callable[[Any], Awaitable[Any]]
"""Answers what the other end asks."""

CANCELLED = "Cancelled"
"""The kind of error that answers a cancelled request."""


@dataclass(frozen=True, slots=True)
class RpcError:
    """An error on its way to another process."""

    kind: str
    """A class of `treadle.errors`."""
    message: str
    where: str = ""
    """The process it was raised in."""
    mistakes: tuple[tuple[str, ...], ...] = ()
    """Of a ConfigError: the fields of each, as texts; empty for what is not there."""

    @classmethod
    def of(cls, error: BaseException, where: str = "") -> "RpcError":
        """An error as it travels; one that is not treadle's own becomes a RunError with its class in the message."""
        for kind in type(error).__mro__:
            if kind.__name__ in _CARRIED:
                mistakes = _mistakes(error) if isinstance(error, ConfigError) else ()
                return cls(kind.__name__, str(error), where, mistakes)
        return cls(RunError.__name__, f"{type(error).__name__}: {error}", where)

    def rebuild(self) -> TreadleError:
        """The error to raise at this end; ValueError or TypeError for the fields of none."""
        if self.kind == ConfigError.__name__ and self.mistakes:
            return ConfigError(
                Mistake(key, problem, value, origin or None, fix or None, missing, int(count))
                for key, problem, value, origin, fix, missing, count in self.mistakes
            )
        error = _CARRIED.get(self.kind, RunError)(self.message)
        if self.where:
            error.add_note(f"raised in {self.where}")
        return error


ODD_ERROR = "an error with fields of none"


def _rebuilt(error: RpcError) -> TreadleError | None:
    """The error to raise at this end; None for what no process of ours sends."""
    try:
        return error.rebuild()
    except (TypeError, ValueError):
        return None


def _mistakes(error: ConfigError) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (item.key, item.problem, str(item.value), str(item.origin or ""), item.fix or "", item.missing, str(item.count))
        for item in error.mistakes
    )


_CARRIED: Mapping[str, type[TreadleError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, TreadleError)
}


@dataclass(frozen=True, slots=True)
class RpcRequest:
    """Something to be answered, under a number."""

    number: int
    body: Any


@dataclass(frozen=True, slots=True)
class RpcNotify:
    """Something that is not answered."""

    body: Any


@dataclass(frozen=True, slots=True)
class RpcCancel:
    """The request with that number was cancelled where it was made."""

    number: int


@dataclass(frozen=True, slots=True)
class RpcReply:
    """What the request with that number came to: a value, or an error."""

    number: int
    body: Any = None
    error: RpcError | None = None


pickle_by_fields(RpcRequest, RpcNotify, RpcCancel, RpcReply)

Message = RpcRequest | RpcNotify | RpcCancel | RpcReply


class MessageChannel(Protocol):
    """What an `RpcPeer` needs of a channel."""

    def send(self, message: Any) -> None: ...

    def flush(self) -> None: ...

    def refuse(self, problem: str) -> None: ...

    async def each(self, handle: Callable[[Any], None]) -> None: ...


def unguessable_numbers() -> Iterator[int]:
    """Numbers of requests to a process that may forge replies."""
    return iter(lambda: secrets.randbits(62), None)


class RpcPeer:
    """Makes requests over a channel, and handles those of the other end."""

    def __init__(
        self,
        channel: MessageChannel,
        handle: Handler,
        expected: type[Exception] = TreadleError,
        *,
        name: str = "the other process",
        where: str = "",
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._channel = channel
        self._handle_request = handle
        self._expected = expected
        """Errors that travel back to the request; any other is a bug of this end and ends `serve`."""
        self._name, self._where = name, where
        self._numbers = numbers or itertools.count()
        self._requested: dict[int, asyncio.Future[Any]] = {}
        self._cancelled: set[int] = set()
        """Numbers whose reply is still to come, and is dropped."""
        self._handling: dict[int, asyncio.Task[None]] = {}
        self._gone = False
        """Whether the other end has: no request is answered from then on."""

    async def request(self, body: Any, timeout_s: float | None = None) -> Any:
        """The other end's reply. ChannelClosed if it goes first, or has gone; DeadlineError if it is late."""
        if timeout_s is None:
            return await self._request(body)
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                return await self._request(body)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineError(f"{self._name} did not answer within {timeout_s:g} s") from None

    async def _request(self, body: Any) -> Any:
        if self._gone:
            raise ChannelClosed
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requested[number] = future
        try:
            self._channel.send(RpcRequest(number, body))
            return await future
        except asyncio.CancelledError:
            if not future.done() or future.cancelled():
                self._cancelled.add(number)
                with suppress(ChannelClosed):  # then the request has gone with the other end
                    self._channel.send(RpcCancel(number))
            raise
        finally:
            del self._requested[number]

    def notify(self, body: Any, *, at_once: bool = False) -> None:
        """Send what is not answered; ChannelClosed if the other end has gone. `at_once`: before this turn is over."""
        self._channel.send(RpcNotify(body))
        if at_once:
            self._channel.flush()

    async def serve(self) -> None:
        """Handle messages until the other end goes; then every open request fails with ChannelClosed."""
        try:
            async with asyncio.TaskGroup() as work:
                await self._channel.each(lambda message: self._handle(message, work))
        except* ChannelClosed:
            pass
        finally:
            self._gone = True
            for future in self._requested.values():
                if not future.done():
                    future.set_exception(ChannelClosed())

    def _handle(self, message: Message, work: asyncio.TaskGroup) -> None:
        if isinstance(message, RpcRequest):
            self._handling[message.number] = work.create_task(self._reply(message))
        elif isinstance(message, RpcReply):
            self._settle(message)
        elif isinstance(message, RpcNotify):
            work.create_task(self._handle_notify(message.body))
        elif task := self._handling.get(message.number):
            task.cancel()

    def _settle(self, reply: RpcReply) -> None:
        future = self._requested.get(reply.number)
        if future is None or future.done():
            if reply.number not in self._cancelled:
                return self._channel.refuse(f"a reply to request {reply.number}, which is not open")
            self._cancelled.discard(reply.number)
        elif reply.error is None:
            future.set_result(reply.body)
        elif (error := _rebuilt(reply.error)) is not None:
            future.set_exception(error)
        else:
            self._channel.refuse(ODD_ERROR)

    async def _handle_notify(self, body: Any) -> None:
        with suppress(self._expected):  # there is no request to fail
            await self._handle_request(body)

    async def _reply(self, request: RpcRequest) -> None:
        try:
            reply = RpcReply(request.number, await self._handle_request(request.body))
        except self._expected as error:
            reply = RpcReply(request.number, error=RpcError.of(error, self._where))
        except asyncio.CancelledError:
            if not self._gone:
                with suppress(ChannelClosed):
                    self._channel.send(RpcReply(request.number, error=RpcError(CANCELLED, "")))
            raise
        finally:
            self._handling.pop(request.number, None)
        self._channel.send(reply)


class ThreadPeer:
    """Makes requests over a blocking channel from any thread; a thread of its own reads the replies, in any order."""

    def __init__(self, channel: BlockingChannel, name: str) -> None:
        self.gone: Future[None] = Future()
        """Done when the other end has gone, or was refused (`problem`)."""
        self._channel = channel
        self._numbers = itertools.count()
        self._requested: dict[int, Future[Any]] = {}
        self._lock, self._sending = Lock(), Lock()
        self._reader = Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    @property
    def problem(self) -> str | None:
        """What the other end sent that is no reply."""
        return self._channel.problem

    def submit(self, body: Any) -> "Future[Any]":
        """A future for the reply; it fails with ChannelClosed where the other end goes first, or has gone."""
        future: Future[Any] = Future()
        with self._lock:
            if self.gone.done():
                future.set_exception(ChannelClosed())
                return future
            number = next(self._numbers)
            self._requested[number] = future
        with self._sending, suppress(ChannelClosed):  # the reader sees the same end, and fails the future
            self._channel.send(RpcRequest(number, body))
        return future

    def notify(self, body: Any) -> None:
        """Send what is not answered, where the other end still reads."""
        with self._sending, suppress(ChannelClosed):
            self._channel.send(RpcNotify(body))

    def close_sending(self) -> None:
        """Send nothing any more: the other end sees the end of the channel, and can still reply."""
        with suppress(OSError):
            self._channel.end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the channel and end the reader."""
        with suppress(OSError):
            self._channel.end.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._channel.close()

    def _read(self) -> None:
        with suppress(ChannelClosed):
            while self._settle(self._channel.receive()):
                continue
        with self._lock:
            self.gone.set_result(None)
            left: Sequence[Future[Any]] = list(self._requested.values())
        for future in left:
            future.set_exception(ChannelClosed())

    def _settle(self, reply: Any) -> bool:
        with self._lock:
            future = self._requested.pop(reply.number, None) if isinstance(reply, RpcReply) else None
        if future is None:
            self._channel.problem = "a reply to nothing that was asked"
            return False
        if reply.error is None:
            future.set_result(reply.body)
        elif (error := _rebuilt(reply.error)) is not None:
            future.set_exception(error)
        else:
            future.set_exception(ChannelClosed())
            self._channel.problem = ODD_ERROR
            return False
        return True
