"""OpenAI responses: request JSON to a gateway request, replies to its response and its stream of events.

Pure functions; owns this dialect's words and nothing else. `/v1/responses`. Nothing is stored: a request brings its
whole conversation, and `previous_response_id` is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from treadle.gateway.event_stream import Event
from treadle.gateway.openai_chat import error_words, parse_choice
from treadle.gateway.openai_chat import format_error as format_error
from treadle.gateway.options import CONSTRAINED, rules
from treadle.gateway.request import (
    ChatMessage,
    Finish,
    NamespacedTool,
    ParsedTools,
    ReplySet,
    RequestError,
    Role,
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
    read_text,
    refuse,
)
from treadle.gateway.request_body import KnownTools

NAME = "responses"

OPTIONS = rules(
    (
        *("model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "stream_options"),
        *("text", "include"),
    ),
    {
        "previous_response_id": "nothing is stored here: send the whole input (store=false)",
        "conversation": "nothing is stored here: send the whole input (store=false)",
        "background": "answers come with the request",
        "prompt": "templates of prompts are stored elsewhere: send instructions and input",
        "max_tool_calls": "this gateway calls no tools",
    },
)
_INCLUDED = "reasoning.encrypted_content"
"""What answers have, asked for or not."""

_FREE_TEXT = ("custom", "local_shell", "shell", "apply_patch", "computer_use_preview", "computer")
"""Tools that the agent itself runs, and whose calls are items of their own."""

_TEXT_BLOCKS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


def parse_request(body: Mapping[str, Any], known: KnownTools | None = None) -> TurnRequest:
    """The request behind a body; RequestError for what it cannot mean or what is refused."""
    tools = (known or KnownTools()).parse(body.get("tools"), _parse_tools)
    options = OPTIONS.read(body).plus({**_read_include(body.get("include")), **tools.ignored})
    form = read_object(body.get("text") or {}, "text").get("format")
    if form is not None and read_object(form, "text.format").get("type", "text") != "text":
        raise refuse("text.format", CONSTRAINED)
    messages: list[ChatMessage] = []
    instructions = read_text(body.get("instructions"), "instructions")
    if instructions:
        messages.append(ChatMessage("system", instructions))
    given = body.get("input")
    if isinstance(given, str):
        messages.append(ChatMessage("user", given))
    else:
        messages += _parse_items(read_list(given, "input"), tools)
    if not given:
        raise RequestError("input must hold at least one item")
    choice, forced = parse_choice(body.get("tool_choice"))
    tools.check_choice(choice, forced)
    return TurnRequest(
        dialect=NAME,
        model=read_model(body.get("model")),
        messages=read_conversation(messages, "input"),
        tools=tools.shown,
        max_tokens=read_count(body.get("max_output_tokens"), "max_output_tokens"),
        choice=choice,
        forced_tool=forced,
        stream=bool(body.get("stream")),
        ignored=options.ignored,
        asked=options.asked,
        notes=tools.notes,
        namespaces=tools.namespaces,
    )


def _read_include(value: Any) -> dict[str, bool]:
    """What is to be part of the answer, and is not."""
    wanted = [read_text(item, f"include[{at}]") for at, item in enumerate(read_list(value, "include"))]
    if any("logprobs" in item for item in wanted):
        raise refuse("include", "logprobs are recorded with the trajectory and not sent")
    return {f"include.{item}": True for item in wanted if item != _INCLUDED}


def _parse_tools(tools: Any) -> ParsedTools:
    found = _ShownTools()
    found.add(read_list(tools, "tools"), "tools")
    ignored = OPTIONS.read_tools(found.functions)
    return ParsedTools(
        tuple(found.shown.values()), namespaces=found.namespaces, notes=tuple(found.notes), ignored=ignored
    )


@dataclass(slots=True)
class _ShownTools:
    """The functions of a request as they are found.

    A namespace is taken apart; where two tools have one name, the later is shown as NAMESPACE__NAME. Tools that the
    provider itself runs are left out. All of it is noted.
    """

    shown: dict[str, Tool] = field(default_factory=dict)
    namespaces: dict[str, NamespacedTool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    functions: list[Mapping[str, Any]] = field(default_factory=list)
    """As they were sent."""

    def add(self, tools: Sequence[Any], what: str, namespace: str = "") -> None:
        for at, item in enumerate(tools):
            tool = read_object(item, f"{what}[{at}]")
            kind = tool.get("type", "function")
            if kind == "function":
                self.functions.append(tool)
                name = read_text(tool.get("name"), f"{what}[{at}].name")
                label = f"{namespace}__{name}" if namespace and name in self.shown else name
                self.shown[label] = function_tool(label, tool.get("description"), tool.get("parameters"))
                if namespace:
                    self.namespaces[label] = NamespacedTool(namespace, name)
            elif kind == "namespace" and not namespace:
                name = read_text(tool.get("name"), f"{what}[{at}].name")
                self.notes.append(f"the tools of the namespace {name} are shown one by one")
                self.add(read_list(tool.get("tools"), f"{what}[{at}].tools"), f"{what}[{at}].tools", name)
            elif kind in _FREE_TEXT:
                name = read_text(tool.get("name"), f"{what}[{at}].name") or kind
                self.notes.append(f"the tool {name} of type {kind} is not called with JSON, and was left out")
            else:
                self.notes.append(f"the tool {kind} is run by its provider, and was left out")


def _parse_items(items: Sequence[Any], tools: ParsedTools) -> list[ChatMessage]:
    """Messages. Reasoning, text and calls of one turn come as items in a row, and are one assistant message."""
    runs: list[list[ChatMessage]] = []
    for at, item in enumerate(items):
        what = f"input[{at}]"
        entry = read_object(item, what)
        kind = entry.get("type", "message")
        if kind == "item_reference":
            raise refuse(f"{what}.type", "nothing is stored here: send the item itself (store=false)")
        if kind == "function_call_output":
            output = read_blocks(entry.get("output"), f"{what}.output", _TEXT_BLOCKS)
            runs.append([ChatMessage("tool", output, call_id=read_call_id(entry.get("call_id"), f"{what}.call_id"))])
            continue
        part = _parse_part(entry, kind, what, tools)
        if part.role == "assistant" and runs and runs[-1][0].role == "assistant":
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_join(run) if len(run) > 1 else run[0] for run in runs]


def _parse_part(item: Mapping[str, Any], kind: Any, what: str, tools: ParsedTools) -> ChatMessage:
    identity = tuple(mark for mark in (item.get("id"), item.get("encrypted_content")) if isinstance(mark, str) and mark)
    if kind == "message":
        role = _ROLES.get(read_text(item.get("role"), f"{what}.role"))
        if role is None:
            raise RequestError(f"{what}.role must be one of {', '.join(_ROLES)}")
        text = read_blocks(item.get("content"), f"{what}.content", _TEXT_BLOCKS)
        return ChatMessage(role, text, marks=identity if role == "assistant" else ())
    if kind == "reasoning":
        thought = read_blocks(item.get("content"), f"{what}.content", _TEXT_BLOCKS)
        summary = read_blocks(item.get("summary"), f"{what}.summary", _TEXT_BLOCKS)
        return ChatMessage("assistant", reasoning=thought or summary, marks=identity)
    if kind == "function_call":
        namespace = read_text(item.get("namespace"), f"{what}.namespace")
        name = tools.label(namespace, read_text(item.get("name"), f"{what}.name"))
        call = read_call(name, item.get("arguments"), item.get("call_id"), what)
        return ChatMessage("assistant", calls=(call,), marks=(*identity, call.id))
    raise refuse(f"{what}.type", f"{kind!r} is not supported")


def _join(parts: Sequence[ChatMessage]) -> ChatMessage:
    return ChatMessage(
        "assistant",
        "\n".join(part.text for part in parts if part.text),
        tuple(call for part in parts for call in part.calls),
        "\n".join(part.reasoning for part in parts if part.reasoning),
        marks=tuple(mark for part in parts for mark in part.marks),
    )


def format_response(answer: ReplySet) -> dict[str, Any]:
    """The whole response."""
    reply = answer.replies[0]
    return _whole(
        answer, _format_items(reply, answer.namespaces), "incomplete" if reply.finish is Finish.LENGTH else "completed"
    )


class ResponseEvents:
    """The stream, event by event, numbered: items of reasoning, text and calls, one after the other."""

    def __init__(self) -> None:
        self._numbers = count()
        self._at = -1
        self._mark = ""
        self._kind = ""
        """Of the item that is open, "reasoning" or "text"; empty where none is."""
        self._pieces: list[str] = []
        """Its text so far."""

    def begin(self, answer: ReplySet) -> Iterator[Event]:
        self._mark = answer.replies[0].mark
        begun = _whole(answer, [], "in_progress")
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def add(self, at: int, kind: str, text: str) -> Iterator[Event]:
        if kind != self._kind:
            yield from self._close()
            self._kind, self._pieces = kind, []
            yield from self._open(self._item(""))
            yield self._item_event(*_PART_ADDED[kind])
        self._pieces.append(text)
        name, fields = _TEXT_DELTA[kind]
        yield self._item_event(name, {**fields, "delta": text})

    def end(self, answer: ReplySet) -> Iterator[Event]:
        reply = answer.replies[0]
        if not reply.text and not reply.calls:
            yield from self.add(0, "text", "")
        yield from self._close()
        for item in _format_items(reply, answer.namespaces):
            if item["type"] == "function_call":
                yield from self._open(item)
                given = item["arguments"]
                yield self._item_event("response.function_call_arguments.delta", {"delta": given})
                done = {"arguments": given, "name": item["name"]}
                yield self._item_event("response.function_call_arguments.done", done)
                yield self._event("response.output_item.done", output_index=self._at, item=item)
        whole = format_response(answer)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _open(self, item: Mapping[str, Any]) -> Iterator[Event]:
        self._at += 1
        self._id = item["id"]
        yield self._event("response.output_item.added", output_index=self._at, item=_empty(item))

    def _close(self) -> Iterator[Event]:
        """The last events of an item of text or reasoning, if one is open."""
        if self._kind:
            text = "".join(self._pieces)
            item = self._item(text)
            part = (item["summary"] if self._kind == "reasoning" else item["content"])[0]
            name, fields = _TEXT_DONE[self._kind]
            yield self._item_event(name, {**fields, "text": text})
            name, fields = _PART_DONE[self._kind]
            yield self._item_event(name, {**fields, "part": part})
            yield self._event("response.output_item.done", output_index=self._at, item=item)
        self._kind = ""

    def _item(self, text: str) -> dict[str, Any]:
        return (_reasoning_item if self._kind == "reasoning" else _message_item)(self._mark, text)

    def _event(self, kind: str, **fields: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _item_event(self, kind: str, fields: Mapping[str, Any]) -> Event:
        return self._event(kind, item_id=self._id, output_index=self._at, **fields)


_PART_ADDED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "reasoning": (
        "response.reasoning_summary_part.added",
        {"summary_index": 0, "part": {"type": "summary_text", "text": ""}},
    ),
    "text": (
        "response.content_part.added",
        {"content_index": 0, "part": {"type": "output_text", "text": "", "annotations": [], "logprobs": []}},
    ),
}
_TEXT_DELTA: Mapping[str, tuple[str, dict[str, Any]]] = {
    "reasoning": ("response.reasoning_summary_text.delta", {"summary_index": 0}),
    "text": ("response.output_text.delta", {"content_index": 0, "logprobs": []}),
}
_TEXT_DONE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "reasoning": ("response.reasoning_summary_text.done", {"summary_index": 0}),
    "text": ("response.output_text.done", {"content_index": 0, "logprobs": []}),
}
_PART_DONE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "reasoning": ("response.reasoning_summary_part.done", {"summary_index": 0}),
    "text": ("response.content_part.done", {"content_index": 0}),
}


def open_events() -> ResponseEvents:
    """A writer of one stream."""
    return ResponseEvents()


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item as it starts."""
    blank: dict[str, dict[str, Any]] = {
        "function_call": {"arguments": ""},
        "reasoning": {"summary": []},
        "message": {"content": []},
    }
    status = {} if item["type"] == "reasoning" else {"status": "in_progress"}
    return {**item, **blank[item["type"]], **status}


