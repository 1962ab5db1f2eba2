"""Gateway server: the routes of three API dialects over HTTP, and the keys of sessions. One for each agent worker.

Owns which session a key opens. What a request means is the dialects', where it goes on is the conversation's, how it is
answered is `responses`.
Invariant: a key opens one session while that is open, and nothing else does; a turn is committed before its last byte
is sent, and where it trains before its first; whatever a client does is a status for it and nothing for others; an
error of our own fails the session, even where its agent goes on as if nothing had happened.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from hmac import compare_digest
from secrets import token_hex
from typing import Any, Protocol, cast

from treadle.aio import describe_error
from treadle.config.rollout import GatewayConfig
from treadle.errors import ConfigError, LoopFailure, Mistake
from treadle.gateway import anthropic_messages, openai_responses
from treadle.gateway.connection_limits import ConnectionShare
from treadle.gateway.conversation import Conversation
from treadle.gateway.http_server import ConnectionLost, HttpConnection, HttpRequest, HttpResponse, HttpServer
from treadle.gateway.request import POLICY_MODEL, RequestError, TurnRequest
from treadle.gateway.request_body import LARGE_BODY_BYTES, KnownTools, parse_body, read_body
from treadle.gateway.responses import (
    DIALECTS,
    ApiDialect,
    HttpError,
    OnLost,
    dialect_of,
    encode_events,
    error_response,
    has_answer,
    send_stream,
    send_whole,
)

SESSION_BODIES = 2
"""How many bodies of the largest size requests of one session may hold together."""


COUNT_TOKENS = "/v1/messages/count_tokens"
NOTES = "/v1/notes"
"""Where a grader reports a reward, and notes, with the session's second key."""

HEALTH_PATHS = ("/", "/health", "/healthz", "/api/hello", "/v1")


@dataclass(eq=False, slots=True)
class GatewaySession:
    """A session that a key opens."""

    conversation: Conversation
    key: str
    notes_key: str
    """The second key, for a reward and notes: whoever runs the agent keeps it from the agent."""
    reward: float | None = None
    notes: dict[str, Any] | None = None
    share: ConnectionShare = field(default_factory=ConnectionShare)


