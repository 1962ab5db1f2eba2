"""From logits to tokens, all rows at once.

Owns temperature, min-p, top-k, top-p and the draw, in this order, which is vLLM's. The draw walks the cumulative
probabilities up to one number keyed by (stream, position), so it needs no state and no noise for each word of the
vocabulary. Invariant: a row's token and logprob depend on that row's logits and parameters alone.

Logprobs are those of the softmax of logits / temperature over the whole vocabulary, before penalties, min-p, top-k and
top-p: that is what a trainer can compute again. Where some row asks for one of these, `processed` are those of the
distribution that was sampled from. Greedy rows (temperature 0) take the most likely token and report its logprob at
temperature 1.

Shapes: B rows, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_STEP = -0x61C8864680B583EB
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15
"""The numbers of `treadle.engine.noise`, as signed 64-bit integers."""


class Controls(NamedTuple):
    """How each row is sampled: [B] each."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    stream: Tensor
    draw: Tensor
    min_p: Tensor


class Sampled(NamedTuple):
    """[B] each."""

    ids: Tensor
    logprobs: Tensor
    processed: Tensor | None = None


def sample(logits: Tensor, controls: Controls, *, filtered: bool, penalized: Tensor | None = None) -> Sampled:
    """Draw one token for each row. `filtered`: some row asks for min-p, top-k or top-p.

    `penalized` are the logits to draw from, where they are others than `logits`.
    """
    greedy = controls.temperature == 0
    heat = torch.where(greedy, 1.0, controls.temperature).unsqueeze(1)
    scaled = logits.float() / heat
    logprobs = scaled.log_softmax(dim=-1)
    drawn = scaled if penalized is None else penalized.float() / heat
    weights = drawn.softmax(dim=-1)
    if filtered:
        weights = keep_likely(weights, controls.top_k, controls.top_p, controls.min_p)
    ids = torch.where(greedy, drawn.argmax(dim=-1), _draw(weights, controls))
    found = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    if not filtered and penalized is None:
        return Sampled(ids, found)
    return Sampled(ids, found, _processed(drawn, weights, ids, greedy))


def _processed(drawn: Tensor, weights: Tensor, ids: Tensor, greedy: Tensor) -> Tensor:
    """The logprob of each drawn token in the distribution it was drawn from; of greedy rows in the whole softmax."""
    at = ids.unsqueeze(1)
    whole = drawn.log_softmax(dim=-1).gather(1, at).squeeze(1)
    kept = torch.where(greedy, 1.0, weights.sum(dim=-1))
    return whole - kept.log()


def _draw(weights: Tensor, controls: Controls) -> Tensor:
    """The first token at which the cumulative weight reaches the row's number: one with weight, since that is > 0."""
    cumulative = weights.cumsum(dim=-1)
    reach = (1 - units_at(controls.stream, controls.draw)) * cumulative[:, -1]
    found = torch.searchsorted(cumulative, reach.unsqueeze(1)).squeeze(1)
    return found.clamp_(max=weights.shape[1] - 1)


def keep_likely(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Weights with 0 outside each row's min-p, top-k and top-p; the most likely token always stays."""
    weights = torch.where(weights < min_p.unsqueeze(1) * weights.amax(dim=-1, keepdim=True), 0.0, weights)
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[1], device=weights.device)
    limit = torch.where(top_k > 0, top_k, weights.shape[1]).unsqueeze(1)
    within = rank < limit
    kept = torch.where(within, ordered, 0.0)
    before = kept.cumsum(dim=-1) - kept
    inside = within & (before < top_p.unsqueeze(1) * kept.sum(dim=-1, keepdim=True))
    inside[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, order, torch.where(inside, ordered, 0.0))


def units_at(stream: Tensor, position: Tensor) -> Tensor:
    """`noise.unit_at` for many rows, cut to the 24 bits that a float32 holds: always below 1."""
    bits = stream + (position + 1) * _STEP
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    bits = bits ^ _shift(bits, 31)
    return _shift(bits, 40).float() * 2.0**-24


def _shift(bits: Tensor, places: int) -> Tensor:
    """To the right, with zeros coming in: torch's own shift keeps the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
