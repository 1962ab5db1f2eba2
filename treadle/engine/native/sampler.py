"""Sampler: from logits to tokens, all rows at once, with sampling penalties.

Owns repetition, presence and frequency penalties, then temperature, min-p, top-k, top-p and the draw, in this order,
which is vLLM's. The draw walks the cumulative probabilities up to one number keyed by (stream, position): it needs no
state, and no noise for each entry of the vocabulary. Invariant: a row's token and logprob depend on that row's logits
and parameters alone.

Logprobs are those of the softmax of logits / temperature over the whole vocabulary, before penalties, min-p, top-k and
top-p: that is what a trainer can compute again. Where some row asks for one of these, `processed` are those of the
distribution that was sampled from. Greedy rows (temperature 0) take the most likely token and report its logprob at
temperature 1.

Penalties need to know which tokens a row has had: two tables of rows by vocabulary, allocated when the first request
asks for a penalty. The formulas are vLLM's: repetition looks at prompt and answer, presence and frequency at the answer
alone. A turn with a temperature of its own is a scale of the logits here, so that logprobs stay those of the run's
temperature.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_STEP = -0x61C8864680B583EB
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15
"""The numbers of `treadle.engine.rng`, as signed 64-bit integers."""


class SamplingMetadata(NamedTuple):
    """How each row is sampled: [B] each."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    stream: Tensor
    draw: Tensor
    min_p: Tensor


class SamplerOutput(NamedTuple):
    """[B] each."""

    ids: Tensor
    logprobs: Tensor
    processed: Tensor | None = None


def sample(
    logits: Tensor, metadata: SamplingMetadata, *, filtered: bool, penalized: Tensor | None = None
) -> SamplerOutput:
    """Draw one token for each row. `filtered`: some row asks for min-p, top-k or top-p.

    `penalized` are the logits to draw from, where they are others than `logits`.
    """
    greedy = metadata.temperature == 0
    temp = torch.where(greedy, 1.0, metadata.temperature).unsqueeze(1)
    scaled = logits.float() / temp
    logprobs = scaled.log_softmax(dim=-1)
    drawn = scaled if penalized is None else penalized.float() / temp
    weights = drawn.softmax(dim=-1)
    if filtered:
        weights = apply_top_k_top_p(weights, metadata.top_k, metadata.top_p, metadata.min_p)
    ids = torch.where(greedy, drawn.argmax(dim=-1), _draw(weights, metadata))
    found = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    if not filtered and penalized is None:
        return SamplerOutput(ids, found)
    return SamplerOutput(ids, found, _processed(drawn, weights, ids, greedy))


def _processed(drawn: Tensor, weights: Tensor, ids: Tensor, greedy: Tensor) -> Tensor:
    """The logprob of each drawn token in the distribution it was drawn from; of greedy rows in the whole softmax."""
    at = ids.unsqueeze(1)
    whole = drawn.log_softmax(dim=-1).gather(1, at).squeeze(1)
    kept = torch.where(greedy, 1.0, weights.sum(dim=-1))
    return whole - kept.log()


def _draw(weights: Tensor, metadata: SamplingMetadata) -> Tensor:
    """The first token at which the cumulative weight reaches the row's number: one with weight, since that is > 0."""
    cumulative = weights.cumsum(dim=-1)
    reach = (1 - units_at(metadata.stream, metadata.draw)) * cumulative[:, -1]
    found = torch.searchsorted(cumulative, reach.unsqueeze(1)).squeeze(1)
    return found.clamp_(max=weights.shape[1] - 1)


def apply_top_k_top_p(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
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
    """`rng.unit_at` for many rows, cut to the 24 bits that a float32 holds: always below 1."""
    bits = stream + (position + 1) * _STEP
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    bits = bits ^ _shift(bits, 31)
    return _shift(bits, 40).float() * 2.0**-24


def _shift(bits: Tensor, slots: int) -> Tensor:
    """To the right, with zeros coming in: torch's own shift keeps the sign."""
    return (bits >> slots) & ((1 << (64 - slots)) - 1)


PenaltyFactors = tuple[float, float, float, float]
"""Repetition, presence, frequency and scale: see `SamplingParams.penalties`."""


class Penalties:
    """The penalties of all rows. Tensors stay where they are, so that a CUDA graph can hold on to them."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.prompt_BV = torch.zeros((rows, vocab_size), dtype=torch.bool, device=device)
        self.counts_BV = torch.zeros((rows, vocab_size), dtype=torch.int32, device=device)
        self.repetition_B = torch.ones(rows, device=device)
        self.presence_B = torch.zeros(rows, device=device)
        self.frequency_B = torch.zeros(rows, device=device)
        self.scale_B = torch.ones(rows, device=device)

    def start(self, row: int, prompt: Sequence[int], answer: Sequence[int], factors: PenaltyFactors) -> None:
        """A row begins with these tokens."""
        device = self.prompt_BV.device
        self.prompt_BV[row] = False
        self.counts_BV[row] = 0
        self.prompt_BV[row, torch.tensor(prompt, dtype=torch.long, device=device)] = True
        if answer:
            ids = torch.tensor(answer, dtype=torch.long, device=device)
            self.counts_BV[row].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        self.set_factors(row, factors)

    def set_factors(self, row: int, factors: PenaltyFactors) -> None:
        self.repetition_B[row], self.presence_B[row], self.frequency_B[row], self.scale_B[row] = factors

    def apply(self, logits_BV: Tensor) -> Tensor:
        """The logits of the first rows, penalised, in float32."""
        rows = len(logits_BV)
        factors = (self.repetition_B[:rows], self.presence_B[:rows], self.frequency_B[:rows], self.scale_B[:rows])
        return apply_penalties(logits_BV, self.prompt_BV[:rows], self.counts_BV[:rows], factors)

    def count(self, ids_B: Tensor, active_B: Tensor) -> None:
        """Count the sampled tokens of active rows."""
        rows = len(ids_B)
        self.counts_BV[:rows].scatter_add_(1, ids_B.long().unsqueeze(1), active_B.to(torch.int32).unsqueeze(1))

    def move(self, source: Tensor, target: Tensor) -> None:
        factors = (self.repetition_B, self.presence_B, self.frequency_B, self.scale_B)
        for tensor in (self.prompt_BV, self.counts_BV, *factors):
            tensor[target] = tensor[source]


def apply_penalties(
    logits_BV: Tensor, prompt_BV: Tensor, counts_BV: Tensor, factors: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Tensor:
    """Logits after the penalties; `factors` are [B] each."""
    repetition, presence, frequency, scale = (factor.unsqueeze(1) for factor in factors)
    logits_BV = logits_BV.float()
    sampled_BV = counts_BV > 0
    lowered_BV = torch.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
    logits_BV = torch.where(sampled_BV | prompt_BV, lowered_BV, logits_BV)
    return (logits_BV - frequency * counts_BV - presence * sampled_BV) * scale
