"""OpenAI completions: `/v1/completions` of `treadle serve`, text that goes on with a text, without a chat template.

Owns this dialect's words, and the rows of its session: each prompt, and each of `n`, is a row of its own. Knows no
tools and no conversation. Invariant: whole, or as a stream, the text is that of the sampled tokens up to a stop string.

Waits: for the engine, with a comment in a stream every `KEEP_ALIVE_S`; a connection that is lost ends the sampling.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isnan
from secrets import token_hex
from typing import Any

from treadle.aio import cancel_and_wait
from treadle.errors import EngineFailure, Failure, RequestRefused, RowFull
from treadle.gateway import openai_chat
from treadle.gateway.conversation import Conversation
from treadle.gateway.event_stream import Event
from treadle.gateway.http_server import ConnectionLost, HttpConnection, HttpResponse
from treadle.gateway.options import CONSTRAINING, REFUSED, OptionRules, RequestOptions
from treadle.gateway.request import (
    ContextExhausted,
    Overloaded,
    RequestError,
    read_count,
    read_list,
    read_model,
    read_object,
    read_stops,
    refuse,
)
from treadle.gateway.request_body import read_body
from treadle.gateway.responses import KEEP_ALIVE_S, HttpError, encode_events, error_response
from treadle.gateway.turn_reader import PartialTurn
from treadle.rollout.session import Session
from treadle.types import Completion, StopReason

COMPLETIONS = "/v1/completions"
DEFAULT_MAX_TOKENS = 16
"""OpenAI's own."""

MAX_ROWS = 64
_AS_GIVEN = "tokens are sampled as the model gives them"
_OPTIONS = OptionRules(
    frozenset(["model", "prompt", "max_tokens", "stop", "n", "best_of", "logprobs", "stream", "stream_options"]),
    {
        "echo": "the prompt is not sent back",
        "suffix": "this model goes on with a text, and fills no gap",
        "stop_token_ids": REFUSED["stop_token_ids"],
        "prompt_logprobs": "the logprobs of sampled tokens are sent: use logprobs",
        **dict.fromkeys(CONSTRAINING, _AS_GIVEN),
    },
)
_FINISH = {StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.ABORT: "length"}

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionsRequest:
    """What a client asks for."""

    model: str
    prompts: tuple[Prompt, ...]
    max_tokens: int
    stop: tuple[str, ...]
    n: int
    has_logprobs: bool
    stream: bool
    include_usage: bool
    options: RequestOptions


def parse_request(body: Mapping[str, Any]) -> CompletionsRequest:
    """The request behind a body; RequestError for what it cannot mean or what is refused."""
    options = _OPTIONS.read(body)
    n, logprobs = read_count(body.get("n"), "n") or 1, body.get("logprobs")
    if (read_count(body.get("best_of"), "best_of") or n) != n:
        raise refuse("best_of", "every completion is sent: use n")
    if logprobs is not None and (type(logprobs) is not int or logprobs not in (0, 1)):
        raise refuse("logprobs", "0 or 1: engines report the logprob of the sampled token")
    prompts = _parse_prompts(body.get("prompt"))
    if n * len(prompts) > MAX_ROWS:
        raise refuse("n", f"at most {MAX_ROWS} completions")
    stream_options = read_object(body.get("stream_options") or {}, "stream_options")
    return CompletionsRequest(
        model=read_model(body.get("model")),
        prompts=prompts,
        max_tokens=read_count(body.get("max_tokens"), "max_tokens") or DEFAULT_MAX_TOKENS,
        stop=read_stops(body.get("stop"), "stop"),
        n=n,
        has_logprobs=logprobs is not None,
        stream=bool(body.get("stream")),
        include_usage=bool(stream_options.get("include_usage")),
        options=options,
    )


def _parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """A text, ids, or a list of either."""
    given = [value] if isinstance(value, str) else list(read_list(value, "prompt"))
    if given and all(type(item) is int for item in given):
        given = [given]
    prompts = tuple(tuple(item) if isinstance(item, list) else item for item in given)
    for at, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not (isinstance(prompt, tuple) and all(type(one) is int for one in prompt)):
            raise RequestError(f"prompt[{at}] must be a text or a list of token ids")
        if not prompt:
            raise RequestError(f"prompt[{at}] is empty: there is nothing to go on with")
    if not prompts:
        raise RequestError("prompt must be a text, a list of token ids, or a list of either")
    return prompts


@dataclass(slots=True, eq=False)
class CompletionsChoice:
    """One completion: its row, what of it can be shown, and how much of that was sent."""

    row: Session
    partial: PartialTurn
    prompt_tokens: int
    completion: Completion | None = None
    num_sent: int = 0
    sent: str = ""

    def text(self) -> str:
        assert self.completion is not None
        return self.completion.text

    def events(self) -> list[str]:
        """Pieces that can be shown and were not sent."""
        new = [text for _, text in self.partial.pieces[self.num_sent :]]
        self.num_sent += len(new)
        self.sent += "".join(new)
        return new