class ShareOwner(Protocol):
    """What `check` returns for a request, and what it counts for."""

    @property
    def share(self) -> ConnectionShare: ...

    @property
    def path(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RequestOwner:
    """Whose request it is."""

    session: GatewaySession
    path: str
    """Without the key, where that was in it."""
    may_note: bool

    @property
    def share(self) -> ConnectionShare:
        return self.session.share


class GatewayServer:
    """The server of one worker. Built by `start`."""

    def __init__(self, gateway: GatewayConfig) -> None:
        self._gateway = gateway
        self._sessions: dict[bytes, tuple[GatewaySession, bool]] = {}
        """By the digest of a key, and whether it is the second one."""
        self._http: HttpServer | None = None
        self.max_body_bytes = gateway.max_body_mb * 1_000_000

    @classmethod
    async def start(cls, gateway: GatewayConfig) -> "GatewayServer":
        """Listen; a ConfigError where the address cannot be had."""
        server = cls(gateway)
        await server.listen()
        return server

    async def listen(self) -> None:
        gateway = self._gateway
        try:
            self._http = await HttpServer.start(self, gateway.host, gateway.port)
        except OSError as error:
            problem = f"cannot listen on {gateway.host}:{gateway.port}: {error.strerror or error}"
            fix = "0 takes a free port; each agent worker needs one of its own"
            raise ConfigError(
                [Mistake("rollout.gateway.port", problem, gateway.port, gateway.origin("port"), fix)]
            ) from error

    @property
    def url(self) -> str:
        """Where agents reach it; without a path."""
        assert self._http is not None
        host = f"[{self._gateway.host}]" if ":" in self._gateway.host else self._gateway.host
        return self._gateway.url.format(host=host, port=self._http.port).rstrip("/")

    @property
    def num_connections(self) -> int:
        return len(self._http.connections) if self._http is not None else 0

    @property
    def max_connections(self) -> int:
        assert self._http is not None
        return self._http.connections.max_connections

    def open(self, conversation: Conversation) -> GatewaySession:
        """Two new keys for a session."""
        session = GatewaySession(conversation, token_hex(16), token_hex(16))
        self._sessions[_digest(session.key)] = session, False
        self._sessions[_digest(session.notes_key)] = session, True
        return session

    def close_session(self, session: GatewaySession) -> None:
        """Its keys open nothing any more."""
        for key in (session.key, session.notes_key):
            self._sessions.pop(_digest(key), None)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    # --- what the HTTP server calls

    def check(self, request: HttpRequest) -> object:
        """The owner of a request by its key; a refusal without one."""
        path = request.target.split("?", 1)[0]
        key, path = read_key(path, request.headers)
        if path in HEALTH_PATHS and request.method in ("GET", "HEAD"):
            return None
        found = self._sessions.get(_digest(key)) if key else None
        if found is None or not compare_digest(found[0].notes_key if found[1] else found[0].key, key):
            error = HttpError(401, "unauthorized", "no open session has this key")
            return error_response(dialect_of(path), error)
        session, may_note = found
        return self.admit(session.share, path) or RequestOwner(session, path, may_note)

    def admit(self, share: ConnectionShare, path: str) -> HttpResponse | None:
        """Count a request of a session, from its head on; a refusal where the session has too many."""
        assert self._http is not None
        most = self._http.connections.max_session_connections
        if share.num_connections >= most:
            error = HttpError(429, "overloaded", f"a session may have {most} requests at once")
            return error_response(dialect_of(path), error)
        share.num_connections += 1
        return None

    def take_bytes(self, owner: object, count: int) -> HttpResponse | None:
        """Bodies of one session together are bounded: many half-sent ones would be all memory."""
        share = cast(ShareOwner, owner).share
        share.num_bytes += count
        most = SESSION_BODIES * self.max_body_bytes
        if share.num_bytes <= most:
            return None
        error = HttpError(429, "overloaded", f"a session may have {most} bytes of requests on the way at once")
        return error_response(dialect_of(cast(ShareOwner, owner).path), error)

    def refuse_body(self, most: int) -> HttpResponse:
        if most < self.max_body_bytes:
            why = f"a request without a key may have {most} bytes"
        else:
            why = f"the body is larger than {most} bytes: raise rollout.gateway.max_body_mb"
        return HttpResponse(413, {"type": "error", "error": {"type": "request_too_large", "message": why}})

    def release(self, owner: object, num_bytes: int) -> None:
        share = cast(ShareOwner, owner).share
        share.num_connections -= 1
        share.num_bytes -= num_bytes

    async def handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        """Answer a request."""
        owner = request.owner
        if not isinstance(owner, RequestOwner):
            await connection.respond(HttpResponse(200, {"status": "ok"}))
            return
        dialect = dialect_of(owner.path)
        try:
            await self._route(request, owner, connection)
        except RecursionError:
            await connection.respond(error_response(dialect, RequestError("the body is nested too deeply")))
        except RequestError as error:
            if error.option:
                owner.session.conversation.counters.add_refused(error.option)
            await connection.respond(error_response(dialect, error))
        except ConnectionLost:
            raise
        except Exception as error:
            problem = f"the gateway broke on a request to {owner.path[:200]}: {describe_error(error)}"
            owner.session.conversation.fail(LoopFailure(problem))
            raise

    async def _route(self, request: HttpRequest, owner: RequestOwner, connection: HttpConnection) -> None:
        path, dialect = owner.path, DIALECTS.get(owner.path)
        if owner.may_note:
            if path != NOTES or request.method != "POST":
                raise HttpError(403, "unauthorized", f"this key is for {NOTES} alone")
            _take_notes(owner.session, await read_body(request.body))
            await connection.respond(HttpResponse(200, {}))
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            await connection.respond(_models(path, request.method))
        elif dialect is None and path != COUNT_TOKENS:
            raise HttpError(404, "not_found", f"there is no {path[:200]}")
        elif request.method != "POST":
            raise HttpError(405, "invalid_request", f"{path} takes POST")
        elif dialect is None:
            conversation = owner.session.conversation
            count = await conversation.count_tokens(
                await _parse(anthropic_messages, request.body, conversation.known_tools)
            )
            await connection.respond(HttpResponse(200, {"input_tokens": count}))
        else:
            await self._turn(request, owner.session, dialect, connection)

    async def _turn(
        self, request: HttpRequest, session: GatewaySession, dialect: ApiDialect, connection: HttpConnection
    ) -> None:
        """One turn, or several side by side: whole, or as a stream."""
        conversation = session.conversation
        parsed = await _parse(dialect, request.body, conversation.known_tools)
        parsed = replace(parsed, agent_id=request.headers.get("x-claude-code-agent-id", ""))
        try:
            rendered = await conversation.render(parsed) if len(request.body) > LARGE_BODY_BYTES else None
            if connection.is_lost:  # while it was read and rendered: nothing is sampled for it
                raise ConnectionLost
            exchange = conversation.ask(parsed, rendered)
        except RequestError as error:
            if not (parsed.stream and dialect is openai_responses and error.kind == "context"):
                raise
            await connection.start_stream("text/event-stream")  # this is where its programs look for it
            await connection.send(encode_events(dialect.format_error_events(error)), is_last=True)
            return
        try:
            if parsed.stream:
                await send_stream(dialect, exchange, connection, parsed)
            else:
                await send_whole(dialect, exchange, connection)
        except (ConnectionLost, asyncio.CancelledError):
            conversation.lose(exchange)
            raise
        if exchange.is_awaited and has_answer(exchange):
            conversation.deliver(exchange)
            connection.on_lost = OnLost(conversation, exchange)


def _digest(key: str) -> bytes:
    """Keys are looked up by digest: how long that takes says nothing about a key."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_key(path: str, headers: Mapping[str, str]) -> tuple[str, str]:
    """The key of a request, from its path or its headers, and the path without it."""
    if path.startswith("/s/"):
        key, _, rest = path[3:].partition("/")
        return key, f"/{rest}"
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return headers.get("x-api-key", "").strip() or bearer, path


async def _parse(dialect: ApiDialect, body: bytes, known: KnownTools) -> TurnRequest:
    return await parse_body(body, lambda value: dialect.parse_request(value, known), known)


def _take_notes(session: GatewaySession, body: Mapping[str, Any]) -> None:
    """Keep a reward and notes. The first reward counts: a later one is from a retry, or from what took the key."""
    reward, notes = body.get("reward"), body.get("notes")
    if notes is not None and not isinstance(notes, dict):
        raise RequestError("notes must be an object")
    if reward is not None:
        if isinstance(reward, bool) or not isinstance(reward, int | float) or reward != reward or abs(reward) > 1e300:
            raise RequestError("reward must be a finite number")
        if session.reward is not None:
            raise HttpError(409, "conflict", f"the session has the reward {session.reward:g} already: the first counts")
        session.reward = float(reward)
    if notes is not None:
        session.notes = {**(session.notes or {}), **notes}


def _models(path: str, method: str) -> HttpResponse:
    if method not in ("GET", "HEAD"):
        raise HttpError(405, "invalid_request", f"{path[:200]} takes GET")
    model = {"id": POLICY_MODEL, "object": "model", "created": 0, "owned_by": "treadle"}
    model |= {"type": "model", "display_name": POLICY_MODEL, "created_at": "1970-01-01T00:00:00Z"}
    if path == "/v1/models":
        listed = {"object": "list", "data": [model], "has_more": False}
        return HttpResponse(200, {**listed, "first_id": POLICY_MODEL, "last_id": POLICY_MODEL})
    return HttpResponse(200, {**model, "id": path.removeprefix("/v1/models/")[:200]})
