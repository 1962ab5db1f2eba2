"""Anthropic messages: request JSON to a gateway request, replies to its response and its stream of events.

Pure functions; owns this dialect's words and nothing else. `/v1/messages` and `/v1/messages/count_tokens`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from treadle.gateway.event_stream import Event
from treadle.gateway.options import CONSTRAINED, rules
from treadle.gateway.request import (
    ChatCall,
    ChatMessage,
    Choice,
    ContextExhausted,
    Finish,
    ParsedTools,
    ReplySet,
    RequestError,
    Tool,
    TurnReply,
    TurnRequest,
    function_tool,
    read_blocks,
    read_call,
    read_call_id,
    read_conversation,
    read_count,
    read_list,
    read_model,
    read_object,
    read_stops,
    read_text,
    refuse,
)
from treadle.gateway.request_body import KnownTools

NAME = "messages"

OPTIONS = rules(
    ("model", "system", "messages", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"),
    {"output_format": CONSTRAINED, "mcp_servers": "this gateway calls no tools", "container": "there is none"},
    ("defer_loading",),
)

_PROVIDER_TOOL = re.compile(r"[a-z0-9_]+_\d{8}")
"""Types of tools that Anthropic runs end with a date."""

VOLATILE_PREFIXES = ("x-anthropic-billing-header:",)
"""System blocks that begin so change from request to request and are meant for Anthropic alone: they are left out."""


def parse_request(body: Mapping[str, Any], known: KnownTools | None = None) -> TurnRequest:
    """The request behind a body; RequestError for what it cannot mean or what is refused."""
    tools = (known or KnownTools()).parse(body.get("tools"), _parse_tools)
    options = OPTIONS.read(body).plus(tools.ignored)
    if read_object(body.get("output_config") or {}, "output_config").get("format"):
        raise refuse("output_config.format", CONSTRAINED)
    messages: list[ChatMessage] = []
    system = _read_system(body.get("system"), "system")
    if system:
        messages.append(ChatMessage("system", system))
    given = read_list(body.get("messages"), "messages")
    for at, item in enumerate(given):
        messages += _parse_message(read_object(item, f"messages[{at}]"), f"messages[{at}]", tools.deferred)
    if not given:
        raise RequestError("messages: at least one message is required")
    choice, forced = _parse_choice(body.get("tool_choice"))
    tools.check_choice(choice, forced)
    return TurnRequest(
        dialect=NAME,
        model=read_model(body.get("model")),
        messages=read_conversation(messages, "messages"),
        tools=tools.shown,
        max_tokens=read_count(body.get("max_tokens"), "max_tokens"),
        stop=read_stops(body.get("stop_sequences"), "stop_sequences"),
        choice=choice,
        forced_tool=forced,
        stream=bool(body.get("stream")),
        ignored=options.ignored,
        asked=options.asked,
        notes=tools.notes,
    )


def _read_system(value: Any, what: str) -> str:
    if isinstance(value, str):
        return value
    blocks = [
        block
        for block in read_list(value, what)
        if not (isinstance(block, dict) and str(block.get("text", "")).startswith(VOLATILE_PREFIXES))
    ]
    return read_blocks(blocks, what, ("text",))


def _parse_message(message: Mapping[str, Any], what: str, deferred: Mapping[str, Tool]) -> Iterator[ChatMessage]:
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        yield _parse_assistant(content, f"{what}.content")
    elif role == "system":
        yield ChatMessage("system", _read_system(content, f"{what}.content"))
    elif role == "user":
        yield from _parse_user(content, f"{what}.content", deferred)
    else:
        raise RequestError(f"{what}.role must be user or assistant")


def _parse_user(content: Any, what: str, deferred: Mapping[str, Tool]) -> Iterator[ChatMessage]:
    """Results of tools come as blocks of a user message: each is a message of its own, and the text one more."""
    if isinstance(content, str):
        yield ChatMessage("user", content)
        return
    texts: list[Any] = []
    for at, item in enumerate(read_list(content, what)):
        block = read_object(item, f"{what}[{at}]") if not isinstance(item, str) else {"type": "text", "text": item}
        if block.get("type") == "tool_result":
            if texts:
                yield ChatMessage("user", read_blocks(texts, what, ("text",)))
                texts = []
            text = _read_result(block.get("content"), f"{what}[{at}].content", deferred)
            yield ChatMessage("tool", text, call_id=read_call_id(block.get("tool_use_id"), f"{what}[{at}].tool_use_id"))
        else:
            texts.append(block)
    if texts:
        yield ChatMessage("user", read_blocks(texts, what, ("text",)))


def _read_result(content: Any, what: str, deferred: Mapping[str, Tool]) -> str:
    """The text of a tool's result. A reference to a tool is that tool's schema: from here on the model knows it."""
    if isinstance(content, str):
        return content
    blocks = []
    for item in read_list(content, what):
        if isinstance(item, dict) and item.get("type") == "tool_reference":
            name = read_text(item.get("tool_name"), f"{what}.tool_name")
            item = {"type": "text", "text": json.dumps(deferred.get(name, {"name": name}), ensure_ascii=False)}
        blocks.append(item)
    return read_blocks(blocks, what, ("text",))


def _parse_assistant(content: Any, what: str) -> ChatMessage:
    if isinstance(content, str):
        return ChatMessage("assistant", content)
    texts, reasoning, calls, marks = list[str](), list[str](), list[ChatCall](), list[str]()
    for at, item in enumerate(read_list(content, what)):
        block = read_object(item, f"{what}[{at}]")
        kind = block.get("type")
        if kind == "text":
            texts.append(read_text(block.get("text"), f"{what}[{at}].text"))
        elif kind == "thinking":
            reasoning.append(read_text(block.get("thinking"), f"{what}[{at}].thinking"))
            marks.append(read_text(block.get("signature"), f"{what}[{at}].signature"))
        elif kind == "redacted_thinking":
            marks.append(read_text(block.get("data"), f"{what}[{at}].data"))
        elif kind == "tool_use":
            calls.append(read_call(block.get("name"), block.get("input"), block.get("id"), f"{what}[{at}]"))
            marks.append(calls[-1].id)
        else:
            raise refuse(f"{what}[{at}].type", f"{kind!r} is not supported: this model reads text")
    return ChatMessage(
        "assistant",
        "\n".join(texts),
        tuple(calls),
        "\n".join(reasoning),
        marks=tuple(mark for mark in marks if mark),
    )


def _parse_tools(tools: Any) -> ParsedTools:
    """Functions; tools that Anthropic itself runs are left out, and noted."""
    shown: list[Tool] = []
    deferred: dict[str, Tool] = {}
    notes: dict[str, None] = {}
    functions: list[Mapping[str, Any]] = []
    for at, item in enumerate(read_list(tools, "tools")):
        tool = read_object(item, f"tools[{at}]")
        kind = tool.get("type") or "custom"
        if kind != "custom" and not _PROVIDER_TOOL.fullmatch(str(kind)):
            raise refuse(f"tools[{at}].type", f"{kind!r} is not supported: give functions")
        if kind != "custom":
            notes[f"the tool {kind} is run by its provider, and was left out"] = None
            continue
        functions.append(tool)
        made = function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))
        if tool.get("defer_loading"):
            deferred[made["function"]["name"]] = made
            notes["deferred tools are shown once a search has found them"] = None
        else:
            shown.append(made)
    return ParsedTools(tuple(shown), deferred, notes=tuple(notes), ignored=OPTIONS.read_tools(functions))


def _parse_choice(value: Any) -> tuple[Choice, str]:
    if value is None:
        return Choice.AUTO, ""
    chosen = read_object(value, "tool_choice")
    kind = chosen.get("type")
    if kind == "tool":
        name = read_text(chosen.get("name"), "tool_choice.name")
        if not name:
            raise refuse("tool_choice.name", "name the tool")
        return Choice.REQUIRED, name
    if kind not in ("auto", "none", "any"):
        raise refuse("tool_choice", f"{kind!r} is not one of auto, any, none, tool")
    return {"auto": Choice.AUTO, "none": Choice.NONE, "any": Choice.REQUIRED}[kind], ""


_FINISH = {
    Finish.STOP: "end_turn",
    Finish.STOP_STRING: "stop_sequence",
    Finish.LENGTH: "max_tokens",
    Finish.CALLS: "tool_use",
}


def format_response(answer: ReplySet) -> dict[str, Any]:
    """The whole response."""
    reply = answer.replies[0]
    usage = {**_USAGE, "input_tokens": reply.prompt_tokens, "output_tokens": reply.sampled_tokens}
    return {**_head(answer), "content": _format_blocks(reply), **_ending(reply), "usage": usage}


class MessageEvents:
    """The stream, event by event: blocks of thinking, text and calls, one after the other."""

    def __init__(self) -> None:
        self._number = -1
        self._kind = ""
        """Of the block that is open; empty where none is."""
        self._mark = ""

    def begin(self, answer: ReplySet) -> Iterator[Event]:
        reply = answer.replies[0]
        self._mark = reply.mark
        usage = {**_USAGE, "input_tokens": reply.prompt_tokens, "output_tokens": 0}
        start = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield "message_start", {"type": "message_start", "message": start}

    def add(self, at: int, kind: str, text: str) -> Iterator[Event]:
        if kind != self._kind:
            yield from self._close()
            empty = {"type": "text", "text": ""} if kind == "text" else _EMPTY_THINKING
            yield self._open(kind, empty)
        is_text = kind == "text"
        delta = {"type": "text_delta", "text": text} if is_text else {"type": "thinking_delta", "thinking": text}
        yield self._delta(delta)

    def end(self, answer: ReplySet) -> Iterator[Event]:
        reply = answer.replies[0]
        if self._number < 0 and not reply.calls:
            yield from self.add(0, "text", "")
        yield from self._close()
        for call in reply.calls:
            yield self._open("tool_use", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments_text()})
            yield from self._close()
        spent = {"output_tokens": reply.sampled_tokens}
        yield "message_delta", {"type": "message_delta", "delta": _ending(reply), "usage": spent}
        yield "message_stop", {"type": "message_stop"}

    def _open(self, kind: str, block: Mapping[str, Any]) -> Event:
        self._number, self._kind = self._number + 1, kind
        start = {"type": "content_block_start", "index": self._number, "content_block": block}
        return "content_block_start", start

    def _delta(self, delta: Mapping[str, Any]) -> Event:
        return "content_block_delta", {"type": "content_block_delta", "index": self._number, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if self._kind == "reasoning":
            yield self._delta({"type": "signature_delta", "signature": self._mark})
        if self._kind:
            yield "content_block_stop", {"type": "content_block_stop", "index": self._number}
        self._kind = ""


_EMPTY_THINKING = {"type": "thinking", "thinking": "", "signature": ""}


def open_events() -> MessageEvents:
    """A writer of one stream."""
    return MessageEvents()


_USAGE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _head(answer: ReplySet) -> dict[str, Any]:
    mark = answer.replies[0].mark
    return {"id": f"msg_{mark}", "type": "message", "role": "assistant", "model": answer.model}


def _ending(reply: TurnReply) -> dict[str, Any]:
    return {"stop_reason": _FINISH[reply.finish], "stop_sequence": reply.stop_string or None}


def _format_blocks(reply: TurnReply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": reply.mark})
    if reply.text or not (reply.calls or blocks):
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        given = call.arguments if isinstance(call.arguments, dict) else {}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


_TYPES = {
    "overloaded": "overloaded_error",
    "unauthorized": "authentication_error",
    "not_found": "not_found_error",
    "request_too_large": "request_too_large",
    "internal": "api_error",
    "over": "permission_error",
}


def format_error(error: RequestError) -> dict[str, Any]:
    """The body of an error response; in a stream, the data of the event."""
    words = str(error)
    if isinstance(error, ContextExhausted):
        words = f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
    return {"type": "error", "error": {"type": _TYPES.get(error.kind, "invalid_request_error"), "message": words}}


def format_error_events(error: RequestError) -> Iterator[tuple[str, dict[str, Any] | str]]:
    yield "error", format_error(error)