@dataclass(slots=True, eq=False)
class CompletionsAnswer:
    """The completions of one request."""

    request: CompletionsRequest
    choices: list[CompletionsChoice]
    id: str = field(default_factory=lambda: f"cmpl-{token_hex(10)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: Sequence[Mapping[str, Any]], usage: Any = None) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.request.model}
        return {**head, "choices": list(choices), "usage": usage}

    def usage(self) -> dict[str, int]:
        prompt = sum(choice.prompt_tokens for choice in self.choices[:: self.request.n])
        sampled = sum(len(choice.completion.ids) for choice in self.choices if choice.completion is not None)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def whole(self) -> dict[str, Any]:
        return self.body([self._choice(at, choice.text()) for at, choice in enumerate(self.choices)], self.usage())

    def _choice(self, at: int, text: str, *, is_last: bool = True) -> dict[str, Any]:
        """A choice; the last piece of it has its logprobs and how it ended."""
        choice = self.choices[at]
        ended = choice.completion if is_last else None
        logprobs = _logprobs(choice.row, ended) if ended is not None and self.request.has_logprobs else None
        finish = None if ended is None else _FINISH[ended.stop]
        return {"index": at, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def partial_events(self) -> Iterator[Event]:
        for at, choice in enumerate(self.choices):
            for text in choice.events():
                yield "", self.body([self._choice(at, text, is_last=False)])

    def last_events(self) -> Iterator[Event]:
        for at, choice in enumerate(self.choices):
            yield "", self.body([self._choice(at, choice.text()[len(choice.sent) :])])
        if self.request.include_usage:
            yield "", self.body([], self.usage())
        yield "", "[DONE]"


def _logprobs(row: Session, completion: Completion) -> dict[str, Any]:
    """Logprobs of the sampled tokens, also of those of a stop string that the text ends before."""
    tokens, offsets, length = [], [], 0
    for token in completion.ids:
        tokens.append(row.decode_token(token))
        offsets.append(length)
        length += len(tokens[-1])
    values = [None if isnan(value) else value for value in completion.logprobs]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


async def answer_completions(
    body: bytes, conversation: Conversation, session: Session, connection: HttpConnection
) -> None:
    """Answer a request: whole, or as a stream."""
    try:
        request = parse_request(await read_body(body))
        conversation.check_not_over()
        if connection.is_lost:
            raise ConnectionLost
        conversation.counters.requests["completions"] += 1
        conversation.counters.add_options(request.options.ignored, request.options.asked)
        answer = CompletionsAnswer(request, _open_choices(request, session))
    except RequestError as error:
        if error.option:
            conversation.counters.add_refused(error.option)
        await connection.respond(error_response(openai_chat, error))
        return
    work = asyncio.create_task(_sample_all(answer))
    conversation.begin_text(work)
    try:
        if request.stream:
            await connection.start_stream("text/event-stream")
        await _wait(work, answer, connection)
    finally:
        await cancel_and_wait(work)
    try:
        if work.cancelled():
            raise HttpError(503, "over", "the session has ended")
        work.result()
        changed = next((one for one in answer.choices if not one.text().startswith(one.sent)), None)
        if changed is not None:
            raise Overloaded("another replica went on with this answer otherwise than it began: send the request again")
    except RequestError as error:
        if request.stream:
            await connection.send(encode_events(openai_chat.format_error_events(error)), is_last=True)
        else:
            await connection.respond(error_response(openai_chat, error))
        return
    if request.stream:
        await connection.send(encode_events(answer.last_events()), is_last=True)
    else:
        await connection.respond(HttpResponse(200, answer.whole()))


def _open_choices(request: CompletionsRequest, session: Session) -> list[CompletionsChoice]:
    choices = []
    for prompt in request.prompts:
        for _ in range(request.n):
            try:
                row = session.text_root(prompt)
            except RowFull as full:
                raise ContextExhausted(full.num_tokens, full.max_tokens) from None
            stops = (*session.stop_strings, *request.stop)
            partial = PartialTurn(row.decode, mark="", created=0, prompt_tokens=row.length, stops=stops)
            choices.append(CompletionsChoice(row, partial, row.length))
    return choices


async def _sample_all(answer: CompletionsAnswer) -> None:
    """Sample every row; RequestError where an engine fails."""
    request = answer.request

    async def sample(choice: CompletionsChoice) -> None:
        stops: dict[str, Any] = {"stop": (*choice.row.stop_strings, *request.stop)} if request.stop else {}
        feed = choice.partial.feed if request.stream else None
        choice.completion = await choice.row.generate(max_tokens=request.max_tokens, on_tokens=feed, **stops)

    results = await asyncio.gather(*map(sample, answer.choices), return_exceptions=True)
    for error in results:
        if isinstance(error, RequestRefused):
            raise RequestError(str(error)) from error
        if isinstance(error, EngineFailure):
            raise Overloaded(f"the engine failed: {error}") from error
        if isinstance(error, Failure):
            raise RequestError(str(error)) from error
        if isinstance(error, BaseException):
            raise error


async def _wait(work: "asyncio.Task[None]", answer: CompletionsAnswer, connection: HttpConnection) -> None:
    """Until all is sampled; a stream is sent what can be shown meanwhile."""
    woken = asyncio.Event()
    connection.on_lost = lambda _: woken.set()
    work.add_done_callback(lambda _: woken.set())
    for choice in answer.choices:
        choice.partial.on_change = woken.set
    try:
        while not work.done():
            if connection.is_lost:
                raise ConnectionLost
            woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await woken.wait()
            if connection.is_lost:
                raise ConnectionLost
            if answer.request.stream and not work.done():
                await connection.send(encode_events(answer.partial_events()) or b": keep-alive\n\n")
    finally:
        connection.on_lost = None
