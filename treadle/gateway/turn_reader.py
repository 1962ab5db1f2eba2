"""Turn reader: a completion as an agent reads it: reasoning, text, tool calls with ids of ours, and how it ended.

Text alone: what it makes of a turn changes no token. Invariant: what was shown of a turn before it was whole, as a
`PartialTurn`, stays what it was.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.data.reasoning_tags import ReasoningTags
from treadle.gateway.partial_turn import PartialTurn
from treadle.gateway.request import ChatCall, Choice, Finish, TurnReply, TurnRequest
from treadle.rollout.parsers import Untyped
from treadle.rollout.session import Session
from treadle.rollout.tools.validators import validate_anything
from treadle.types import Completion, StopReason


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
