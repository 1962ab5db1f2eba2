"""Event stream: the protocol by which the dialects write a turn as events, piece by piece or as a whole.

Owns the order of the calls, and what is left to send once a turn is whole. Knows no dialect and no HTTP.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from treadle.gateway.request import ReplySet, TurnReply
from treadle.gateway.turn_reader import PartialTurn

Event = tuple[str, dict[str, Any] | str]
"""Its name, empty where the dialect has none, and its data."""


class EventWriter(Protocol):
    """Writes the answer to one request, in the events of a dialect."""

    def begin(self, answer: ReplySet) -> Iterator[Event]:
        """The first events; of the answer only marks, counts of prompt tokens and names are read."""
        ...

    def add(self, at: int, kind: str, text: str) -> Iterator[Event]:
        """A piece of "reasoning" or "text" of one of the replies; reasoning comes first."""
        ...

    def end(self, answer: ReplySet) -> Iterator[Event]:
        """Tool calls and the last events; everything else was added."""
        ...


def write_whole(writer: EventWriter, answer: ReplySet) -> Iterator[Event]:
    """All events of an answer that is whole."""
    yield from writer.begin(answer)
    yield from _finish(writer, answer, [("", "")] * len(answer.replies))


def _finish(writer: EventWriter, answer: ReplySet, sent: Sequence[tuple[str, str]]) -> Iterator[Event]:
    for at, (reply, (reasoning, text)) in enumerate(zip(answer.replies, sent, strict=True)):
        if len(reply.reasoning) > len(reasoning):
            yield from writer.add(at, "reasoning", reply.reasoning[len(reasoning) :])
        if len(reply.text) > len(text):
            yield from writer.add(at, "text", reply.text[len(text) :])
    yield from writer.end(answer)


class PartialStream:
    """What one connection was sent of turns that are being sampled."""

    def __init__(self, writer: EventWriter, turns: Sequence[PartialTurn], empty: ReplySet) -> None:
        """`empty`: an answer of no replies yet."""
        self._writer = writer
        self._turns = turns
        self._num_sent = [0] * len(turns)
        replies = (TurnReply(turn.mark, "", prompt_tokens=turn.prompt_tokens, created=turn.created) for turn in turns)
        self._empty = replace(empty, replies=tuple(replies))
        self._has_begun = False

    def events(self) -> Iterator[Event]:
        """What there is to show since the last call."""
        for at, turn in enumerate(self._turns):
            new = turn.pieces[self._num_sent[at] :]
            self._num_sent[at] += len(new)
            if new and not self._has_begun:
                self._has_begun = True
                yield from self._writer.begin(self._empty)
            for kind, text in new:
                yield from self._writer.add(at, kind, text)

    def finish(self, answer: ReplySet) -> Iterator[Event] | None:
        """The rest of the whole answer; None where it does not begin with what was sent."""
        sent = [self._sent(at, "reasoning", "text") for at in range(len(self._turns))]
        if not self._has_begun:
            return write_whole(self._writer, answer)
        replies = answer.replies
        if len(sent) != len(replies) or not all(map(_begins, replies, sent)):
            return None
        return _finish(self._writer, answer, sent)

    def _sent(self, at: int, *kinds: str) -> tuple[str, str]:
        pieces = self._turns[at].pieces[: self._num_sent[at]]
        reasoning, text = ("".join(piece for kind, piece in pieces if kind == wanted) for wanted in kinds)
        return reasoning, text


def _begins(reply: TurnReply, sent: tuple[str, str]) -> bool:
    reasoning, text = sent
    is_reasoned = reply.reasoning.startswith(reasoning) if not text else reply.reasoning == reasoning
    return is_reasoned and reply.text.startswith(text)
