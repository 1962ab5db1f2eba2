"""Gateway conversation: the requests that one agent makes in one session, placed in its tree, sampled, and delivered.

Owns the exchanges in progress, which of their turns train, and the counters; rows belong to `RowPlacement`. Knows no
HTTP and no dialect. Invariant: each sampled token is in exactly one row, behind the very ids it was sampled after.

Waits: an exchange waits for the engine, in a task of its own that a lost connection does not end. A request with the
same body as one whose answer was not delivered, and that no connection waits for any more, is given that answer.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal

from treadle.aio import cancel_and_wait, is_external_stop
from treadle.errors import EngineFailure, Failure, RequestRefused
from treadle.gateway.counters import GatewayCounters
from treadle.gateway.placement import RenderedRequest, RowPlacement
from treadle.gateway.request import POLICY_MODEL, Choice, Finish, Overloaded, ReplySet, SessionOver, TurnRequest
from treadle.gateway.request_body import KnownTools
from treadle.gateway.session_tree import Point, TurnNode
from treadle.gateway.turn_reader import PartialTurn, read_turn
from treadle.rollout.session import Session
from treadle.types import StopReason


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and the answer to it."""

    key: bytes
    request: TurnRequest
    rows: Sequence[Session]
    """In which its turns are sampled."""
    task: "asyncio.Task[ReplySet]" = field(init=False)
    turns: list[TurnNode] = field(default_factory=list)
    is_awaited: bool = True
    """Whether a connection waits for the answer."""
    is_delivered: bool = False
    partials: Sequence[PartialTurn] = ()
    """Its turns as they are sampled, where they are shown before they are whole."""


@dataclass(slots=True)
class PointFailures:
    """Failures of an engine at one point, one after the other."""

    count: int = 0
    last_at: int = -1
    """When the last of them came: what had been asked before that met the same outage, and is none more."""


