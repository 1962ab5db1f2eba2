"""Session tree: where in its session's conversations a request goes on, and which sampled turns it repeats.

    root (one for each set of tools)
      └ point: the messages given before a turn ── turn ── point ── turn …
                                                ├ turn        siblings: the same messages, sampled again
                                                └ turn

Owns the places at which turns were sampled, and how an assistant message that an agent sends back is recognised: by
marks that we minted, then by its content. A request is the turns it repeats, and the messages after the last of them;
an assistant message that is no sampled turn is a message like any other. Holds no tokens: a point and a turn name their
row, and a place in it. Invariant: a request goes on from a turn only if every message up to there is what the model was
shown, so no sampled token is ever shown in another context than the one it was sampled in.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import heappop, heappush
from itertools import count

from treadle.gateway.request import ChatMessage, TurnReply
from treadle.rollout.session import Session
from treadle.rollout.trajectory_builder import RowMark

SegmentKey = tuple[bytes, ...]
"""Keys of the messages between two sampled turns."""


class Echo(StrEnum):
    """How an assistant message compares with a turn that was sampled in its place."""

    EXACT = "exact"
    EQUIVALENT = "equivalent"
    """Other spacing, or arguments written in another way."""
    REDUCED = "reduced"
    """Without its reasoning."""
    EDITED = "edited"


class Fork(StrEnum):
    """Why a request did not simply go on with the row of its last turn."""

    EDITED = "edited"
    """An assistant message was changed."""
    REDUCED = "reduced"
    """Reasoning was left out that the chat template shows."""
    REWOUND = "rewound"
    """Other messages follow a turn that the conversation had already gone on from."""
    SIBLING = "sibling"
    """The same messages were sampled again."""
    PREFIX = "prefix"
    """It repeats turns of ours after messages that were changed or dropped."""


@dataclass(slots=True, eq=False)
class TreeNode:
    """A place that messages can follow: a root, or a sampled turn."""

    points: dict[SegmentKey, "Point"] = field(default_factory=dict)
    lengths: set[int] = field(default_factory=set)
    """Of the keys, in messages: a request is looked up where one of these ends, and nowhere else."""

    def add_point(self, key: SegmentKey, session: Session) -> "Point":
        """These messages follow; `session` is the row in which a turn can be sampled after them."""
        point = self.points[key] = Point(self, session, session.mark(), [session])
        self.lengths.add(len(key))
        return point


@dataclass(slots=True, eq=False)
class Point:
    """Where turns are sampled: some messages after a node."""

    before: TreeNode
    session: Session
    mark: RowMark
    """Its place in the row of `session`."""
    free: list[Session]
    """Rows that end here, and in which nothing is being sampled."""
    turns: list["TurnNode"] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class TurnNode(TreeNode):
    """A sampled turn, and the row that ends with it until another turn follows there."""

    point: Point = field(kw_only=True)
    reply: TurnReply = field(kw_only=True)
    session: Session = field(kw_only=True)
    mark: RowMark = field(kw_only=True)
    number: int = field(kw_only=True)
    """In the order of the session."""
    model: str = field(kw_only=True)
    """The name of the model that was asked for."""
    agent_id: str = field(kw_only=True, default="")
    """Which sub-agent asked, where the program says so."""
    asked_at: int = field(kw_only=True)
    """When it was asked for, and when its agent had all of it; by the clock of the session, which counts both."""
    delivered_at: int | None = None
    is_echoed: bool = False
    """Whether an agent has sent it back."""
    is_continued: bool = False
    """Whether its row has gone on."""

    @property
    def is_leaf(self) -> bool:
        return not self.points

    def is_replaced(self) -> bool:
        """Whether nothing came of it: its agent read it and asked again, or never had it."""
        if not self.is_leaf or self.delivered_at is None:
            return self.is_leaf
        return any(other.asked_at > self.delivered_at for other in self.point.turns)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes on: the last turn that it repeats, and how many of its messages that accounts for."""

    node: TreeNode
    start: int = 0
    echo: Echo | None = None
    """How the last repeated turn came back; None where it is none."""
    before: "Place | None" = None
    """The place that the last repeated turn follows."""
    edited: Fork | None = None
    """Why an assistant message after the last repeated turn is not a turn of ours, if it could have been."""

    def echoes(self) -> Iterator[tuple[TurnNode, Echo]]:
        """The turns that it repeats, and how they came back; the last one first."""
        place: Place | None = self
        while place is not None and isinstance(place.node, TurnNode) and place.echo is not None:
            yield place.node, place.echo
            place = place.before


DropsReasoning = Callable[[ChatMessage, bool], bool]
"""Whether the template leaves out the reasoning of an assistant message; and whether a user's message follows that."""


