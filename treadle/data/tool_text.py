"""Tools in the text of messages, for chat templates that ignore `tools`.

Owns the fallback: schemas stand in the system message, calls of earlier turns in the text of their assistant message,
and results in user messages, all in the format of Hermes, which the parser `hermes` reads. Knows no template.
Invariant: messages without tools are left alone; roles that a template may not know (`tool`) are not used.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT = "hermes"
"""The tool-call format that the fallback teaches; `rollout.multi_turn.format` must be the same."""

_BEFORE = """# Tools

You may call one or more of these functions to answer. Each is described by a JSON schema:

<tools>
"""
_AFTER = """
</tools>

To call a function, write a JSON object with its name and its arguments inside <tool_call></tool_call> tags:

<tool_call>
{"name": "<name of the function>", "arguments": {"<name of an argument>": <value>}}
</tool_call>

You may write several calls one after the other. The results come back inside <tool_response></tool_response> tags."""


def write_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, has_system: bool = True
) -> list[dict[str, Any]]:
    """The conversation with its tools in the text: of the system message, or of the first by a user."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    block = f"{_BEFORE}{schemas}{_AFTER}"
    written: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            response = f"<tool_response>\n{_text(message)}\n</tool_response>"
            if written and written[-1].get("responses"):
                written[-1]["content"] += f"\n{response}"
            else:
                written.append({"role": "user", "content": response, "responses": True})
        else:
            written.append(_write_calls(message))
    plain = [{key: value for key, value in message.items() if key != "responses"} for message in written]
    return _introduce(plain, block, has_system)


def _write_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its calls as text."""
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    texts = [
        "<tool_call>\n"
        + json.dumps({"name": call.get("name"), "arguments": call.get("arguments")}, ensure_ascii=False)
        + "\n</tool_call>"
        for call in calls
    ]
    if texts:
        kept["content"] = "\n".join([*([_text(message)] if _text(message) else []), *texts])
    return kept


def _introduce(messages: list[dict[str, Any]], block: str, has_system: bool) -> list[dict[str, Any]]:
    first = messages[0]
    if first["role"] == "system" and has_system:
        return [{**first, "content": f"{_text(first)}\n\n{block}"}, *messages[1:]]
    if has_system:
        return [{"role": "system", "content": block}, *messages]
    at = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        return messages
    changed = {**messages[at], "content": f"{block}\n\n{_text(messages[at])}"}
    return [*messages[:at], changed, *messages[at + 1 :]]


def _text(message: Mapping[str, Any]) -> str:
    """A content as text; OpenAI's list of parts is joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
