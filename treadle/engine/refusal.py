"""Requests that an engine turns away before they can break it, for everyone it serves.

Owns the wording: what was asked, and what is possible. Knows no engine.
"""

from treadle.errors import RequestRefused
from treadle.types import Request


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
