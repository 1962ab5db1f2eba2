"""HTTP/1.1 server on asyncio, for clients that may be hostile: bounded bodies, deadlines, bounded connections.

Owns connections, framing (h11) and flow control; knows no route. A handler is called twice for a request: `check` sees
the head before the body is read, and may refuse it; `handle` has the body and answers through its `HttpConnection`.
Invariant: a request gets one response or a closed connection; an error of a handler is a 500 and a line in the log;
a connection that sends nothing useful holds its place for `HEAD_TIMEOUT_S` at most, and gives it up to a new one; what
`check` has admitted is released exactly once, when its request or its connection ends.

Waits: `send` waits until the system has taken what was written, and at most `WRITE_TIMEOUT_S`.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import h11

from treadle.gateway.connection_limits import ConnectionTable, Idleness, connections_within, raise_file_limit

log = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 10.0
"""From the first byte of a request, or the start of a connection, to the end of its head."""

BODY_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 120.0
"""Between two requests of one connection."""

WRITE_TIMEOUT_S = 60.0
LINGER_S = 2.0
"""How long a client may go on sending after it was refused."""

MAX_HEAD_BYTES = 32_768
MAX_PIPELINED_BYTES = 262_144
"""What a client may send ahead, while its request is being answered."""

Headers = tuple[tuple[bytes, bytes], ...]


class ConnectionLost(Exception):
    """The client has gone, or takes nothing."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The head of a request; a body that is not there yet is empty."""

    method: str
    target: str
    headers: Mapping[str, str]
    """By name in lower case; of a name given twice, the last."""
    body: bytes = b""
    owner: object = None
    """Who it belongs to, as `check` found; counts among the requests of that owner from its head on."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A whole response with a JSON body."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpHandler(Protocol):
    """What a server does with requests."""

    max_body_bytes: int

    def check(self, request: HttpRequest) -> "HttpResponse | object":
        """A refusal, or the owner of the request: `release` follows for each that is not None."""
        ...

    def take_bytes(self, owner: object, count: int) -> "HttpResponse | None":
        """Some of a body has come; a refusal where its owner holds too much."""
        ...

    def refuse_body(self, most: int) -> "HttpResponse":
        """The refusal of a body that is larger than `most` bytes, in the handler's own words."""
        ...

    def release(self, owner: object, num_bytes: int) -> None:
        """A request is over, or its connection; `num_bytes` of its body were taken."""
        ...

    async def handle(self, request: HttpRequest, connection: "HttpConnection") -> None:
        """Answer a request through its connection."""
        ...


