"""Requests that an engine turns away before they can break it, and answers that are turned away before they are used.

Owns the wording: what was asked or answered, and what is possible. Knows no engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, isnan

from treadle.errors import EngineFailure, RequestRefused
from treadle.types import Completion, Request

MAX_LOGPROB = 1e-3
"""A logprob is 0 at most; sums of floats come out a little beyond."""


def refuse_unfit(request: Request, engine: str, *, room: int, num_words: int, max_stops: int | None = None) -> None:
    """Raise RequestRefused for what fits neither `room` tokens nor `num_words` words, or has too many stops."""
    ids, sampling = request.ids, request.sampling
    problem = None
    if not 0 < len(ids) < room:
        problem = f"a prompt of {len(ids)} tokens; 1 to {room - 1} fit rollout.max_model_len"
    elif min(ids) < 0 or max(ids) >= num_words:
        problem = f"token ids from {min(ids)} to {max(ids)}; the model knows 0 to {num_words - 1}"
    elif sampling.max_tokens < 1:
        problem = f"max_tokens {sampling.max_tokens}; ask for at least 1"
    elif max_stops is not None and len(sampling.stop_token_ids) > max_stops:
        problem = f"{len(sampling.stop_token_ids)} stop tokens; at most {max_stops} are possible"
    if problem:
        raise RequestRefused(f"{engine}: session {request.session}: {problem}")


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """What the answers of an engine must be like before anything is made of them: one pass in C for each column."""

    num_words: int | None = None
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
        if least < 0 or (self.num_words is not None and most >= self.num_words):
            known = "no negative ones" if self.num_words is None else f"0 to {self.num_words - 1}"
            return f"token ids from {least} to {most}; the model knows {known}"
        if not self.has_logprobs and all(map(isnan, completion.logprobs)):
            return ""
        return _find_bad_logprob(completion.logprobs) or _find_bad_logprob(completion.processed_logprobs)


def _find_bad_logprob(logprobs: Sequence[float]) -> str:
    if not logprobs or (isfinite(sum(logprobs)) and max(logprobs) <= MAX_LOGPROB):
        return ""
    at, bad = next((at, value) for at, value in enumerate(logprobs) if not (isfinite(value) and value <= MAX_LOGPROB))
    return f"a logprob of {bad} for token {at}; each is a finite number of 0 at most"
