"""Model server: `treadle serve`, the gateway's APIs over any engine, for clients of one key.

    without a journal    every request is a session of its own: nothing is kept
    with a journal       requests to `/s/NAME/v1` are one session by that name (`default` without it), with its tree of
                         conversations; it is recorded whenever its agent pauses, and when it ends: by `DELETE /s/NAME`,
                         at a limit, or with the server

Owns the engines it starts, and the sessions. Trains nothing. A second key gives rewards and notes; the first, which
agents have, cannot. Invariant: a kill loses at most what happened in the last `PAUSE_S` and `SWEEP_S`.
Waits: until it is cancelled; then sessions end, and are written before it returns.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from hmac import compare_digest
from typing import Any

from treadle.aio import first_error
from treadle.config import Config
from treadle.data.renderer import Renderer
from treadle.engine.router import Router
from treadle.gateway.completions_server import COMPLETIONS, answer_completions
from treadle.gateway.connection_limits import ConnectionShare
from treadle.gateway.conversation import Conversation
from treadle.gateway.http_server import HttpConnection, HttpRequest, HttpResponse
from treadle.gateway.responses import HttpError, dialect_of, error_response
from treadle.gateway.server import HEALTH_PATHS, GatewayServer, GatewaySession, RequestOwner, read_key
from treadle.journal import Journal, JournalReader
from treadle.rollout.engines import start_engines
from treadle.rollout.parsers import parser
from treadle.rollout.protocol import Services
from treadle.rollout.session import Session
from treadle.rollout.trajectory_builder import SessionRecord
from treadle.types import Outcome, SamplingParams, Score, StopReason, Task, Timing, Trajectory

SWEEP_S = 1.0
"""How often sessions are looked through for those that have ended."""

PAUSE_S = 1.0
"""After so long without a request a session is written as it stands; what it does later replaces that."""

MAX_NAME_CHARS = 100


@dataclass(eq=False, slots=True)
class ServedSession:
    """A session by name, and when it began."""

    opened: GatewaySession
    session: Session
    task: Task
    sample: int = 0
    started_at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    changed: float | None = None
    """When something happened in it that is not written yet."""


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What opens a server: the key that agents are given, and the one for rewards and notes, which they are not."""

    agents: str
    notes: str


@dataclass(frozen=True, slots=True)
class NamedRequest:
    """A request to a session by name, which need not be open yet."""

    name: str
    path: str
    share: ConnectionShare
    may_note: bool = False
    """It has the second key."""