def _format_items(reply: TurnReply, namespaces: Mapping[str, NamespacedTool]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        items.append(_reasoning_item(reply.mark, reply.reasoning))
    if reply.text or not reply.calls:
        items.append(_message_item(reply.mark, reply.text))
    for at, call in enumerate(reply.calls):
        item = {"id": f"fc_{reply.mark}{at}", "type": "function_call", "status": "completed", "call_id": call.id}
        tool = namespaces.get(call.name)
        named = {"name": call.name} if tool is None else {"name": tool.name, "namespace": tool.namespace}
        items.append({**item, **named, "arguments": call.arguments_text()})
    return items


def _reasoning_item(mark: str, text: str) -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": text}]
    return {"id": f"rs_{mark}", "type": "reasoning", "summary": summary, "encrypted_content": mark}


def _message_item(mark: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    message = {"id": f"msg_{mark}", "type": "message", "role": "assistant", "status": "completed"}
    return {**message, "content": content}


def _whole(answer: ReplySet, items: Sequence[Mapping[str, Any]], status: str) -> dict[str, Any]:
    reply = answer.replies[0]
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
    }
    return {
        **_head(reply.mark, reply.created, answer.model),
        "status": status,
        "output": list(items),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "tools": [{"type": "function", **tool["function"], "strict": False} for tool in answer.tools],
        "usage": None if status == "in_progress" else usage,
    }


def _head(mark: str, created: int, model: str) -> dict[str, Any]:
    return {
        "id": f"resp_{mark}",
        "object": "response",
        "created_at": created,
        "model": model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "top_p": None,
        "store": False,
    }


def format_error_events(error: RequestError) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """An error in the middle of a stream: a response that failed."""
    code = "context_length_exceeded" if error.kind == "context" else "server_error"  # others end programs for good
    response = {**_head("0", 0, ""), "status": "failed", "output": [], "usage": None, "tools": []}
    failed = {**response, "error": {"code": code, "message": error_words(error)}}
    yield "response.failed", {"type": "response.failed", "sequence_number": 0, "response": failed}
