"""OpenAI chat completions: request JSON to a gateway request, replies to its response and its stream of events.

Pure functions; owns this dialect's words and nothing else. `/v1/chat/completions`.
"""

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
    Role,
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

NAME = "chat"

OPTIONS = rules(
    (
        *("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "n", "stream"),
        *("stream_options", "response_format", "modalities"),
    ),
    {
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "this model writes text",
        "web_search_options": "there is no search behind this gateway",
    },
)

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_BLOCKS = ("text", "refusal")
MAX_CHOICES = 64


def parse_request(body: Mapping[str, Any], known: KnownTools | None = None) -> TurnRequest:
    """The request behind a body; RequestError for what it cannot mean or what is refused."""
    tools = (known or KnownTools()).parse(body.get("tools"), _parse_tools)
    options = OPTIONS.read(body).plus(tools.ignored)
    form = body.get("response_format")
    if form is not None and read_object(form, "response_format").get("type", "text") != "text":
        raise refuse("response_format", CONSTRAINED)
    if set(read_list(body.get("modalities"), "modalities")) - {"text"}:
        raise refuse("modalities", "this model writes text")
    n = read_count(body.get("n"), "n") or 1
    if n > MAX_CHOICES:
        raise refuse("n", f"at most {MAX_CHOICES} choices")
    choice, forced = parse_choice(body.get("tool_choice"))
    tools.check_choice(choice, forced)
    stream_options = body.get("stream_options") or {}
    messages = [
        _parse_message(read_object(item, f"messages[{at}]"), f"messages[{at}]")
        for at, item in enumerate(read_list(body.get("messages"), "messages"))
    ]
    return TurnRequest(
        dialect=NAME,
        model=read_model(body.get("model")),
        messages=read_conversation(messages, "messages"),
        tools=tools.shown,
        max_tokens=read_count(body.get("max_completion_tokens"), "max_completion_tokens")
        or read_count(body.get("max_tokens"), "max_tokens"),
        stop=read_stops(body.get("stop"), "stop"),
        n=n,
        choice=choice,
        forced_tool=forced,
        stream=bool(body.get("stream")),
        include_usage=bool(read_object(stream_options, "stream_options").get("include_usage")),
        ignored=options.ignored,
        asked=options.asked,
    )


def _parse_message(message: Mapping[str, Any], what: str) -> ChatMessage:
    role = _ROLES.get(read_text(message.get("role"), f"{what}.role"))
    if role is None:
        raise RequestError(f"{what}.role must be one of {', '.join(_ROLES)}")
    text = read_blocks(message.get("content"), f"{what}.content", _TEXT_BLOCKS)
    if role == "tool":
        return ChatMessage("tool", text, call_id=read_call_id(message.get("tool_call_id"), f"{what}.tool_call_id"))
    if role != "assistant":
        return ChatMessage(role, text)
    calls = tuple(
        _parse_call(read_object(item, f"{what}.tool_calls[{at}]"), f"{what}.tool_calls[{at}]")
        for at, item in enumerate(read_list(message.get("tool_calls"), f"{what}.tool_calls"))
    )
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return ChatMessage(
        "assistant",
        text or read_text(message.get("refusal"), f"{what}.refusal"),
        calls,
        reasoning if isinstance(reasoning, str) else "",
        marks=tuple(call.id for call in calls if call.id),
    )


def _parse_call(call: Mapping[str, Any], what: str) -> ChatCall:
    if call.get("type", "function") != "function":
        raise refuse(f"{what}.type", "only functions can be called")
    function = read_object(call.get("function"), f"{what}.function")
    return read_call(function.get("name"), function.get("arguments"), call.get("id"), what)


def _parse_tools(tools: Any) -> ParsedTools:
    shown = []
    given = [read_object(item, f"tools[{at}]") for at, item in enumerate(read_list(tools, "tools"))]
    for at, tool in enumerate(given):
        if tool.get("type", "function") != "function":
            raise refuse(f"tools[{at}].type", f"{tool.get('type')!r} is not supported: give functions")
        function = read_object(tool.get("function"), f"tools[{at}].function")
        shown.append(function_tool(function.get("name"), function.get("description"), function.get("parameters")))
    return ParsedTools(tuple(shown), ignored=OPTIONS.read_tools(given))


def parse_choice(value: Any) -> tuple[Choice, str]:
    """What `tool_choice` asks for, and the tool that it names."""
    if value is None:
        return Choice.AUTO, ""
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise refuse("tool_choice", f"{value!r} is not one of auto, none, required")
        return Choice(value), ""
    chosen = read_object(value, "tool_choice")
    named = chosen.get("function") or chosen
    name = named.get("name") if isinstance(named, dict) else None
    if chosen.get("type") != "function" or not isinstance(name, str):
        raise refuse("tool_choice", f"{chosen.get('type')!r} is not supported: name a function")
    return Choice.REQUIRED, name


_FINISH = {
    Finish.STOP: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.CALLS: "tool_calls",
}


def format_response(answer: ReplySet) -> dict[str, Any]:
    """The whole response."""
    return {
        **_head(answer, "chat.completion"),
        "choices": [
            {
                "index": at,
                "message": _format_message(reply),
                "logprobs": None,
                "finish_reason": _FINISH[reply.finish],
            }
            for at, reply in enumerate(answer.replies)
        ],
        "usage": _format_usage(answer),
    }


class ChatEvents:
    """The stream: event names are not used, and the last event is the text [DONE]."""

    def begin(self, answer: ReplySet) -> Iterator[Event]:
        self._head = _head(answer, "chat.completion.chunk")
        self._usage: dict[str, Any] = {"usage": None} if answer.include_usage else {}
        for at in range(len(answer.replies)):
            yield self._chunk(at, {"role": "assistant", "content": ""})

    def add(self, at: int, kind: str, text: str) -> Iterator[Event]:
        yield self._chunk(at, {"content" if kind == "text" else "reasoning_content": text})

    def end(self, answer: ReplySet) -> Iterator[Event]:
        for at, reply in enumerate(answer.replies):
            for number, call in enumerate(_format_calls(reply)):
                opened = {**call, "index": number, "function": {**call["function"], "arguments": ""}}
                yield self._chunk(at, {"tool_calls": [opened]})
                arguments = {"index": number, "function": {"arguments": call["function"]["arguments"]}}
                yield self._chunk(at, {"tool_calls": [arguments]})
            yield self._chunk(at, {}, _FINISH[reply.finish])
        if answer.include_usage:
            yield "", {**self._head, "choices": [], "usage": _format_usage(answer)}
        yield "", "[DONE]"

    def _chunk(self, at: int, delta: Mapping[str, Any], finish: str | None = None) -> Event:
        choice = {"index": at, "delta": delta, "logprobs": None, "finish_reason": finish}
        return "", {**self._head, "choices": [choice], **self._usage}


def open_events() -> ChatEvents:
    """A writer of one stream."""
    return ChatEvents()


def _head(answer: ReplySet, kind: str) -> dict[str, Any]:
    first = answer.replies[0]
    return {"id": f"chatcmpl-{first.mark}", "object": kind, "created": first.created, "model": answer.model}


def _format_message(reply: TurnReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    message["refusal"] = None
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = _format_calls(reply)
    return message


def _format_calls(reply: TurnReply) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_text()}}
        for call in reply.calls
    ]


