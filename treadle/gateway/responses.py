"""Responses of the gateway: whole, as a stream of events, or as an error, in the words of three API dialects.

Owns the stream with its keep-alives, and which client has had its answer; what an answer says is the dialects'.
Invariant: a stream that has nothing to say yet gives a sign of life every `KEEP_ALIVE_S`; a client that goes away ends
no sampling.

Waits: a stream waits for its turn with an event every `KEEP_ALIVE_S`; a whole response just waits.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from treadle.gateway import anthropic_messages, openai_chat, openai_responses
from treadle.gateway.conversation import Conversation, Exchange
from treadle.gateway.event_stream import Event, EventWriter, PartialStream
from treadle.gateway.http_server import ConnectionLost, HttpConnection, HttpResponse
from treadle.gateway.request import Overloaded, ReplySet, RequestError, TurnRequest
from treadle.gateway.request_body import KnownTools

KEEP_ALIVE_S = 3.0
"""Between two signs of life of a stream that has nothing to say yet."""

RETRY_AFTER_S = 1

_COMMENT, _PING = b": keep-alive\n\n", b'event: ping\ndata: {"type": "ping"}\n\n'


class ApiDialect(Protocol):
    """The functions of a dialect's module."""

    NAME: str

    def parse_request(self, body: Mapping[str, Any], known: KnownTools | None = None) -> TurnRequest: ...

    def format_response(self, answer: ReplySet) -> dict[str, Any]: ...

    def open_events(self) -> EventWriter: ...

    def format_error(self, error: RequestError) -> dict[str, Any]: ...

    def format_error_events(self, error: RequestError) -> Iterator[Event]: ...


DIALECTS: Mapping[str, ApiDialect] = {
    "/v1/chat/completions": openai_chat,
    "/v1/responses": openai_responses,
    "/v1/messages": anthropic_messages,
}


class HttpError(RequestError):
    """An error that HTTP has a status for."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


@dataclass(slots=True)
class OnLost:
    """A connection that breaks after its answer was sent: its client may not have read all of it."""

    conversation: Conversation
    exchange: Exchange

    def __call__(self, is_broken: bool) -> None:
        if is_broken:
            self.conversation.lose(self.exchange)


async def send_whole(dialect: ApiDialect, exchange: Exchange, connection: HttpConnection) -> None:
    answer = await _wait(exchange, connection, None)
    await connection.respond(HttpResponse(200, dialect.format_response(answer)))


def has_answer(exchange: Exchange) -> bool:
    return exchange.task.done() and not exchange.task.cancelled() and exchange.task.exception() is None


async def send_stream(
    dialect: ApiDialect, exchange: Exchange, connection: HttpConnection, request: TurnRequest
) -> None:
    """A stream: what can be shown while it is sampled, else everything when the turn is whole."""
    await connection.start_stream("text/event-stream")
    ping = _PING if dialect is anthropic_messages else _COMMENT
    empty = ReplySet((), request.model, request.include_usage, request.tools, request.namespaces)
    stream = PartialStream(dialect.open_events(), exchange.partials, empty)

    async def send_some() -> None:
        await connection.send(encode_events(stream.events()) or ping)

    try:
        answer = await _wait(exchange, connection, send_some)
        answer = replace(answer, include_usage=request.include_usage)  # one given again may be asked for otherwise
        events = stream.finish(answer)
        if events is None:
            exchange.is_awaited = False  # the same request gets the whole answer
            raise Overloaded("another replica went on with this answer otherwise than it began: send the request again")
    except RequestError as error:
        events = dialect.format_error_events(error)
    await connection.send(encode_events(events), is_last=True)


async def _wait(
    exchange: Exchange, connection: HttpConnection, send_some: Callable[[], Awaitable[None]] | None
) -> ReplySet:
    """The answer, unless the connection is lost first: it goes on being sampled then.

    `send_some` is called when there is more to show, and every `KEEP_ALIVE_S`.
    """
    woken = asyncio.Event()
    connection.on_lost = lambda _: woken.set()
    for turn in exchange.partials if send_some is not None else ():
        turn.on_change = woken.set
    exchange.task.add_done_callback(lambda _: woken.set())
    try:
        while not exchange.task.done():
            if connection.is_lost:  # before there was something to wake
                raise ConnectionLost
            woken.clear()
            if send_some is None:
                await woken.wait()
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await woken.wait()
            if connection.is_lost:
                raise ConnectionLost
            if send_some is not None and not exchange.task.done():
                await send_some()
    finally:
        connection.on_lost = None
        for turn in exchange.partials:
            turn.on_change = None
    if exchange.task.cancelled():
        raise HttpError(503, "over", "the session has ended")
    return exchange.task.result()


def encode_events(events: Iterator[Event]) -> bytes:
    """Events as a stream has them."""
    pieces = []
    for name, data in events:
        written = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        pieces.append(f"event: {name}\ndata: {written}\n\n" if name else f"data: {written}\n\n")
    return "".join(pieces).encode("utf-8", "replace")


def dialect_of(path: str) -> ApiDialect:
    if path.startswith("/v1/messages"):
        return DIALECTS["/v1/messages"]
    return DIALECTS.get(path, DIALECTS["/v1/chat/completions"])


def error_response(dialect: ApiDialect, error: RequestError) -> HttpResponse:
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.kind == "overloaded" else {}
    status = 529 if isinstance(error, Overloaded) and dialect is anthropic_messages else error.status
    if error.kind != "overloaded" and error.status < 500:
        headers["x-should-retry"] = "false"
    return HttpResponse(status, dialect.format_error(error), headers)
