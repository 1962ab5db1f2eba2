"""Gateway conversation: the requests that one agent makes in one session, placed in its tree, sampled, and delivered.

Owns the exchanges in progress, the rows that turns are sampled in, which of them train, and the counters. Knows no HTTP
and no dialect. Invariant: each sampled token is in exactly one row, behind the very ids it was sampled after; a row is
left, never overwritten.

Waits: an exchange waits for the engine, in a task of its own that a lost connection does not end. A request with the
same body as one whose answer was not delivered, and that no connection waits for any more, is given that answer.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal

from treadle.aio import cancel_and_wait
from treadle.data.reasoning_tags import ReasoningTags
from treadle.errors import EngineFailure, Failure, PromptFailure, RequestRefused, RowFull
from treadle.gateway.counters import GatewayCounters
from treadle.gateway.folding import fold
from treadle.gateway.partial_turn import PartialTurn
from treadle.gateway.request import (
    POLICY_MODEL,
    ChatCall,
    ChatMessage,
    Choice,
    ContextExhausted,
    Finish,
    Overloaded,
    ReplySet,
    RequestError,
    SessionOver,
    Tool,
    TurnReply,
    TurnRequest,
    refuse,
)
from treadle.gateway.session_tree import Fork, Place, Point, SessionTree, TreeNode, TurnNode
from treadle.gateway.tools import KNOWN_TOOLS, KnownTools
from treadle.rollout.parsers import Untyped
from treadle.rollout.session import Session
from treadle.rollout.tools.validators import validate_anything
from treadle.types import Completion, Message, StopReason


@dataclass(frozen=True, slots=True)
class RenderedRequest:
    """What is costly about a large request, computed in a thread before it is placed."""

    keys: Sequence[bytes]
    tools: bytes
    repeat: bytes
    node: TreeNode
    segment: tuple[bytes, ...]
    added: "AddedMessages | None"
    """What follows `node`, for a request that is placed there; None where a turn was sampled there before."""


@dataclass(frozen=True, slots=True)
class AddedMessages:
    """The messages of a request after the last turn that it repeats: as templates take them, and as ids if known."""

    folded: Sequence[Message]
    notes: tuple[str, ...]
    ids: tuple[int, ...] | None = None


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
        self._tree = SessionTree(self._drops_reasoning)
        self._rows: list[Session] = []
        self._exchanges: dict[bytes, list[Exchange]] = {}
        """Those whose answers were not delivered, by the digest of the request."""
        self._calls: dict[str, ChatCall] = {}
        self.known_tools = KnownTools()
        self._root_keys: list[tuple[tuple[Tool, ...], str, bytes]] = []
        """Those of the last requests, by tools and model."""
        self._num_asked = 0
        self._clock = 0
        self._failures_in_a_row = 0
        self._failed_points: set[Point] = set()
        """Where an engine failed, and nothing was sampled since."""
        self._broken: dict[Session, tuple[str, tuple[str, ...]]] = {}
        """Rows in which a turn broke off, with its opening and its stop strings: it can go on only like that."""
        self.counters = GatewayCounters()
        self.over = asyncio.Event()
        """A limit, or a failure, has ended the session: its agent is to be stopped."""
        self.failure: BaseException | None = None
        self.has_run_out = False
        """Whether the run's limits cut the last turn off, or left no room for one; not what its agent asked for."""

    # --- requests

    async def render(self, request: TurnRequest) -> RenderedRequest:
        """The keys of a large request, and the ids it adds where it would go on now: `ask` checks that it still does.

        In a thread: other sessions of the worker are not held up. RequestError where it cannot fit any row.
        """
        keys, tools, repeat = await asyncio.to_thread(self._keys_of, request)
        place = self._tree.locate(request.messages, keys, tools, request.agent_id)
        segment, given = tuple(keys[place.start :]), request.messages[place.start :]
        if segment in place.node.points:
            return RenderedRequest(keys, tools, repeat, place.node, segment, None)

        def work() -> AddedMessages:
            self._session.check_texts(message.text for message in given if message.role != "assistant")
            added, node = self._fold(request, place), place.node
            if isinstance(node, TurnNode):
                return replace(added, ids=node.session.render_after(node.mark, added.folded))
            return replace(added, ids=self._session.render_root(added.folded, request.tools))

        with self._explaining():
            return RenderedRequest(keys, tools, repeat, place.node, segment, await asyncio.to_thread(work))

    def ask(self, request: TurnRequest, rendered: RenderedRequest | None = None) -> Exchange:
        """Place a request in the tree and start to sample, or find the exchange it repeats; RequestError if refused."""
        self.counters.requests[request.dialect] += 1
        known = (rendered.keys, rendered.tools, rendered.repeat) if rendered else self._keys_of(request)
        keys, tools, key = known
        for exchange in self._exchanges.get(key, ()):
            if not exchange.is_awaited:
                exchange.is_awaited = True
                self.counters.replayed += 1
                return exchange
        self._check_open(request.n)
        self._note(request)
        place = self._tree.locate(request.messages, keys, tools, request.agent_id)
        point, rows = self._place(request, place, tuple(keys[place.start :]), rendered)
        exchange = Exchange(key, request, rows)
        if request.stream and self._streams_tokens:
            exchange.partials = [self._open_partial(request, row) for row in rows]
        self._exchanges.setdefault(key, []).append(exchange)
        asked_at = self._tick()
        exchange.task = asyncio.create_task(self._sample(exchange, point, rows, asked_at))
        exchange.task.add_done_callback(_retrieve)
        return exchange

    def _keys_of(self, request: TurnRequest) -> tuple[Sequence[bytes], bytes, bytes]:
        """The keys of its messages, its root key, and what a repetition of it has, too."""
        keys, tools = request.keys(), self._root_key(request)
        return keys, tools, request.repeat_key(keys, tools)

    def _root_key(self, request: TurnRequest) -> bytes:
        """The root key of a request; known tools are the same objects, so they are not hashed again."""
        for tools, model, key in self._root_keys:
            if model == request.model and tools == request.tools:
                return key
        key = request.root_key()
        self._root_keys = [(request.tools, request.model, key), *self._root_keys[: KNOWN_TOOLS - 1]]
        return key

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

    async def count_tokens(self, request: TurnRequest) -> int:
        """How many tokens the prompt of a request has, rendered anew, in a thread."""
        calls = self._calls_of(request.messages)

        def work() -> int:
            messages, _ = fold(request.messages, calls, at_start=True)
            return len(self._session.render_root(messages, request.tools))

        with self._explaining():
            return await asyncio.to_thread(work)

    def _check_open(self, n: int) -> None:
        if self.over.is_set() or self._session.done:
            raise SessionOver(f"the session is over: {self._session.ended or 'it has failed'}")
        if self._max_turns is not None and self._num_asked + n > self._max_turns:
            self._end(StopReason.TURN_LIMIT)
            raise SessionOver(f"the session is over: rollout.multi_turn.max_assistant_turns = {self._max_turns}")

    def _end(self, reason: StopReason) -> None:
        self._session.end(reason)
        self.over.set()

    def _note(self, request: TurnRequest) -> None:
        self.counters.add_options(request.ignored, request.asked)
        self.counters.add_notes(request.notes)

    # --- placing

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """What keeps a conversation from being shown, as an agent is told."""
        try:
            yield
        except RowFull as full:
            self.has_run_out = True
            raise ContextExhausted(full.num_tokens, full.max_tokens) from None
        except PromptFailure as failure:
            raise RequestError(f"the conversation cannot be shown to this model: {failure}") from None

    def _place(
        self, request: TurnRequest, place: Place, segment: tuple[bytes, ...], rendered: RenderedRequest | None
    ) -> tuple[Point, list[Session]]:
        """The point at which a request is sampled, and a row for each of its turns."""
        if request.messages[-1].role == "assistant":
            raise RequestError("the last message is an assistant's: this gateway does not go on with a message")
        if request.choice is Choice.REQUIRED and not self._session.call_opening(request.forced_tool):
            raise refuse(
                "tool_choice", "calls cannot be forced in this format of tool calls (rollout.multi_turn.format)"
            )
        is_rendered = rendered is not None and rendered.node is place.node and rendered.segment == segment
        with self._explaining():
            point = place.node.points.get(segment)
            if point is None:
                added = rendered.added if is_rendered and rendered else None
                session = self._open_row(request, place, added or self._fold(request, place))
                point = place.node.add_point(segment, session)
                self._rows.append(session)
            form = self._turn_form(request)
            rows = [self._take_row(point, form) for _ in range(request.n)]
        for turn, echo in place.echoes:
            if not turn.is_echoed:
                turn.is_echoed = True
                self.counters.echoes[echo] += 1
        self._num_asked += request.n
        return point, rows

    def _fold(self, request: TurnRequest, place: Place) -> AddedMessages:
        given, is_root = request.messages[place.start :], not isinstance(place.node, TurnNode)
        return AddedMessages(*fold(given, self._calls_of(request.messages), at_start=is_root))

    def _open_row(self, request: TurnRequest, place: Place, added: AddedMessages) -> Session:
        """A row that ends with the messages of a request: the row of its last turn, a branch of it, or a new root."""
        node, folded, ids = place.node, added.folded, added.ids
        self.counters.add_notes(added.notes)
        if not isinstance(node, TurnNode):
            session = self._session.root(folded, request.tools, ids)
            self.counters.roots += 1
            why, repeated = place.edited, session.length
        elif node.is_continued:
            session = node.session.branch(node.mark, folded, ids)
            why, repeated = place.edited or Fork.REWOUND, node.session.length_at(node.mark)
        else:
            node.session.extend(folded, ids)
            node.is_continued = True
            session, why, repeated = node.session, place.edited, 0
        if why is not None:
            self.counters.add_fork(why, repeated)
        if why in (Fork.EDITED, Fork.REDUCED):
            self.counters.echoes[why] += 1
        return session

    def _turn_form(self, request: TurnRequest) -> tuple[str, tuple[str, ...]]:
        """What a turn is opened with, and the texts that end it."""
        opening = self._session.call_opening(request.forced_tool) if request.choice is Choice.REQUIRED else ""
        return opening, (*self._session.stop_strings, *request.stop)

    def _take_row(self, point: Point, form: tuple[str, tuple[str, ...]]) -> Session:
        """A row to sample one turn in: one that ends there, or a new branch."""
        for row in reversed(point.free):
            if self._broken.get(row, form) == form:
                point.free.remove(row)
                return row
        session = point.session.branch(point.mark)
        self._rows.append(session)
        self.counters.add_fork(Fork.SIBLING, session.length)
        return session

    def _calls_of(self, messages: Sequence[ChatMessage]) -> Mapping[str, ChatCall]:
        """Every call that a tool's result may answer, by id; for those we minted, with the id that the model wrote."""
        return {**{call.id: call for message in messages for call in message.calls}, **self._calls}

    def _drops_reasoning(self, message: ChatMessage, following: Sequence[ChatMessage]) -> bool:
        user_follows = any(later.role == "user" for later in following)
        return self._session.drops_reasoning(has_calls=bool(message.calls), user_follows=user_follows)

    # --- sampling

    async def _sample(self, exchange: Exchange, point: Point, rows: Sequence[Session], asked_at: int) -> ReplySet:
        request = exchange.request
        results = await asyncio.gather(
            *(self._sample_turn(exchange, point, at, asked_at) for at in range(len(rows))), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            self._forget(exchange)
            raise self._explain(point, next((e for e in errors if not isinstance(e, EngineFailure)), errors[0]))
        self._failures_in_a_row = 0
        self._failed_points.discard(point)
        if self._session.done:
            self.over.set()
        turns = [result for result in results if isinstance(result, TurnNode)]
        replies = tuple(turn.reply for turn in turns)
        return ReplySet(replies, request.model, request.include_usage, request.tools, request.namespaces)

    def _open_partial(self, request: TurnRequest, row: Session) -> PartialTurn:
        """A turn that is shown as it is sampled, in a row that ends with its prompt."""
        can_call = request.tools and request.choice is not Choice.NONE
        self._num_streamed += 1
        opening, stops = self._turn_form(request)
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
        opening, stops = form = self._turn_form(request)
        prompt_tokens, is_thinking = row.length, row.ends_with(row.reasoning_tags.open)
        try:
            sampling = {"stop": stops} if request.stop else {}
            on_tokens = None if partial is None else partial.feed
            completion = await row.generate(
                max_tokens=request.max_tokens, opening=opening, on_tokens=on_tokens, **sampling
            )
        except BaseException:
            self._broken[row] = form
            point.free.append(row)
            raise
        self._broken.pop(row, None)
        reply = self._read(completion, request, row, stops, is_thinking, partial)
        reply = replace(reply, prompt_tokens=prompt_tokens)
        asked = request.max_tokens
        self.has_run_out = reply.finish is Finish.LENGTH and (asked is None or reply.sampled_tokens < asked)
        turn = self._tree.add_turn(point, reply, row, request.model, asked_at, request.agent_id)
        self._calls.update({call.id: call for call in reply.calls})
        exchange.turns.append(turn)
        return turn

    def _read(
        self,
        completion: Completion,
        request: TurnRequest,
        row: Session,
        stops: Sequence[str],
        is_thinking: bool,
        partial: PartialTurn | None,
    ) -> TurnReply:
        """A completion as an agent reads it; what was shown of it already, as `partial`, stays what it was."""
        mark = self._new_id() if partial is None else partial.mark
        parsed = row.split(completion, may_call=bool(request.tools) and request.choice is not Choice.NONE)
        reasoning, text = parsed.reasoning, parsed.content
        if not row.frames_turns and not (partial is not None and partial.is_plain):
            reasoning, text = split_reasoning(text, row.reasoning_tags, is_thinking)
        calls = tuple(
            ChatCall(call.name, _typed(call.arguments), f"call_{mark}{at}", call.id)
            for at, call in enumerate(parsed.calls)
        )
        stop_string = row.stop_string_of(completion, stops) if stops else ""
        finish = Finish.LENGTH if completion.stop is StopReason.LENGTH else Finish.CALLS if calls else Finish.STOP
        if stop_string in request.stop and stop_string and finish is Finish.STOP:
            finish = Finish.STOP_STRING
        sampled = len(completion.ids)
        created = int(time.time()) if partial is None else partial.created
        return TurnReply(mark, text, reasoning, calls, finish, stop_string, 0, sampled, created)

    def _new_id(self, number: str = "") -> str:
        """A mark for the next turn: the same when a killed run is run again, and another one in every session."""
        task = f"{self._session.task.uid}/{self._session.sample}/{number or len(self._tree.turns)}"
        return blake2b(task.encode(), digest_size=10).hexdigest()

    def _explain(self, point: Point, error: BaseException) -> BaseException:
        """An engine's failure as the agent is told; one too many, and anything else, ends the session."""
        if not isinstance(error, EngineFailure):
            if not isinstance(error, asyncio.CancelledError):
                self.fail(error)
            return error
        self.counters.engine_failures += 1
        self._failures_in_a_row += 1
        self._failed_points.add(point)
        if isinstance(error, RequestRefused) or self._failures_in_a_row > self._retries:
            self.fail(error)
        self._last_failure = error
        return Overloaded(f"the engine failed: {error}")

    def fail(self, error: BaseException) -> None:
        """The session has failed, of this: its agent is stopped, and nothing of it is scored."""
        self.failure = self.failure or error
        self.over.set()

    # --- the end

    async def close(self) -> TurnNode | None:
        """End what is being sampled, and leave out what does not train; the last turn that does, if there is one."""
        untrained = await self._end_exchanges()
        main = self._main_model()
        last: TurnNode | None = None
        kept: dict[int, TurnNode] = {}
        for turn in self._tree.turns:
            why = self._why_untrained(turn, main)
            if why and self._train == "main":
                untrained.append(
                    {"why": why, "model": turn.model, "tokens": turn.reply.sampled_tokens, "text": turn.reply.text}
                )
            else:
                last = kept[turn.mark.row] = turn
        for row in self._rows:
            turn_kept = kept.get(row.mark().row)
            row.keep_until(turn_kept.mark if turn_kept else None)
        if last is not None:
            last.session.show()
        extra = self.counters.as_extra()
        self._session.extra["gateway"] = {**extra, "untrained": untrained} if untrained else extra
        return last

    async def _end_exchanges(self) -> list[dict[str, Any]]:
        """End what is being sampled; what is left of it, and of turns that an engine broke off for good."""
        under_way: list[Session] = []
        for exchange in [exchange for exchanges in self._exchanges.values() for exchange in exchanges]:
            if not exchange.task.done():
                done = {turn.session for turn in exchange.turns}
                await cancel_and_wait(exchange.task)
                under_way += [row for row in exchange.rows if row not in done]
        left = []
        for row in dict.fromkeys(self._rows):
            tokens, text = row.unfinished()
            if tokens or row in under_way:
                self.counters.unfinished += 1
                left.append({"why": "unfinished", "tokens": tokens, "text": text})
        return left

    @property
    def is_sampling(self) -> bool:
        """Whether an engine is at work for it."""
        return any(not one.task.done() for exchanges in self._exchanges.values() for one in exchanges)

    def open_failure(self) -> Failure | None:
        """The failure of an engine that no later answer made good."""
        return self._last_failure if self._failed_points else None

    _last_failure: EngineFailure | None = None

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


def split_reasoning(text: str, tags: ReasoningTags, is_thinking: bool = False) -> tuple[str, str]:
    """The reasoning at the start of a turn, and what is said after it. `is_thinking`: the prompt has opened it."""
    thought, found, said = text.partition(tags.close)
    if found:
        return thought.replace(tags.open, "", 1).strip(), said.strip()
    if text.lstrip().startswith(tags.open):
        return text.lstrip()[len(tags.open) :].strip(), ""
    return (text.strip(), "") if is_thinking else ("", text)


def _typed(value: Any) -> Any:
    """Arguments as JSON values: text that a format writes without its type is a JSON value where it reads as one."""
    if isinstance(value, Untyped):
        return validate_anything(value)
    if isinstance(value, Mapping):
        return {name: _typed(item) for name, item in value.items()}
    return [_typed(item) for item in value] if isinstance(value, list | tuple) else value


def _retrieve(task: "asyncio.Task[Any]") -> None:
    """Nobody may wait for an answer any more: its error was dealt with where it happened."""
    if not task.cancelled():
        task.exception()