def _format_usage(answer: ReplySet) -> dict[str, Any]:
    prompt, sampled = answer.replies[0].prompt_tokens, sum(reply.sampled_tokens for reply in answer.replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


_TYPES = {
    "overloaded": "server_error",
    "unauthorized": "authentication_error",
    "internal": "server_error",
}
_CODES = {
    "context": "context_length_exceeded",
    "unauthorized": "invalid_api_key",
    "overloaded": "server_is_overloaded",
    "over": "session_is_over",
    "not_found": "not_found",
}


def error_words(error: RequestError) -> str:
    """The message of an error, as OpenAI words it where programs read it."""
    if isinstance(error, ContextExhausted):
        return (
            f"This model's maximum context length is {error.max_tokens} tokens. However, your messages resulted in "
            f"{error.num_tokens} tokens. Please reduce the length of the messages."
        )
    return str(error)


def format_error(error: RequestError) -> dict[str, Any]:
    """The body of an error response; in a stream, the data of the event."""
    fields = {"type": _TYPES.get(error.kind, "invalid_request_error"), "param": error.option or None}
    return {"error": {"message": error_words(error), **fields, "code": _CODES.get(error.kind)}}


def format_error_events(error: RequestError) -> Iterator[tuple[str, dict[str, Any] | str]]:
    yield "", format_error(error)
