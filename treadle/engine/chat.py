"""Chat completions as OpenAI-compatible servers speak them: what we write, and how we read the answer.

Owns the two translations, as pure functions. Refuses to know HTTP.
Invariant: a logprob is kept only beside the id the server sampled. Where a server names no ids, they are made from the
text and every logprob is NaN: good to read, count and score, and impossible to train on unnoticed.
"""

import json
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

from treadle.engine.noise import bits_at, stream_of
from treadle.engine.protocol import Encode
from treadle.errors import EngineFailure, RequestRefused
from treadle.types import Completion, Request, StopReason, ToolCall

_STOPS = {
    **dict.fromkeys(("stop", "tool_calls", "function_call", "eos", "eos_token", "end_turn"), StopReason.STOP),
    "length": StopReason.LENGTH,
    "abort": StopReason.ABORT,
}
_TOKEN_ID = "token_id:"


def write_body(request: Request, model: str, extra_body: Mapping[str, Any]) -> str:
    """The request as JSON. `extra_body` adds and replaces fields; null leaves one out.

    With `max_tokens: null` there, the limit goes as `max_completion_tokens`, which newer OpenAI models insist on.
    """
    if not request.messages:
        raise RequestRefused("an OpenAI-compatible endpoint takes messages, and this request has only ids")
    sampling = request.sampling
    body = {
        "model": model,
        "messages": request.messages,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else None,
        "min_p": sampling.min_p or None,
        "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "stop": sampling.stop or None,
        # the endpoint must not draw the same sample n times
        "seed": bits_at(stream_of(request), request.position) & 0x7FFFFFFF,
        "logprobs": True,
        "tools": request.tools or None,
        **extra_body,
    }
    if body["max_tokens"] is None:
        body["max_completion_tokens"] = sampling.max_tokens
    return json.dumps({field: value for field, value in body.items() if value is not None}, default=dict)


def read_completion(reply: Any, request: Request, *, replica: str, encode: Encode) -> Completion:
    """The first choice of a reply."""
    try:
        choice = reply["choices"][0]
        finish, message = choice["finish_reason"], choice["message"]
        text, made = _text(message), message.get("tool_calls") or ()
        written = "\n".join([text] * bool(text) + [_written(call["function"]) for call in made])
        ids, logprobs = _tokens(choice, written, encode)
        calls = tuple(_call(call) for call in made)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineFailure(f"answered with no chat completion: {json.dumps(reply)[:200]}") from error
    if finish == "content_filter":
        raise RequestRefused("the endpoint's content filter withheld the answer")
    if finish not in _STOPS:
        raise EngineFailure(f"answered with finish_reason {finish!r}, which says nothing about the answer")
    ids, logprobs = ids[: request.sampling.max_tokens], logprobs[: request.sampling.max_tokens]
    return Completion(ids, logprobs, (0,) * len(ids), _STOPS[finish], text, replica, calls)


def _tokens(choice: Mapping[str, Any], text: str, encode: Encode) -> tuple[tuple[int, ...], tuple[float, ...]]:
    entries: Sequence[Mapping[str, Any]] = (choice.get("logprobs") or {}).get("content") or ()
    ids = choice.get("token_ids")
    if ids is None and entries and all(entry["token"].startswith(_TOKEN_ID) for entry in entries):
        ids = [int(entry["token"].removeprefix(_TOKEN_ID)) for entry in entries]
    if ids is None:
        made = tuple(encode(text))
        return made, (nan,) * len(made)
    if len(entries) != len(ids):
        return tuple(ids), (nan,) * len(ids)
    return tuple(ids), tuple(float(entry["logprob"]) for entry in entries)


def _text(message: Mapping[str, Any]) -> str:
    text = message.get("content") or message.get("refusal") or ""
    return text if isinstance(text, str) else "".join(part["text"] for part in text)


def _call(call: Mapping[str, Any]) -> ToolCall:
    """A call the server parsed. What its arguments are is still the model's word: they may be no JSON at all."""
    name, arguments = call["function"]["name"], call["function"]["arguments"] or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        return ToolCall(name, {}, call.get("id") or "", f"arguments are not JSON: {error}")
    if not isinstance(parsed, dict):
        return ToolCall(name, {}, call.get("id") or "", f"arguments must be an object, got {type(parsed).__name__}")
    return ToolCall(name, parsed, call.get("id") or "")


def _written(function: Mapping[str, Any]) -> str:
    """About what the model wrote to make this call: its tokens count, though the server does not show them."""
    arguments = function["arguments"] or "{}"
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'