class Conversation:
    """All requests of one session. `close` says what trains, and ends what is still being sampled."""

    def __init__(
        self,
        session: Session,
        *,
        train: Literal["main", "all"],
        max_turns: int | None,
        retries: int,
        streams_tokens: bool = False,
    ) -> None:
        """`streams_tokens`: turns that are asked for as a stream can be shown while they are sampled."""
        self._session = session
        self._train = train
        self._max_turns = max_turns
        self._retries = retries
        self._streams_tokens = streams_tokens
        self._num_streamed = 0
        self.counters = GatewayCounters()
        self._placement = RowPlacement(session, self.counters)
        self._tree = self._placement.tree
        self._exchanges: dict[bytes, list[Exchange]] = {}
        """Those whose answers were not delivered, by the digest of the request."""
        self.known_tools = KnownTools()
        self._num_asked = 0
        self._clock = 0
        self._is_closed = False
        self._text_work: set[asyncio.Task[None]] = set()
        """Text completions that are being sampled: they are no turns of a conversation, and end with it."""
        self._failures: dict[Point, PointFailures] = {}
        """Where an engine failed, and nothing was sampled since."""
        self._last_failure: EngineFailure | None = None
        self.over = asyncio.Event()
        """A limit, or a failure, has ended the session: its agent is to be stopped."""
        self.failure: BaseException | None = None

    # --- requests

    async def render(self, request: TurnRequest) -> RenderedRequest:
        """The keys of a large request, and the ids it adds where it would go on now: `ask` checks that it still does.

        In a thread: other sessions of the worker are not held up. RequestError where it cannot fit any row.
        """
        return await self._placement.render(request)

    async def count_tokens(self, request: TurnRequest) -> int:
        """How many tokens the prompt of a request has, rendered anew, in a thread."""
        return await self._placement.count_tokens(request)

    def ask(self, request: TurnRequest, rendered: RenderedRequest | None = None) -> Exchange:
        """Place a request in the tree and start to sample, or find the exchange it repeats; RequestError if refused."""
        self._check_not_closed()
        self.counters.requests[request.dialect] += 1
        known = (rendered.keys, rendered.tools, rendered.repeat) if rendered else self._placement.keys_of(request)
        keys, tools, key = known
        for exchange in self._exchanges.get(key, ()):
            if not exchange.is_awaited:
                exchange.is_awaited = True
                self.counters.replayed += 1
                return exchange
        self._check_open(request.n)
        self._note(request)
        place = self._tree.locate(request.messages, keys, tools, request.agent_id)
        point, rows = self._placement.place(request, place, tuple(keys[place.start :]), rendered)
        self._num_asked += request.n
        exchange = Exchange(key, request, rows)
        if request.stream and self._streams_tokens:
            exchange.partials = [self._open_partial(request, row) for row in rows]
        self._exchanges.setdefault(key, []).append(exchange)
        asked_at = self._tick()
        exchange.task = asyncio.create_task(self._sample(exchange, point, rows, asked_at))
        exchange.task.add_done_callback(_retrieve)
        return exchange

    def deliver(self, exchange: Exchange) -> None:
        """All of an answer has left for its agent."""
        exchange.is_awaited, exchange.is_delivered = False, True
        now = self._tick()
        for turn in exchange.turns:
            turn.delivered_at = now
        self._forget(exchange)

    def lose(self, exchange: Exchange) -> None:
        """The connection broke. The answer is given again if it is asked for again.

        A turn whose answer had left whole stays delivered: clients break a connection as soon as they have the last
        event of a stream, and a turn that was read must train.
        """
        exchange.is_awaited = False
        if exchange.is_delivered:
            exchange.is_delivered = False
            self._exchanges.setdefault(exchange.key, []).append(exchange)

    def begin_text(self, work: "asyncio.Task[None]") -> None:
        """A text completion is being sampled in a row of this session."""
        self._text_work.add(work)
        work.add_done_callback(self._text_work.discard)

    def check_not_over(self) -> None:
        """SessionOver where nothing more may be sampled."""
        self._check_not_closed()
        if self.over.is_set() or self._session.done:
            raise SessionOver(f"the session is over: {self._session.ended or 'it has failed'}")

    def _check_not_closed(self) -> None:
        if self._is_closed:  # while the request was read or rendered: its rows are cut by now
            raise SessionOver("the session has ended")

    def _check_open(self, n: int) -> None:
        self.check_not_over()
        if self._max_turns is not None and self._num_asked + n > self._max_turns:
            self._end(StopReason.TURN_LIMIT)
            raise SessionOver(f"the session is over: rollout.multi_turn.max_assistant_turns = {self._max_turns}")

    def _end(self, reason: StopReason) -> None:
        self._session.end(reason)
        self.over.set()

    def _note(self, request: TurnRequest) -> None:
        self.counters.add_options(request.ignored, request.asked)
        self.counters.add_notes(request.notes)

    # --- sampling

    async def _sample(self, exchange: Exchange, point: Point, rows: Sequence[Session], asked_at: int) -> ReplySet:
        request = exchange.request
        turns_under_way = [self._sample_turn(exchange, point, at, asked_at) for at in range(len(rows))]
        results: list[TurnNode | BaseException]
        if len(turns_under_way) == 1:  # as nearly always: it needs no task of its own
            results = [await _outcome(turns_under_way[0])]
        else:
            results = await asyncio.gather(*turns_under_way, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            self._forget(exchange)
            self._num_asked -= len(errors)  # they are none of the turns that a session may have
            error = next((e for e in errors if not isinstance(e, EngineFailure)), errors[0])
            raise self._explain(point, error, asked_at)
        self._failures.pop(point, None)
        if self._session.done:
            self.over.set()
        turns = [result for result in results if isinstance(result, TurnNode)]
        replies = tuple(turn.reply for turn in turns)
        return ReplySet(replies, request.model, request.include_usage, request.tools, request.namespaces)

    def _open_partial(self, request: TurnRequest, row: Session) -> PartialTurn:
        """A turn that is shown as it is sampled, in a row that ends with its prompt."""
        can_call = request.tools and request.choice is not Choice.NONE
        self._num_streamed += 1
        opening, stops = self._placement.turn_form(request)
        tags, is_whole = row.reasoning_tags, bool(opening) or row.frames_turns
        return PartialTurn(
            row.decode,
            mark=self._new_id(f"s{self._num_streamed}"),
            created=int(time.time()),
            prompt_tokens=row.length,
            stops=stops,
            call_starts=() if is_whole else row.call_starts if can_call else None,
            is_thinking=row.ends_with(tags.open),
            tags=tags,
        )

    async def _sample_turn(self, exchange: Exchange, point: Point, at: int, asked_at: int) -> TurnNode:
        """One turn, committed to the tree before the end of it is sent."""
        request, row = exchange.request, exchange.rows[at]
        partial = exchange.partials[at] if exchange.partials else None
        opening, stops = form = self._placement.turn_form(request)
        prompt_tokens, is_thinking = row.length, row.ends_with(row.reasoning_tags.open)
        try:
            sampling = {"stop": stops} if request.stop else {}
            on_tokens = None if partial is None else partial.feed
            completion = await row.generate(
                max_tokens=request.max_tokens, opening=opening, on_tokens=on_tokens, **sampling
            )
        except BaseException:
            self._placement.leave_broken(point, row, form)
            raise
        self._placement.mend(row)
        mark = self._new_id() if partial is None else partial.mark
        reply = read_turn(completion, request, row, stops, is_thinking, partial, mark)
        reply = replace(reply, prompt_tokens=prompt_tokens)
        asked = request.max_tokens
        self._placement.has_run_out = reply.finish is Finish.LENGTH and (asked is None or reply.sampled_tokens < asked)
        turn = self._tree.add_turn(point, reply, row, request.model, asked_at, request.agent_id)
        self._placement.minted.update({call.id: call for call in reply.calls})
        exchange.turns.append(turn)
        return turn

    def _new_id(self, number: str = "") -> str:
        """A mark for the next turn: the same when a killed run is run again, and another one in every session."""
        task = f"{self._session.task.uid}/{self._session.sample}/{number or len(self._tree.turns)}"
        return blake2b(task.encode(), digest_size=10).hexdigest()

    def _explain(self, point: Point, error: BaseException, asked_at: int) -> BaseException:
        """An engine's failure as the agent is told; one too many at one point, and anything else, ends the session."""
        if not isinstance(error, EngineFailure):
            if not isinstance(error, asyncio.CancelledError):
                self.fail(error)
            return error
        self.counters.engine_failures += 1
        failures = self._failures.setdefault(point, PointFailures())
        if asked_at > failures.last_at:
            failures.count, failures.last_at = failures.count + 1, self._tick()
        if isinstance(error, RequestRefused) or failures.count > self._retries:
            self.fail(error)
        self._last_failure = error
        return Overloaded(f"the engine failed: {error}")

    def fail(self, error: BaseException) -> None:
        """The session has failed, of this: its agent is stopped, and nothing of it is scored."""
        self.failure = self.failure or error
        self.over.set()

    # --- the end

    async def close(self) -> TurnNode | None:
        """End what is being sampled, and leave out what does not train; the last turn that does, if there is one.

        What is asked from here on is refused: a large request may still be read and rendered in its thread.
        """
        self._is_closed = True
        untrained = await self._end_exchanges()
        main = self._main_model()
        last: TurnNode | None = None
        kept: dict[int, TurnNode] = {}
        for turn in self._tree.turns:
            why = self._why_untrained(turn, main) if self._train == "main" else ""
            if why:
                untrained.append(
                    {"why": why, "model": turn.model, "tokens": turn.reply.sampled_tokens, "text": turn.reply.text}
                )
            else:
                last = kept[turn.mark.row] = turn
        for row in self._placement.rows:
            turn_kept = kept.get(row.mark().row)
            row.keep_until(turn_kept.mark if turn_kept else None)
        if last is not None:
            last.session.show()
        extra = self.counters.as_extra()
        self._session.extra["gateway"] = {**extra, "untrained": untrained} if untrained else extra
        return last

    async def _end_exchanges(self) -> list[dict[str, Any]]:
        """End what is being sampled; what is left of it, and of turns that an engine broke off for good."""
        for work in list(self._text_work):
            await cancel_and_wait(work)
        under_way: list[Session] = []
        for exchange in [exchange for exchanges in self._exchanges.values() for exchange in exchanges]:
            if not exchange.task.done():
                done = {turn.session for turn in exchange.turns}
                await cancel_and_wait(exchange.task)
                under_way += [row for row in exchange.rows if row not in done]
        left = []
        for row in dict.fromkeys(self._placement.rows):
            tokens, text = row.unfinished()
            if tokens or row in under_way:
                self.counters.unfinished += 1
                left.append({"why": "unfinished", "tokens": tokens, "text": text})
        return left

    @property
    def is_sampling(self) -> bool:
        """Whether an engine is at work for it."""
        exchanges = (one for same in self._exchanges.values() for one in same)
        return bool(self._text_work) or any(not one.task.done() for one in exchanges)

    @property
    def has_run_out(self) -> bool:
        """Whether the run's limits cut the last turn off, or left no room for one; not what its agent asked for."""
        return self._placement.has_run_out

    def open_failure(self) -> Failure | None:
        """The failure of an engine that no later answer made good."""
        return self._last_failure if self._failures else None

    def _main_model(self) -> str:
        """The model that trains: the policy by its name; the one used most where an agent only asks for other names."""
        tokens: Counter[str] = Counter()
        for turn in self._tree.turns:
            tokens[turn.model] += turn.reply.sampled_tokens + 1
        if not tokens or POLICY_MODEL in tokens:
            return POLICY_MODEL
        return tokens.most_common(1)[0][0]

    def _why_untrained(self, turn: TurnNode, main: str) -> str:
        """Why a turn does not train, and count it; empty if it does."""
        if turn.model != main:
            self.counters.auxiliary += 1
            return "auxiliary"
        if not turn.is_replaced():
            return ""
        if turn.delivered_at is None:
            self.counters.undelivered += 1
            return "undelivered"
        self.counters.replaced += 1
        return "replaced"

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _forget(self, exchange: Exchange) -> None:
        same = self._exchanges.get(exchange.key, [])
        if exchange in same:
            same.remove(exchange)
        if not same:
            self._exchanges.pop(exchange.key, None)


async def _outcome(work: Coroutine[Any, Any, TurnNode]) -> TurnNode | BaseException:
    """A turn, or the error that it ended with; a cancellation of whoever waits for it passes."""
    try:
        return await work
    except BaseException as error:
        if is_external_stop(error):
            raise
        return error


def _retrieve(task: "asyncio.Task[Any]") -> None:
    """Nobody may wait for an answer any more: its error was dealt with where it happened."""
    if not task.cancelled():
        task.exception()