class SessionTree:
    """The tree of one session."""

    def __init__(self, drops_reasoning: DropsReasoning) -> None:
        self._drops_reasoning = drops_reasoning
        self._roots: dict[bytes, TreeNode] = {}
        self._marks: dict[str, TurnNode] = {}
        self.turns: list[TurnNode] = []
        """In the order in which they were sampled."""

    @property
    def num_roots(self) -> int:
        """Conversations that began from nothing."""
        return sum(len(root.points) for root in self._roots.values())

    def locate(self, messages: Sequence[ChatMessage], keys: Sequence[bytes], tools: bytes, agent_id: str = "") -> Place:
        """The place with the last turn that these messages repeat; its own one for a sub-agent that says who it is.

        Takes time for each place that it passes and each length of a key there, not for each pair of messages.
        """
        best = Place(self._roots.setdefault(tools, TreeNode()))
        candidates = _Candidates(messages)
        candidates.add(best)
        last_user = max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
        fork: Fork | None = None
        while (at := candidates.next_message()) is not None:
            message, found = messages[at], list[Place]()
            for place in candidates.take(at):
                point = place.node.points.get(tuple(keys[place.start : at]))
                if point is not None:
                    matches, why = self._match(point, message, at < last_user)
                    fork = fork or why if not matches else fork
                    found += [Place(turn, at + 1, echo, place) for turn, echo in matches]
            if found:
                best = max(found, key=lambda place: _rank(place, message, agent_id))
                fork = None
            for place in found:
                candidates.add(place)
        if fork is None and self._repeats_others(messages[best.start :]):
            fork = Fork.PREFIX
        return replace(best, edited=fork)

    def add_turn(
        self, point: Point, reply: TurnReply, session: Session, model: str, asked_at: int, agent_id: str = ""
    ) -> TurnNode:
        """A turn was sampled at a point, in the row of `session`, which ends with it."""
        turn = TurnNode(
            point=point,
            reply=reply,
            session=session,
            mark=session.mark(),
            number=len(self.turns),
            model=model,
            agent_id=agent_id,
            asked_at=asked_at,
        )
        point.turns.append(turn)
        self.turns.append(turn)
        for mark in reply.marks():
            self._marks[mark] = turn
        return turn

    def _match(
        self, point: Point, message: ChatMessage, user_follows: bool
    ) -> tuple[list[tuple[TurnNode, Echo]], Fork | None]:
        """The turns of a point that a message repeats, and why there is none."""
        matches: list[tuple[TurnNode, Echo]] = []
        why: Fork | None = None
        for turn in point.turns:
            echo = compare(message, turn.reply, self._marks_of_others(message, turn))
            if echo is Echo.REDUCED and not self._drops_reasoning(message, user_follows):
                why = Fork.REDUCED
            elif echo is Echo.EDITED:
                why = why or Fork.EDITED
            else:
                matches.append((turn, echo))
        return matches, why

    def _marks_of_others(self, message: ChatMessage, turn: TurnNode) -> bool:
        """Whether the message bears a mark of another turn than this one."""
        return any(self._marks.get(mark, turn) is not turn for mark in message.marks)

    def _repeats_others(self, messages: Sequence[ChatMessage]) -> bool:
        return any(mark in self._marks for message in messages for mark in message.marks)


class _Candidates:
    """Assistant messages that may be turns of ours, each with the places that one could follow."""

    def __init__(self, messages: Sequence[ChatMessage]) -> None:
        self._messages = messages
        self._numbers = count()
        self._heap: list[tuple[int, int, Place]] = []
        """By the message, then in the order in which places were found."""

    def add(self, place: Place) -> None:
        for length in place.node.lengths:
            at = place.start + length
            if at < len(self._messages) and self._messages[at].role == "assistant":
                heappush(self._heap, (at, next(self._numbers), place))

    def next_message(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def take(self, at: int) -> Iterator[Place]:
        while self._heap and self._heap[0][0] == at:
            yield heappop(self._heap)[2]


def _rank(place: Place, message: ChatMessage, agent_id: str) -> tuple[bool, bool, int]:
    """Rank of a place among those that say the same: the one whose mark a message bears, its own agent's, the last."""
    turn = place.node
    assert isinstance(turn, TurnNode), "a root repeats nothing"
    return not set(turn.reply.marks()).isdisjoint(message.marks), turn.agent_id == agent_id, turn.number


def compare(message: ChatMessage, reply: TurnReply, is_marked_otherwise: bool = False) -> Echo:
    """How a message compares with a reply."""
    if is_marked_otherwise or message.text.strip() != reply.text.strip():
        return Echo.EDITED
    calls = [(call.name, call.arguments) for call in message.calls]
    if calls != [(call.name, call.arguments) for call in reply.calls]:
        return Echo.EDITED
    marked = not set(reply.reasoning_marks()).isdisjoint(message.marks)
    if message.reasoning and not marked and message.reasoning.strip() != reply.reasoning.strip():
        return Echo.EDITED
    if reply.reasoning and not message.reasoning and not marked:
        return Echo.REDUCED
    same = message.text == reply.text and all(
        call.id == ours.id and call.written in (None, ours.arguments_text())
        for call, ours in zip(message.calls, reply.calls, strict=True)
    )
    return Echo.EXACT if same else Echo.EQUIVALENT
