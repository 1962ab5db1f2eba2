"""Turn reader: a completion as an agent reads it, whole or while it is sampled: reasoning, text, tool calls, its end

Owns what is held back of a turn that is being sampled: half of a UTF-8 character, white space and tags that may still
turn out to be something else, stop strings, and everything from the first sign of a tool call on. Text alone: what it
makes of a turn changes no token. How often a token is looked at has a bound, however long the turn.
Invariant: the reasoning and the text that were shown, as a `PartialTurn`, are the beginning of what the whole turn has;
where a model's output does not allow that, nothing is shown until the turn is whole.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from treadle.data.chat_template import THINK, ReasoningTags
from treadle.engine.protocol import Decode
from treadle.gateway.request import ChatCall, Choice, Finish, TurnReply, TurnRequest
from treadle.rollout.parsers import Untyped
from treadle.rollout.session import Session
from treadle.rollout.tools.validators import validate_anything
from treadle.types import Completion, StopReason

_HALF = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD = 8
"""Half of a character is at most three bytes, and a token at least one. Some more: a model may write U+FFFD itself."""


class IncrementalDecoder:
    """Ids to text as they come: a piece of text is given once no later token can change it."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before: Sequence[int] = ()
        """Those of the last piece that was given: some tokenizers write a token otherwise at the start of a text."""
        self._given = ""
        """The text of these."""
        self._held: list[int] = []
        """Those after them, of which no text was given."""

    def add(self, ids: Sequence[int]) -> str | None:
        """The next piece, maybe empty; None where text of more tokens does not begin with that of fewer, or is none."""
        self._held += ids
        for end in range(len(self._held), max(0, len(self._held) - _MAX_HELD - 1), -1):
            now = self._decode([*self._before, *self._held[:end]])
            if now.endswith(_HALF):
                continue
            if not now.startswith(self._given):
                return None
            piece = now[len(self._given) :]
            self._before, self._held = self._held[:end], self._held[end:]
            self._given = self._decode(self._before)
            return piece
        return "" if len(self._held) <= _MAX_HELD else None


class _Phase(StrEnum):
    """What the next text of a turn belongs to."""

    START = "start"
    REASONING = "reasoning"
    TEXT = "text"
    OVER = "over"