class HttpServer:
    """A listening socket and its connections. Built by `start`; `close` ends all of them."""

    def __init__(self, handler: HttpHandler, max_connections: int) -> None:
        self.handler = handler
        self.connections: ConnectionTable[HttpConnection] = ConnectionTable(max_connections)
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(cls, handler: HttpHandler, host: str, port: int) -> "HttpServer":
        """Listen; OSError where the address is taken or is not ours."""
        files = raise_file_limit()
        server = cls(handler, connections_within(files))
        loop = asyncio.get_running_loop()
        # asyncio accepts as many as its backlog at once, before any of them can give way: few, so that files are left
        backlog = max(8, min(128, files // 16))
        server._server = await loop.create_server(lambda: HttpConnection(server), host, port, backlog=backlog)
        return server

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        connections = list(self.connections)
        for connection in connections:
            connection.drop()
        tasks = [connection.task for connection in connections if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=HEAD_TIMEOUT_S)


class HttpConnection(asyncio.Protocol):
    """One connection: requests one after the other."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._head: h11.Request | None = None
        self._has_begun = False
        """Something of the next request has come."""
        self._request: HttpRequest | None = None
        self._owner: object = None
        self._body: list[bytes] = []
        self._num_bytes = 0
        self._num_ahead = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.task: asyncio.Task[None] | None = None
        self._is_refused = False
        self.is_lost = False
        self.on_lost: Callable[[bool], None] | None = None
        """Called once, when the connection is lost, and whether what was sent last may not have been read."""

    # --- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # other event loops have classes of their own
        self._transport.set_write_buffer_limits(high=0)
        self._set_timer(HEAD_TIMEOUT_S)
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._stop_timer()
        self._writable.set()
        self._server.connections.remove(self)
        self._release()
        if self.on_lost is not None:
            self.on_lost(error is not None)
            self.on_lost = None

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self.task is not None and not self.task.done():
            self._num_ahead += len(data)
            if self._num_ahead > MAX_PIPELINED_BYTES:
                self.drop()
                return
        else:
            self._begin_head()
        try:
            self._http.receive_data(data)
            self._advance()
        except h11.RemoteProtocolError as error:
            self._refuse(HttpResponse(error.error_status_hint or 400, {"error": {"message": f"bad HTTP: {error}"}}))

    # --- reading

    def _advance(self) -> None:
        """Take what has arrived: the head, the body, and the end of a request, which starts its task."""
        while self.task is None and not self.is_lost and not self._is_refused:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue and self._head is not None:
                    self._write(h11.InformationalResponse(status_code=100, headers=[]))
                return
            if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return
            if isinstance(event, h11.Request):
                self._begin(event)
            elif isinstance(event, h11.Data):
                self._take(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                self._run()

    def _begin_head(self) -> None:
        """The time of a head begins with its first byte; no later one gives it more."""
        if self._head is None and not self._has_begun:
            self._has_begun = True
            self._set_timer(HEAD_TIMEOUT_S)

    def _begin(self, head: h11.Request) -> None:
        headers = {bytes(name).decode("latin-1"): bytes(value).decode("latin-1") for name, value in head.headers}
        target = bytes(head.target).decode("latin-1")
        self._head = head
        self._request = HttpRequest(bytes(head.method).decode("ascii"), target, headers)
        found = self._server.handler.check(self._request)
        if isinstance(found, HttpResponse):
            self._refuse(found)
            return
        if found is not None:
            self._owner = found
            self._server.connections.set_busy(self)
            self._request = HttpRequest(self._request.method, target, headers, owner=found)
        length = headers.get("content-length", "0")
        most = MAX_HEAD_BYTES if found is None else self._server.handler.max_body_bytes
        if length.isdigit() and int(length[:20]) > most:
            self._refuse_body()
            return
        self._set_timer(BODY_TIMEOUT_S)

    def _take(self, data: bytes) -> None:
        """A piece of the body."""
        self._num_bytes += len(data)
        refusal = None if self._owner is None else self._server.handler.take_bytes(self._owner, len(data))
        most = MAX_HEAD_BYTES if self._owner is None else self._server.handler.max_body_bytes
        if self._num_bytes > most:
            self._refuse_body()
        elif refusal is not None:
            self._refuse(refusal)
        else:
            self._body.append(data)

    def _release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            self._server.handler.release(owner, self._num_bytes)

    def _refuse_body(self) -> None:
        most = MAX_HEAD_BYTES if self._owner is None else self._server.handler.max_body_bytes
        self._refuse(self._server.handler.refuse_body(most))

    def _refuse(self, response: HttpResponse) -> None:
        """Answer before the request was read whole, and close; what still comes is not read, for a little while."""
        self._is_refused = True
        self._release()
        self._server.connections.set_idle(self, Idleness.REFUSED)
        with suppress(h11.LocalProtocolError, ConnectionLost, OSError, RuntimeError):
            if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self._write_whole(response, close=True)
            if self._transport is not None:
                self._transport.write_eof()  # to close at once would reset it, and the answer might never be read
        self._body.clear()
        self._set_timer(LINGER_S)

    def _run(self) -> None:
        assert self._request is not None
        self._stop_timer()
        self.on_lost = None  # a client that asks again has read its last answer
        request = self._request
        body = HttpRequest(request.method, request.target, request.headers, b"".join(self._body), request.owner)
        self._body.clear()
        self.task = asyncio.get_running_loop().create_task(self._answer(body))

    async def _answer(self, request: HttpRequest) -> None:
        try:
            await self._server.handler.handle(request, self)
        except ConnectionLost:
            self.drop()
        except asyncio.CancelledError:
            self.drop()
            raise
        except Exception:
            log.exception("a request to the gateway broke")
            with suppress(ConnectionLost, h11.LocalProtocolError):
                await self.respond(
                    HttpResponse(500, {"error": {"message": "the gateway broke", "type": "server_error"}})
                )
            self.drop()
        self._next()

    def _next(self) -> None:
        """Get ready for the next request of this connection, or close it."""
        self._release()
        self.task, self._head, self._request, self._num_bytes, self._num_ahead = None, None, None, 0, 0
        self._has_begun = False
        if self.is_lost or self._transport is None:
            return
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            self._transport.close()
            return
        self._http.start_next_cycle()
        self._server.connections.set_idle(self, Idleness.WAITING)
        self._set_timer(IDLE_TIMEOUT_S)
        if self._http.trailing_data[0]:
            self._begin_head()
        try:
            self._advance()
        except h11.RemoteProtocolError:
            self._transport.close()

    # --- writing

    async def respond(self, response: HttpResponse) -> None:
        """Send a whole response; returns when the system has taken all of it."""
        self._write_whole(response)
        await self._drain()

    async def start_stream(self, content_type: str) -> None:
        """Send the head of a response whose body follows in pieces."""
        headers = [("content-type", content_type), ("cache-control", "no-cache"), ("x-accel-buffering", "no")]
        self._write(h11.Response(status_code=200, headers=[*headers, ("transfer-encoding", "chunked")]))
        await self._drain()

    async def send(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a piece of the body; the last one together with its end, so that no client can read one alone."""
        self._write(h11.Data(data=data), *([h11.EndOfMessage()] if is_last else []))
        await self._drain()

    def drop(self) -> None:
        """Close at once."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()
        self._stop_timer()

    def _write_whole(self, response: HttpResponse, *, close: bool = False) -> None:
        body = (
            b"" if response.body is None else json.dumps(response.body, ensure_ascii=False).encode("utf-8", "replace")
        )
        headers = [(name, value) for name, value in response.headers.items()]
        headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
        if close:
            headers.append(("connection", "close"))
        is_head = self._head is not None and self._head.method == b"HEAD"
        data = [h11.Data(data=body)] if body and not is_head else []
        self._write(h11.Response(status_code=response.status, headers=headers), *data, h11.EndOfMessage())

    def _write(self, *events: h11.Event) -> None:
        """Write events at once: in one segment where they fit one."""
        if self.is_lost or self._transport is None or self._transport.is_closing():
            raise ConnectionLost
        data = b"".join(self._http.send(event) or b"" for event in events)
        if data:
            self._transport.write(data)

    async def _drain(self) -> None:
        if not self._writable.is_set():
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await self._writable.wait()
            except TimeoutError:
                raise ConnectionLost from None
        if self.is_lost:
            raise ConnectionLost

    # --- deadlines

    def _set_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self._is_refused or (
            self._head is None and self._num_bytes == 0 and self._http.trailing_data == (b"", False)
        ):
            self.drop()
        else:
            self._refuse(HttpResponse(408, {"error": {"message": "the request took too long to arrive"}}))
