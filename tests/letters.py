"""The smallest tokenizer there is, and requests written with it: one id for each character."""

from collections.abc import Sequence
from dataclasses import replace

from treadle.types import Request, SamplingParams

STOP = 3
"""The stop token; no character has this id."""


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(at) for at in ids)


def ask(
    text: str = "hello",
    *,
    uid: str = "task",
    sample: int = 0,
    max_tokens: int = 64,
    position: int = 0,
    seed: int = 0,
    stops: tuple[int, ...] = (STOP,),
) -> Request:
    """A request as a session would make it."""
    sampling = SamplingParams(max_tokens, stop_token_ids=stops, seed=seed)
    messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": text})
    return Request(uid, sample, tuple(encode(text)), sampling, position, messages)


def go_on(request: Request, ids: Sequence[int]) -> Request:
    """The request that continues after `ids` were sampled."""
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(ids))
    return replace(
        request,
        ids=(*request.ids, *ids),
        sampling=sampling,
        position=request.position + len(ids),
        num_begun=request.num_begun + len(ids),
    )
