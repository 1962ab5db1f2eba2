"""Request handling that all engines share: validation, stop strings, and partial completions.

`validate_request` rejects what would break an engine; it owns the wording. `StopStringFinder` ends an answer after the
token that completes a stop string: its ids stay, since they were sampled; its text ends before the stop string, as in
OpenAI's API and in vLLM. A window of the last tokens is enough, since the text of a window is a part of the whole text.

`SlicedRequest` is a long request that is sampled in slices, so that an engine process that dies loses few tokens:
every `save_s` seconds it is interrupted, hands its tokens over and goes on from there; by the Engine contract an
interrupted answer goes on as if nothing had happened. Invariant: only an abort from outside ends a request with ABORT;
interruptions between slices are never seen.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, isnan
from types import TracebackType
from typing import Any, Self

from treadle.engine.protocol import Decode, Engine
from treadle.errors import EngineFailure, RequestRefused, TreadleError
from treadle.types import Completion, Request, StopReason

MAX_LOGPROB = 1e-3
"""A logprob is 0 at most; sums of floats come out a little beyond."""


def validate_request(
    request: Request, engine: str, *, room: int, vocab_size: int, max_stops: int | None = None
) -> None:
    """Raise RequestRefused for more than `room` tokens, ids outside `vocab_size`, or too many stops."""
    ids, sampling = request.ids, request.sampling
    problem = None
    if not 0 < len(ids) < room:
        problem = f"a prompt of {len(ids)} tokens; 1 to {room - 1} fit rollout.max_model_len"
    elif min(ids) < 0 or max(ids) >= vocab_size:
        problem = f"token ids from {min(ids)} to {max(ids)}; the model knows 0 to {vocab_size - 1}"
    elif sampling.max_tokens < 1:
        problem = f"max_tokens {sampling.max_tokens}; ask for at least 1"
    elif max_stops is not None and len(sampling.stop_token_ids) > max_stops:
        problem = f"{len(sampling.stop_token_ids)} stop tokens; at most {max_stops} are possible"
    if problem:
        raise RequestRefused(f"{engine}: session {request.session}: {problem}")


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """What the answers of an engine must be like before anything is made of them: one pass in C for each column."""

    vocab_size: int | None = None
    """How many token ids the model knows; None where that is not known here."""
    has_logprobs: bool = True
    """Whether the engine measures logprobs; one that does not gives NaN for all of them."""

    def refuse_broken(self, completion: Completion, engine: str, session: str) -> None:
        """Raise EngineFailure for ids that no model samples, or columns that do not belong to them."""
        try:
            problem = self._find_problem(completion)
        except TypeError as error:
            problem = f"something else than numbers ({error})"
        if problem:
            raise EngineFailure(f"{engine}: session {session}: the engine answered with {problem}")

    def _find_problem(self, completion: Completion) -> str:
        ids = completion.ids
        columns = {"logprobs": completion.logprobs, "versions": completion.versions}
        if completion.processed_logprobs:
            columns["processed logprobs"] = completion.processed_logprobs
        for name, column in columns.items():
            if len(column) != len(ids):
                return f"{len(column)} {name} for {len(ids)} token ids"
        if not ids:
            return ""
        least, most = min(ids), max(ids)
        if least < 0 or (self.vocab_size is not None and most >= self.vocab_size):
            known = "no negative ones" if self.vocab_size is None else f"0 to {self.vocab_size - 1}"
            return f"token ids from {least} to {most}; the model knows {known}"
        if not self.has_logprobs and all(map(isnan, completion.logprobs)):
            return ""
        return _find_bad_logprob(completion.logprobs) or _find_bad_logprob(completion.processed_logprobs)


def _find_bad_logprob(logprobs: Sequence[float]) -> str:
    if not logprobs or (isfinite(sum(logprobs)) and max(logprobs) <= MAX_LOGPROB):
        return ""
    at, bad = next((at, value) for at, value in enumerate(logprobs) if not (isfinite(value) and value <= MAX_LOGPROB))
    return f"a logprob of {bad} for token {at}; each is a finite number of 0 at most"


_TOKENS_PER_LETTER = 4
"""A letter may take this many tokens, each a byte of it."""


class StopStringFinder:
    """Looks at the tokens of one answer as they come. `begun`: those that were sampled before."""

    def __init__(self, stops: Sequence[str], decode: Decode, begun: Sequence[int] = ()) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._width = _TOKENS_PER_LETTER * max(map(len, stops)) + 1
        self._window = list(begun[-self._width :])
        self.seen = 0
        """How many tokens it was fed."""

    def feed(self, ids: Sequence[int]) -> int | None:
        """How many of the tokens fed so far belong to the answer, once a stop string is complete."""
        for token in ids:
            self.seen += 1
            self._window.append(token)
            del self._window[: -self._width]
            text = self._decode(self._window)
            if any(stop in text for stop in self._stops):
                return self.seen
        return None


LoadDecode = Callable[[], Decode]
"""Loads the tokenizer of an engine that writes no text, for its first request with stop strings."""


async def load_stop_decode(load: LoadDecode | None, request: Request, engine: str) -> Decode:
    """What finds stop strings in tokens; RequestRefused where there is no tokenizer for it."""
    if load is None:
        raise RequestRefused(f"{engine}: session {request.session}: stop strings need an engine with a tokenizer")
    try:
        return await asyncio.to_thread(load)
    except (TreadleError, OSError, ValueError) as error:
        raise RequestRefused(
            f"{engine}: stop strings need the model's tokenizer, which cannot be read: {error}"
        ) from error


def trim_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string in it."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]


SAVE_S = 10.0
"""How often the tokens of a running request are brought to safety. It costs an engine one short prefill."""


class SlicedRequest:
    """One request that is sampled in slices. `rest` is what is still to be sampled, `saved` are the slices so far."""

    __slots__ = ("_requests", "_save_s", "_timer", "is_ended", "last", "rest", "saved")

    def __init__(self, requests: "PartialRequests", request: Request) -> None:
        self._requests = requests
        self._save_s = requests.save_s
        self._timer: asyncio.TimerHandle | None = None
        self.rest = request
        self.saved: list[Completion] = []
        self.last: Completion | None = None
        """The last slice, once there is one."""
        self.is_ended = False
        """Whether its end was ordered."""

    def __enter__(self) -> Self:
        self._requests.open[self] = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_timer()
        del self._requests.open[self]

    def start_timer(self, engine: Engine) -> None:
        """Have the slice that begins interrupted when it is time to save its tokens."""
        if self._save_s is not None:
            abort = partial(engine.abort, self.rest.session)
            spawn, loop = self._requests.spawn, asyncio.get_running_loop()
            self._timer = loop.call_later(self._save_s, lambda: spawn(abort()))
            self._save_s *= 2  # a request that is still in the queue must not be sent to its end for ever

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def add(self, part: Completion) -> None:
        """A slice has been sampled."""
        self.stop_timer()
        if part.stop is not StopReason.ABORT or self.is_ended:
            self.last = part
        elif part.ids:
            self.saved.append(part)
            self.rest, self._save_s = continuation_of(self.rest, part), self._requests.save_s


class PartialRequests:
    """The requests that are open (see the module). Without `save_s` they are only listed; `spawn` starts aborts."""

    def __init__(self, save_s: float | None, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self.save_s = save_s
        self.spawn = spawn
        self.open: dict[SlicedRequest, None] = {}

    def end(self, session: str | None = None) -> None:
        """The end of a session's requests, or of all, was ordered: the next interruption is that."""
        for request in self.open:
            if session is None or request.rest.session == session:
                request.is_ended = True
                request.stop_timer()


def continuation_of(request: Request, part: Completion) -> Request:
    """The rest of a request, after a part of it."""
    count, sampling = len(part.ids), request.sampling
    return replace(
        request,
        ids=request.ids + part.ids,
        sampling=replace(sampling, max_tokens=sampling.max_tokens - count),
        position=request.position + count,
        num_begun=request.num_begun + count,
    )


def join_completions(saved: Sequence[Completion], last: Completion, replica: str) -> Completion:
    """The parts of an answer as one. Its text is left to the caller: a part may end in mid-letter."""
    if not saved:
        return last
    parts = (*saved, last)
    processed: tuple[float, ...] = ()
    if any(part.processed_logprobs for part in parts):
        processed = tuple(value for part in parts for value in part.processed_logprobs or part.logprobs)
    return Completion(
        ids=tuple(token for part in parts for token in part.ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        versions=tuple(version for part in parts for version in part.versions),
        stop=last.stop,
        replica=last.replica or replica,
        calls=last.calls,
        preemptions=sum(part.preemptions for part in parts),
        processed_logprobs=processed,
        queue_s=sum(part.queue_s for part in parts),
    )