class PartialTurn:
    """One turn as it is sampled. `feed` is called with its tokens, and `on_change` when there is more to show."""

    def __init__(
        self,
        decode: Decode,
        *,
        mark: str,
        created: int,
        prompt_tokens: int,
        stops: Sequence[str],
        call_starts: Sequence[str] | None = None,
        is_thinking: bool | None = None,
        tags: ReasoningTags = THINK,
    ) -> None:
        """`call_starts`: what tool calls begin with, None where there can be none, empty where that is unknown.

        `is_thinking`: the prompt has opened the reasoning. None: there is none, all is text.
        """
        self.mark, self.created, self.prompt_tokens = mark, created, prompt_tokens
        self.pieces: list[tuple[str, str]] = []
        """What can be shown, in order: "reasoning" or "text", and a piece of it."""
        self.on_change: Callable[[], None] | None = None
        self._decoder = IncrementalDecoder(decode)
        self._ids: list[int] = []
        self._tags = tags
        self._stops = tuple(stops)
        self._can_call = call_starts is not None
        self._call_starts = tuple(call_starts or ())
        self._phase = _Phase.TEXT if is_thinking is None else _Phase.REASONING if is_thinking else _Phase.START
        if call_starts is not None and not call_starts:
            self._phase = _Phase.OVER
        self._pending = ""
        self._spaces: list[str] = []
        """White space after what is pending, which is looked at with what comes after it."""
        self._is_empty = is_thinking is not None
        """Nothing of this phase was shown: white space before it is left out."""
        self._is_plain = is_thinking is None

    def feed(self, start: int, ids: Sequence[int]) -> None:
        """Tokens from the `start`-th on. Those that are told again change nothing; other ones in their place end it."""
        known = len(self._ids) - start
        if self._phase is _Phase.OVER:
            return
        if known < 0 or self._ids[start : start + len(ids)] != list(ids[:known]):
            self._phase = _Phase.OVER
            return
        new = ids[known:]
        self._ids += new
        piece = self._decoder.add(new) if new else ""
        if piece is None:
            self._phase = _Phase.OVER
        elif piece.isspace() and not self._pending.strip():
            self._spaces.append(piece)
        elif piece:
            count = len(self.pieces)
            self._pending = "".join((self._pending, *self._spaces, piece))
            self._spaces.clear()
            self._advance()
            if len(self.pieces) > count and self.on_change is not None:
                self.on_change()

    @property
    def is_plain(self) -> bool:
        """Whether something was shown as text, and no reasoning came before it: then all of the turn is text."""
        return self._is_plain and bool(self.pieces)

    def _advance(self) -> None:
        stop = _find(self._pending, self._stops)
        if stop >= 0:
            self._pending = self._pending[:stop]
        if self._phase is _Phase.START:
            self._start()
        if self._phase is _Phase.REASONING:
            self._reason()
        if self._phase is _Phase.TEXT:
            self._speak()
        if stop >= 0:
            self._phase = _Phase.OVER

    def _start(self) -> None:
        begun = self._pending.lstrip()
        if self._tags.open.startswith(begun):
            return
        if begun.startswith(self._tags.open):
            self._phase, self._pending = _Phase.REASONING, begun[len(self._tags.open) :]
        elif self._can_call and self._pending[0].isspace():
            self._phase = _Phase.OVER  # whether that belongs to the text depends on whether a call follows
        else:
            self._phase, self._is_empty, self._is_plain = _Phase.TEXT, False, True

    def _reason(self) -> None:
        if self._tags.open in self._pending:
            self._phase = _Phase.OVER  # a tag inside of what it opens
            return
        thought, end, said = self._pending.partition(self._tags.close)
        if not end:
            self._show("reasoning", (self._tags.open, self._tags.close))
            return
        self._pending = thought.rstrip()
        self._show("reasoning", (), is_last=True)
        self._phase, self._pending, self._is_empty = _Phase.TEXT, said, True

    def _speak(self) -> None:
        call = _find(self._pending, self._call_starts)
        if call >= 0:
            self._pending = self._pending[:call].rstrip()
            self._show("text", (), is_last=True)
            self._phase = _Phase.OVER
        else:
            self._show("text", self._call_starts)

    def _show(self, kind: str, tags: Sequence[str], *, is_last: bool = False) -> None:
        """Show what is pending, but for white space at its end and what may be the beginning of a tag or a stop."""
        text = self._pending.lstrip() if self._is_empty else self._pending
        end = len(text) if is_last else len(text) - _num_held(text, (*tags, *self._stops))
        shown = text[:end].rstrip()
        self._pending = text[len(shown) :]
        if shown:
            self._is_empty = False
            self.pieces.append((kind, shown))


def _find(text: str, tags: Sequence[str]) -> int:
    """Where the first of some tags begins; -1 where there is none."""
    return min((at for at in map(text.find, tags) if at >= 0), default=-1)


def _num_held(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    longest = max(map(len, tags), default=1) - 1
    return next(
        (
            size
            for size in range(min(longest, len(text)), 0, -1)
            if any(tag.startswith(text[len(text) - size :]) for tag in tags)
        ),
        0,
    )


def read_turn(
    completion: Completion,
    request: TurnRequest,
    row: Session,
    stops: Sequence[str],
    is_thinking: bool,
    partial: PartialTurn | None,
    mark: str,
) -> TurnReply:
    """A completion as an agent reads it; what was shown of it already, as `partial`, stays what it was."""
    parsed = row.split(completion, may_call=bool(request.tools) and request.choice is not Choice.NONE)
    reasoning, text = parsed.reasoning, parsed.content
    if not row.frames_turns and not (partial is not None and partial.is_plain):
        reasoning, text = split_reasoning(text, row.reasoning_tags, is_thinking)
    calls = tuple(
        ChatCall(call.name, _typed(call.arguments), f"call_{mark}{at}", call.id) for at, call in enumerate(parsed.calls)
    )
    stop_string = row.stop_string_of(completion, stops) if stops else ""
    finish = Finish.LENGTH if completion.stop is StopReason.LENGTH else Finish.CALLS if calls else Finish.STOP
    if stop_string in request.stop and stop_string and finish is Finish.STOP:
        finish = Finish.STOP_STRING
    sampled = len(completion.ids)
    created = int(time.time()) if partial is None else partial.created
    return TurnReply(mark, text, reasoning, calls, finish, stop_string, 0, sampled, created)


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
