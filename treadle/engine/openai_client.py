"""OpenAI-compatible endpoint as an engine, for evaluation and data generation.

Owns requests on their way, and the two translations: a request to a chat-completions body, a reply to a completion.
HTTP itself is `http_client`. Refuses to train: the weights belong to the server.
Invariants: what comes back is a completion, an abort or an `EngineFailure` that names the address. A logprob is kept
only beside the id the server sampled; where a server names no ids, they are made from the text and every logprob is
NaN: good to read, count and score, and impossible to train on unnoticed.

A completion has the server's text, and its ids and logprobs where the server gives them (vLLM does with
`extra_body: {return_token_ids: true}`). Its versions are 0. Tool calls that the server parsed are in `calls` and not in
the text. An aborted request has no tokens: they are in the server until the answer is whole.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING, Any, Self

from treadle.config.rollout import OpenAIConfig, RolloutConfig
from treadle.engine.in_flight import InFlightRequest, InFlightRequests, PauseGate, WaitInterrupted
from treadle.engine.protocol import ConfirmedWeights, Encode, WeightUpdate
from treadle.engine.rng import bits_at, stream_of
from treadle.errors import ConfigError, EngineFailure, Mistake, MisuseError, RequestRefused
from treadle.types import Completion, Request, StopReason, ToolCall

if TYPE_CHECKING:
    from treadle.engine.http_client import HttpClient

_STOPS = {
    **dict.fromkeys(("stop", "tool_calls", "function_call", "eos", "eos_token", "end_turn"), StopReason.STOP),
    "length": StopReason.LENGTH,
    "abort": StopReason.ABORT,
}
_TOKEN_ID = "token_id:"


def to_chat_body(request: Request, model: str, extra_body: Mapping[str, Any]) -> str:
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


def from_chat_reply(reply: Any, request: Request, *, replica: str, encode: Encode) -> Completion:
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


class OpenAIEngine:
    """An endpoint, one of its models, and the requests in flight there."""

    def __init__(
        self,
        openai: OpenAIConfig,
        rollout: RolloutConfig,
        *,
        endpoint: "HttpClient",
        model: str,
        name: str,
        encode: Encode,
    ) -> None:
        self.name = name
        self.version = 0
        self.model = model
        self._openai = openai
        self._rollout = rollout
        self._endpoint = endpoint
        self._encode = encode
        self._gate = PauseGate()
        self._in_flight = InFlightRequests()

    @classmethod
    async def create(
        cls,
        openai: OpenAIConfig,
        rollout: RolloutConfig,
        *,
        encode: Encode,
        name: str = "openai",
        api_key: str | None = None,
    ) -> Self:
        """Reach the endpoint and settle the model, or raise. `api_key` is the value itself."""
        from treadle.engine.http_client import HttpClient

        advice = {status: text.format(api_key_env=openai.api_key_env) for status, text in _ADVICE.items()}
        address, key = _address(openai), _key(openai, api_key)
        endpoint = HttpClient(address, api_key=key, advice=advice, connections=rollout.max_num_seqs)
        try:
            offered = await _models(endpoint, rollout.limits.launch_timeout_s, rollout.failures.request_retries)
            model = openai.model or next(iter(offered), None)
            if model is None:
                raise EngineFailure(f"{endpoint.address}/models names no model: {_ADVICE[404]}")
        except BaseException:
            await endpoint.close()
            raise
        return cls(openai, rollout, endpoint=endpoint, model=model, name=name, encode=encode)

    async def generate(self, request: Request) -> Completion:
        session = request.session
        if self._gate.shut and not await self._gate.admit(session):
            return self._aborted()
        body = to_chat_body(request, self.model, self._openai.extra_body)
        try:
            with InFlightRequest(self._in_flight, session, asyncio.get_running_loop().time()):
                reply = await self._ask(body)
        except WaitInterrupted:
            return self._aborted()
        return self._read(reply, request)

    async def abort(self, session: str | None = None) -> None:
        self._gate.abort(session)
        self._in_flight.interrupt("aborted", session)

    async def pause(self) -> None:
        self._gate.pause()
        self._in_flight.interrupt("aborted")

    async def resume(self) -> None:
        self._gate.resume()

    async def health(self) -> None:
        await _models(self._endpoint, self._rollout.limits.request_timeout_s, retries=0)

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        raise MisuseError(
            f"the weights behind {self._endpoint.address} cannot be changed from here: "
            "rollout.name=openai evaluates and generates data; to train, use native or vllm"
        )

    async def close(self) -> None:
        if self._gate.close(f"engine {self.name} is closed"):
            self._in_flight.interrupt("aborted")
            await self._in_flight.drain(self._rollout.limits.close_timeout_s)
            await self._endpoint.close()

    async def _ask(self, body: str) -> Any:
        timeout_s, retries = self._rollout.limits.request_timeout_s, self._rollout.failures.request_retries
        return await self._endpoint.call("POST", "chat/completions", body, timeout_s=timeout_s, retries=retries)

    def _read(self, reply: Any, request: Request) -> Completion:
        try:
            return from_chat_reply(reply, request, replica=self.name, encode=self._encode)
        except EngineFailure as failure:
            raise type(failure)(f"{self._endpoint.address}/chat/completions: {failure}") from failure

    def _aborted(self) -> Completion:
        return Completion((), (), (), StopReason.ABORT, replica=self.name)


_MOVED = "the endpoint has moved: set rollout.openai.base_url to where it is now"
_ADVICE = {
    **dict.fromkeys((301, 302, 307, 308), _MOVED),
    400: "rollout.openai.extra_body replaces fields of the request; null leaves one out",
    401: "set the environment variable {api_key_env} to a key of this endpoint",
    403: "the key in {api_key_env} may not do this: check the key and the model",
    404: "check rollout.openai.base_url, which mostly ends in /v1, and rollout.openai.model",
    422: "rollout.openai.extra_body replaces fields of the request; null leaves one out",
}


def _address(openai: OpenAIConfig) -> str:
    if openai.base_url is None or not openai.base_url.startswith(("http://", "https://")):
        problem = (
            "rollout.name=openai needs the address of an endpoint"
            if openai.base_url is None
            else (f"must start with http:// or https://, got {openai.base_url!r}")
        )
        fix = "for example rollout.openai.base_url=http://localhost:8000/v1"
        raise ConfigError([Mistake("rollout.openai.base_url", problem, openai.base_url, fix=fix)])
    return openai.base_url


def _key(openai: OpenAIConfig, api_key: str | None) -> str | None:
    """The key as a header can carry it. A line break from a file is no part of it."""
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        problem = f"the key in the environment variable {openai.api_key_env} holds characters that no key has"
        raise ConfigError([Mistake("rollout.openai.api_key_env", problem, openai.api_key_env)])
    return key or None


async def _models(endpoint: "HttpClient", timeout_s: float, retries: int) -> list[str]:
    """The models on offer; none where the server keeps no list, since it does answer."""
    reply = await endpoint.call("GET", "models", timeout_s=timeout_s, retries=retries, may_lack=True)
    if reply is None:
        return []
    try:
        return [entry["id"] for entry in reply["data"]]
    except (KeyError, TypeError) as error:
        raise EngineFailure(f"{endpoint.address}/models answered with no list of models") from error
