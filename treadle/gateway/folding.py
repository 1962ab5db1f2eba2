"""Folding: messages in the shape that chat templates take, whatever order and roles an agent sends.

Owns the rules for what templates refuse: system messages at the start become one; later ones, and users in a row, are
folded into one user message; assistant messages in a row are joined; a tool's result gets the name of its tool. Each
rule that was applied is noted. Works on the messages between two sampled turns, so that what was folded stays the same
when the conversation goes on. Knows no template and no token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from treadle.gateway.request import ChatCall, ChatMessage, Role
from treadle.types import Message


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
