"""Gateway placement: the rows of a session in which the turns of a request are sampled.

Owns the tree of the session, its rows, and what of a request is costly: keys, folding, ids. A request goes on in the
row of the last turn that it repeats, in a branch of it, or in a row of its own. Samples nothing. Invariant: a row is
left, never overwritten; one in which a turn broke off is taken again for a turn of the same form alone.
Messages are folded into the shape that chat templates take: system messages at the start become one; later ones, and
users in a row, become one user message; assistant messages in a row are joined; a tool's result gets the name of its
tool. Each rule that was applied is noted. Only messages between two sampled turns are folded, so that what was folded
stays the same when the conversation goes on.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from treadle.errors import PromptFailure, RowFull
from treadle.gateway.counters import GatewayCounters
from treadle.gateway.request import (
    ChatCall,
    ChatMessage,
    Choice,
    ContextExhausted,
    RequestError,
    Role,
    Tool,
    TurnRequest,
    refuse,
)
from treadle.gateway.request_body import KNOWN_TOOLS
from treadle.gateway.session_tree import Fork, Place, Point, SessionTree, TreeNode, TurnNode
from treadle.rollout.session import Session
from treadle.types import Message

TurnForm = tuple[str, tuple[str, ...]]
"""What a turn is opened with, and the texts that end it."""


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


class RowPlacement:
    """Finds or opens the rows of requests. `place` counts forks, roots and echoes."""

    def __init__(self, session: Session, counters: GatewayCounters) -> None:
        self._session = session
        self.counters = counters
        self.tree = SessionTree(self._drops_reasoning)
        self.rows: list[Session] = []
        self.minted: dict[str, ChatCall] = {}
        """Calls of sampled turns by the ids that agents were given, with those that the model wrote."""
        self.has_run_out = False
        """Whether the run's limits cut the last turn off, or left no room for one; not what its agent asked for."""
        self._root_keys: list[tuple[tuple[Tool, ...], str, bytes]] = []
        """Those of the last requests, by tools and model."""
        self._broken: dict[Session, TurnForm] = {}
        """Rows in which a turn broke off: it can go on only like that."""

    async def render(self, request: TurnRequest) -> RenderedRequest:
        """The keys of a large request, and the ids it adds where it would go on now: `ask` checks that it still does.

        In a thread: other sessions of the worker are not held up. RequestError where it cannot fit any row.
        """
        keys, tools, repeat = await asyncio.to_thread(self.keys_of, request)
        place = self.tree.locate(request.messages, keys, tools, request.agent_id)
        segment, given = tuple(keys[place.start :]), request.messages[place.start :]
        if segment in place.node.points:
            return RenderedRequest(keys, tools, repeat, place.node, segment, None)

        def work() -> AddedMessages:
            self._session.check_texts(message.text for message in given if message.role != "assistant")
            added, node = self._fold(request, place), place.node
            if isinstance(node, TurnNode):
                return replace(added, ids=node.session.render_after(node.mark, added.folded))
            return replace(added, ids=self._session.render_root(added.folded, request.tools))

        with self.explaining():
            return RenderedRequest(keys, tools, repeat, place.node, segment, await asyncio.to_thread(work))

    def keys_of(self, request: TurnRequest) -> tuple[Sequence[bytes], bytes, bytes]:
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

    async def count_tokens(self, request: TurnRequest) -> int:
        """How many tokens the prompt of a request has, rendered anew, in a thread."""
        calls = self.calls_of(request.messages)

        def work() -> int:
            messages, _ = fold(request.messages, calls, at_start=True)
            return len(self._session.render_root(messages, request.tools))

        with self.explaining():
            return await asyncio.to_thread(work)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """What keeps a conversation from being shown, as an agent is told."""
        try:
            yield
        except RowFull as full:
            self.has_run_out = True
            raise ContextExhausted(full.num_tokens, full.max_tokens) from None
        except PromptFailure as failure:
            raise RequestError(f"the conversation cannot be shown to this model: {failure}") from None

    def place(
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
        with self.explaining():
            point = place.node.points.get(segment)
            if point is None:
                added = rendered.added if is_rendered and rendered else None
                session = self._open_row(request, place, added or self._fold(request, place))
                point = place.node.add_point(segment, session)
                self.rows.append(session)
            form = self.turn_form(request)
            rows = [self._take_row(point, form) for _ in range(request.n)]
        for turn, echo in place.echoes():
            if not turn.is_echoed:
                turn.is_echoed = True
                self.counters.echoes[echo] += 1
        return point, rows

    def _fold(self, request: TurnRequest, place: Place) -> AddedMessages:
        given, is_root = request.messages[place.start :], not isinstance(place.node, TurnNode)
        for message in given:  # a row keeps it, also where its template shows none of it
            if message.reasoning:
                self._session.check_texts([message.reasoning])
        return AddedMessages(*fold(given, self.calls_of(request.messages), at_start=is_root))

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

    def turn_form(self, request: TurnRequest) -> TurnForm:
        """What a turn is opened with, and the texts that end it."""
        opening = self._session.call_opening(request.forced_tool) if request.choice is Choice.REQUIRED else ""
        return opening, (*self._session.stop_strings, *request.stop)

    def _take_row(self, point: Point, form: TurnForm) -> Session:
        """A row to sample one turn in: one that ends there, or a new branch."""
        for row in reversed(point.free):
            if self._broken.get(row, form) == form:
                point.free.remove(row)
                return row
        session = point.session.branch(point.mark)
        self.rows.append(session)
        self.counters.add_fork(Fork.SIBLING, session.length)
        return session

    def calls_of(self, messages: Sequence[ChatMessage]) -> Mapping[str, ChatCall]:
        """Every call that a tool's result may answer, by id; for those we minted, with the id that the model wrote."""
        return {**{call.id: call for message in messages for call in message.calls}, **self.minted}

    def _drops_reasoning(self, message: ChatMessage, user_follows: bool) -> bool:
        return self._session.drops_reasoning(has_calls=bool(message.calls), user_follows=user_follows)

    def leave_broken(self, point: Point, row: Session, form: TurnForm) -> None:
        """A turn broke off in a row; a turn of the same form can go on there."""
        self._broken[row] = form
        point.free.append(row)

    def mend(self, row: Session) -> None:
        """A turn that had broken off is whole."""
        self._broken.pop(row, None)


def fold(
    messages: Sequence[ChatMessage], calls: Mapping[str, ChatCall], *, at_start: bool
) -> tuple[list[Message], tuple[str, ...]]:
    """Messages for a template, and notes. `calls`: all that results may answer, by id; `at_start`: nothing precedes."""
    notes: dict[str, None] = {}
    first = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    leading = list(messages[:first]) if at_start else []
    folded = [_join(leading)] if leading else []
    if len(leading) > 1:
        notes["system messages at the start are joined"] = None
    rest: list[ChatMessage] = []
    for message in messages[len(leading) :]:
        if message.role == "system":
            notes["later system messages are folded into the user's"] = None
            message = replace(message, role="user")
        rest.append(message)
    for role, run in groupby(rest, key=_role):
        group = list(run)
        if role == "tool" or len(group) == 1:
            folded += group
            continue
        notes[f"{role} messages in a row are joined"] = None
        folded.append(_join(group))
    return [_to_template(message, calls) for message in folded], tuple(notes)


def _role(message: ChatMessage) -> Role:
    return message.role


def _join(messages: Sequence[ChatMessage]) -> ChatMessage:
    return replace(
        messages[0],
        text="\n\n".join(message.text for message in messages if message.text),
        calls=tuple(call for message in messages for call in message.calls),
        reasoning="\n\n".join(message.reasoning for message in messages if message.reasoning),
    )


def _to_template(message: ChatMessage, calls: Mapping[str, ChatCall]) -> Message:
    if message.role == "tool":
        call = calls.get(message.call_id)
        name, identity = (call.name, call.native_id) if call else ("", message.call_id)
        return {"role": "tool", "name": name or "tool", "tool_call_id": identity, "content": message.text}
    written: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.calls:
        written["tool_calls"] = [
            {
                "id": calls.get(call.id, call).native_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return written