class ModelServer(GatewayServer):
    """A gateway with one key for all agents, and one for their grader."""

    def __init__(
        self, config: Config, services: Services, router: Router, keys: ServerKeys, journal: Journal | None
    ) -> None:
        super().__init__(config.rollout.gateway)
        self._rollout = config.rollout
        self._services = services
        self._router = router
        self._keys = keys
        self._journal = journal
        self._named: dict[str, ServedSession] = {}
        self._shares: dict[str, ConnectionShare] = {}
        """Of sessions that requests are on the way to, by name."""
        self._samples = _next_samples(journal)
        rollout = config.rollout
        self._sampling = SamplingParams(
            max_tokens=rollout.response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            repetition_penalty=rollout.repetition_penalty,
            presence_penalty=rollout.presence_penalty,
            frequency_penalty=rollout.frequency_penalty,
            stop=rollout.stop,
            stop_token_ids=() if rollout.ignore_eos else services.renderer.stop_token_ids,
            seed=rollout.seed,
        )

    def check(self, request: HttpRequest) -> object:
        """The session of a request; a refusal without the key."""
        path = request.target.split("?", 1)[0]
        name, path = read_key(path, {}) if path.startswith("/s/") else ("default", path)
        if path in HEALTH_PATHS and request.method in ("GET", "HEAD"):
            return None
        key, _ = read_key("", request.headers)
        may_note = self._journal is not None and _is_same(key, self._keys.notes)
        if not may_note and not _is_same(key, self._keys.agents):
            return error_response(dialect_of(path), HttpError(401, "unauthorized", "this is not the server's key"))
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            return error_response(dialect_of(path), HttpError(404, "not_found", "a session needs a short name"))
        if self._journal is None:
            return NamedRequest(name, path, ConnectionShare(num_connections=1))  # every request is a session of its own
        share = self._shares.setdefault(name, ConnectionShare())
        return self.admit(share, path) or NamedRequest(name, path, share, may_note)

    def release(self, owner: object, num_bytes: int) -> None:
        super().release(owner, num_bytes)
        if isinstance(owner, NamedRequest) and not owner.share.num_connections:
            self._shares.pop(owner.name, None)

    async def handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        """Answer a request, in a session that is open from here on: what never came whole has none."""
        asked = request.owner
        if not isinstance(asked, NamedRequest):
            await super().handle(request, connection)
            return
        is_end = request.method == "DELETE" and asked.path == "/" and self._journal is not None
        if (is_end or asked.may_note) and asked.name not in self._named:
            error = HttpError(404, "not_found", f"no session {asked.name!r} is open")
            await connection.respond(error_response(dialect_of(asked.path), error))
            return
        served = self._open_session(asked.name)
        if is_end:
            await self._end_session(served)
            await connection.respond(HttpResponse(200, {}))
            return
        owner = RequestOwner(served.opened, asked.path, asked.may_note)
        try:
            if asked.path == COMPLETIONS and request.method == "POST" and not asked.may_note:
                await answer_completions(request.body, served.opened.conversation, served.session, connection)
            else:
                await super().handle(replace(request, owner=owner), connection)
        finally:
            served.changed = time.monotonic()
            if self._journal is None:
                await self._end_session(served)

    def _open_sessions(self) -> list[ServedSession]:
        return list(self._named.values())

    def _open_session(self, name: str) -> ServedSession:
        """The session of this name; a new one where there is none, or it has ended, or nothing is kept."""
        found = self._named.get(name) if self._journal is not None else None
        if found is not None:
            return found
        sample = self._samples[name]
        self._samples[name] += 1
        task = Task(name, ({"role": "user", "content": f"session {name}"},))
        rollout = self._rollout
        session = Session(task, sample, self._services, _NO_TOOLS, (), self._sampling, ())
        conversation = Conversation(
            session,
            train="all",
            max_turns=rollout.multi_turn.max_assistant_turns,
            retries=rollout.failures.request_retries,
            streams_tokens=True,
        )
        served = ServedSession(GatewaySession(conversation, "", ""), session, task, sample)
        self._named[name if self._journal is not None else f"{name}/{sample}"] = served
        return served

    async def sweep(self) -> None:
        """End sessions at their limits, and write those that pause, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for served in self._open_sessions() if self._journal is not None else ():
                conversation = served.opened.conversation
                if conversation.over.is_set() or served.began < now - self._rollout.limits.session_timeout_s:
                    await self._end_session(served)
                elif served.changed is not None and served.changed < now - PAUSE_S and not conversation.is_sampling:
                    served.changed = None
                    served.session.extra["gateway"] = conversation.counters.as_extra()
                    self._write(served)

    async def end_sessions(self) -> None:
        """End every session; those that were asked something are in the journal then."""
        for served in self._open_sessions():
            await self._end_session(served)

    async def _end_session(self, served: ServedSession) -> None:
        self._named = {name: other for name, other in self._named.items() if other is not served}
        await served.opened.conversation.close()
        self._router.forget(f"{served.task.uid}/{served.sample}")
        self._write(served)

    def _write(self, served: ServedSession) -> None:
        """Record a session as it stands, in the place of what was recorded of it; one without a turn is none."""
        record, opened = SessionRecord(served.session), served.opened
        if self._journal is None or not record.state.assistant_turns:
            return
        if opened.notes:
            served.session.extra["notes"] = opened.notes
        total_s, state = time.monotonic() - served.began, record.state
        self._journal.add_task(served.task)
        self._journal.add(
            Trajectory(
                uid=served.task.uid,
                sample=served.sample,
                rows=record.rows(),
                outcome=Outcome.ended(served.session.ended or StopReason.STOP),
                reward=None if opened.reward is None else Score(opened.reward),
                messages=record.messages,
                timing=Timing(served.started_at, total_s, state.generate_s),
                extra=record.extra(),
            )
        )


def _is_same(given: str, key: str) -> bool:
    return compare_digest(given.encode("utf-8", "replace"), key.encode())


def _next_samples(journal: Journal | None) -> Counter[str]:
    """The number of the next session of each name: those of earlier servers are in the same journal."""
    numbers: Counter[str] = Counter()
    if journal is not None:
        with JournalReader.open(journal.run_dir) as reader:
            for headline in reader.headlines():
                numbers[headline.uid] = max(numbers[headline.uid], headline.sample + 1)
    return numbers


class _NoTools:
    """Agents call their tools themselves."""

    async def call_many(self, calls: object, max_parallel: int) -> tuple[()]:
        raise AssertionError("a served session calls no tools")

    def add_schemas(self, schemas: object) -> None:
        raise AssertionError("a served session has no environment")

    def check_added(self, call: object) -> None:
        return None


_NO_TOOLS = _NoTools()


async def serve_model(
    config: Config,
    keys: ServerKeys,
    journal: Journal | None,
    on_ready: Callable[[str], None],
    api_key: str | None = None,
) -> None:
    """Start engines and server, call `on_ready` with the address, and serve until cancelled."""
    rollout, model = config.rollout, config.model
    async with AsyncExitStack() as started:
        renderer = await asyncio.to_thread(Renderer.create, model)
        replicas = await start_engines(rollout, model, renderer, api_key)
        rng = random.Random(rollout.seed)
        router = Router(replicas.engines, limits=rollout.limits, failures=rollout.failures, rng=rng)
        started.push_async_callback(router.close)
        services = Services(rollout, router, renderer, parser(rollout.multi_turn.format))
        started.callback(services.threads.close)
        server = ModelServer(config, services, router, keys, journal)
        await server.listen()
        started.push_async_callback(server.end_sessions)
        started.push_async_callback(server.close)
        on_ready(server.url)
        with first_error():
            async with asyncio.TaskGroup() as serving:
                serving.create_task(server.sweep())
                if replicas.supervisor is not None:
                    replicas.supervisor.connect(router, journal)
                    serving.create_task(replicas.supervisor.watch())


async def until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run until Ctrl-C or TERM, which cancel it; an interrupt in the middle of a request would break that."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        await task
