"""Chunked logprobs and entropy: from hidden states, one tile of tokens × vocabulary at a time.

The full logits never exist at once. T tokens, D hidden size, V vocabulary, or the part of it in one tile. Owns the last
matrix product of a model and everything after it. Knows no model.
Invariant: at most a few buffers of one tile live at any moment; logits, sums and the gradient of the weight are fp32 or
wider whatever the dtype of the hidden states. Backward computes each tile again, unless there is only one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_VOCAB_TILE = 2048
"""Vocabulary of a tile on a CPU. Products of a few tokens with a whole vocabulary run at a fraction of its speed."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprob of each target, and the entropy of the distribution that it was drawn from."""

    logprobs_T: Tensor
    entropy_T: Tensor


@dataclass(frozen=True, slots=True)
class _Head:
    """How hidden states become log-probabilities: a product, a soft cap (in some models), a temperature."""

    weight_VD: Tensor
    bias_V: Tensor | None
    temperature: float
    softcap: float | None

    def logits(self, hidden_TD: Tensor, vocab: slice) -> Tensor:
        logits_TV = _multiply(hidden_TD, self.weight_VD[vocab].T)
        if self.bias_V is not None:
            logits_TV += self.bias_V[vocab]
        if self.softcap is not None:
            logits_TV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_TV if self.temperature == 1 else logits_TV.div_(self.temperature)

    def slope(self, logits_TV: Tensor) -> Tensor | float:
        """The derivative of logits by the product they come from."""
        if self.softcap is None:
            return 1 / self.temperature
        bent_TV = logits_TV * (self.temperature / self.softcap)
        return bent_TV.square_().neg_().add_(1).div_(self.temperature)


def logprobs_and_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    chunk: int = 1024,
    temperature: float = 1.0,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
) -> TokenLogprobs:
    """For hidden states that each predict one target. Gradients reach hidden states, weight and bias.

    Products have the dtype of the hidden states; a buffer takes at most chunk × V × 4 bytes.
    """
    assert chunk > 0 and temperature > 0, "a chunk has tokens, and greedy sampling has no logprobs"
    head: Any = _ChunkedHead
    if hidden_TD.is_cuda and hidden_TD.dtype != torch.float64:
        from treadle.algorithm.fused_head import (
            FusedHead as head,  # triton comes with it, which CPU machines do not have
        )
    return TokenLogprobs(*head.apply(hidden_TD, weight_VD, bias_V, targets_T, chunk, temperature, softcap))


@torch.no_grad()
def gradient_norms(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    chunk: int = 1024,
    temperature: float = 1.0,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The squared norm of the gradient of each target's logprob by the logits it comes from, T: 1 - 2π + Σπ².

    A plain path for every device, with a few buffers of chunk × V: it runs once a step, and only for one estimator.
    """
    head, hidden = _operands(hidden_TD, weight_VD, bias_V, temperature, softcap)
    norms_T = torch.empty(len(targets_T), dtype=_at_least_fp32(hidden_TD.dtype), device=hidden_TD.device)
    with _plain(hidden_TD):
        for at in _slices(len(targets_T), chunk):
            probs_TV = head.logits(hidden[at], slice(0, len(weight_VD)))
            probs_TV.sub_(probs_TV.logsumexp(1, keepdim=True)).exp_()
            # With 1 taken off the target, nothing cancels in the sum of squares.
            probs_TV.scatter_add_(1, targets_T[at, None], torch.full_like(probs_TV[:, :1], -1))
            norms_T[at] = probs_TV.square_().sum(1)
    return norms_T


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Tiles of the logits, tokens × vocabulary; tokens are the outer loop."""

    tokens: list[slice]
    vocab: list[slice]

    @classmethod
    def of(cls, targets_T: Tensor, vocab_size: int, chunk: int) -> "_Tiling":
        """Tiles of at most chunk × V logits."""
        width = vocab_size if targets_T.is_cuda else min(vocab_size, CPU_VOCAB_TILE)
        return cls(_slices(len(targets_T), chunk * vocab_size // width), _slices(vocab_size, width))

    @property
    def single(self) -> bool:
        return len(self.tokens) == len(self.vocab) == 1

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        return product(self.tokens, self.vocab)


@dataclass(slots=True)
class _Softmax:
    """Online softmax: sums over the vocabulary read so far, relative to the largest logit among them."""

    peak_T: Tensor
    total_T: Tensor
    """Of exp(logit - peak)."""
    weighted_T: Tensor
    """Of exp(logit - peak) * (logit - peak); never positive."""

    @classmethod
    def empty(cls, like_T: Tensor) -> "_Softmax":
        zeros_T = torch.zeros_like(like_T)
        lowest = torch.finfo(like_T.dtype).min  # not -inf, whose difference to itself is no number
        return cls(torch.full_like(like_T, lowest), zeros_T, zeros_T)

    def take(self, logits_TV: Tensor) -> None:
        """Add a tile of the vocabulary. Leaves its logits relative to the peak."""
        peak_T = torch.maximum(self.peak_T, logits_TV.amax(-1))
        drop_T = self.peak_T - peak_T
        fade_T = drop_T.exp()
        logits_TV -= peak_T[:, None]
        terms_TV = logits_TV.exp()
        # A sum that is still empty stays so: 0 * drop, whatever the drop.
        self.weighted_T = (self.weighted_T + drop_T * self.total_T) * fade_T
        self.total_T = self.total_T * fade_T + terms_TV.sum(-1)
        self.weighted_T += terms_TV.mul_(logits_TV).sum(-1)
        self.peak_T = peak_T


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        chunk: int,
        temperature: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.tiling = tiling = _Tiling.of(targets_T, len(weight_VD), chunk)
        head, hidden = _operands(hidden_TD, weight_VD, bias_V, temperature, softcap)
        logprobs_T = torch.empty(len(targets_T), dtype=_at_least_fp32(hidden_TD.dtype), device=hidden_TD.device)
        norm_T, entropy_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        kept_TV = None
        with _plain(hidden_TD):
            for at in tiling.tokens:
                softmax, chosen_T = _Softmax.empty(logprobs_T[at]), torch.zeros_like(logprobs_T[at])
                for vocab in tiling.vocab:
                    logits_TV = head.logits(hidden[at], vocab)
                    places_T, inside_T = _find(targets_T[at], vocab)
                    found_T = logits_TV.gather(1, places_T[:, None])[:, 0]
                    chosen_T = torch.where(inside_T, found_T, chosen_T)
                    softmax.take(logits_TV)
                log_total_T = softmax.total_T.log()
                logprobs_T[at] = chosen_T - softmax.peak_T - log_total_T
                # Both terms are positive, so nothing cancels.
                entropy_T[at] = log_total_T - softmax.weighted_T / softmax.total_T
                norm_T[at] = softmax.peak_T + log_total_T
                if tiling.single and any(ctx.needs_input_grad):
                    kept_TV = logits_TV.sub_(log_total_T[:, None])
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, targets_T, norm_T, entropy_T, kept_TV)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grad_T: Tensor | None, entropy_grad_T: Tensor | None) -> tuple[Tensor | None, ...]:
        if logprob_grad_T is None and entropy_grad_T is None:
            return (None,) * 7
        hidden_TD, weight_VD, bias_V, targets_T, norm_T, entropy_T, kept_TV = ctx.saved_tensors
        head, hidden = _operands(hidden_TD, weight_VD, bias_V, ctx.temperature, ctx.softcap)
        grads = _Gradients.zeros(ctx.needs_input_grad, hidden_TD, weight_VD, ctx.tiling)
        with _plain(hidden_TD):
            for at, vocab in ctx.tiling:
                log_TV = kept_TV if kept_TV is not None else head.logits(hidden[at], vocab).sub_(norm_T[at, None])
                slope = head.slope(log_TV + norm_T[at, None]) if head.softcap else head.slope(log_TV)
                target = _find(targets_T[at], vocab)
                grad_TV = _grad_of_logits(
                    log_TV, target, entropy_T[at], _part(logprob_grad_T, at), _part(entropy_grad_T, at)
                )
                grads.add(at, vocab, grad_TV.mul_(slope), head, hidden[at])
        return *grads.cast(hidden_TD, weight_VD, bias_V), None, None, None, None


def _grad_of_logits(
    log_TV: Tensor,
    target: tuple[Tensor, Tensor],
    entropy_T: Tensor,
    logprob_grad_T: Tensor | None,
    entropy_grad_T: Tensor | None,
) -> Tensor:
    """d loss / d logits, by the softmax's own derivatives. Leaves `log_TV` as it is."""
    grad_TV = log_TV.exp()
    if entropy_grad_T is not None:
        factor_TV = (log_TV + entropy_T[:, None]).mul_(-entropy_grad_T[:, None])
        if logprob_grad_T is not None:
            factor_TV -= logprob_grad_T[:, None]
        grad_TV *= factor_TV
    elif logprob_grad_T is not None:
        grad_TV *= -logprob_grad_T[:, None]
    if logprob_grad_T is not None:
        places_T, inside_T = target
        grad_TV.scatter_add_(1, places_T[:, None], torch.where(inside_T, logprob_grad_T, 0)[:, None])
    return grad_TV


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Gradients summed over tiles; None where autograd needs none."""

    hidden_TD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None

    @classmethod
    def zeros(cls, needed: tuple[bool, ...], hidden_TD: Tensor, weight_VD: Tensor, tiling: _Tiling) -> "_Gradients":
        wide = _at_least_fp32(hidden_TD.dtype)
        summed = wide if len(tiling.vocab) > 1 else hidden_TD.dtype
        return cls(
            torch.zeros_like(hidden_TD, dtype=summed) if needed[0] else None,
            torch.zeros_like(weight_VD, dtype=wide) if needed[1] else None,
            torch.zeros_like(weight_VD[:, 0], dtype=wide) if needed[2] else None,
        )

    def add(self, at: slice, vocab: slice, grad_TV: Tensor, head: _Head, hidden_TD: Tensor) -> None:
        if self.bias_V is not None:
            self.bias_V[vocab] += grad_TV.sum(0)
        narrow_TV = grad_TV.to(hidden_TD.dtype)
        if self.hidden_TD is not None:
            _accumulate(self.hidden_TD[at], narrow_TV, head.weight_VD[vocab])
        if self.weight_VD is not None:
            _accumulate(self.weight_VD[vocab], narrow_TV.T, hidden_TD)

    def cast(self, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = ((self.hidden_TD, hidden_TD), (self.weight_VD, weight_VD), (self.bias_V, bias_V))
        return tuple(None if grad is None or of is None else grad.to(of.dtype) for grad, of in pairs)


def _operands(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float, softcap: float | None
) -> tuple[_Head, Tensor]:
    """The head and the hidden states in the dtype of the products. CPUs have no narrow product with a wide
    result, so there products are wide altogether."""
    dtype = hidden_TD.dtype if hidden_TD.is_cuda else _at_least_fp32(hidden_TD.dtype)
    bias_V = None if bias_V is None else bias_V.to(_at_least_fp32(hidden_TD.dtype))
    return _Head(weight_VD.to(dtype), bias_V, temperature, softcap), hidden_TD.to(dtype)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, at least fp32."""
    wide = _at_least_fp32(left.dtype)
    return left @ right if left.dtype == wide else torch.mm(left, right, out_dtype=wide)


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(_multiply(left, right))


def _part(values_T: Tensor | None, at: slice) -> Tensor | None:
    return None if values_T is None else values_T[at]


def _find(targets_T: Tensor, vocab: slice) -> tuple[Tensor, Tensor]:
    """The column of each target in a tile of the vocabulary, and whether it is in it: else the column means nothing."""
    places_T = targets_T - vocab.start
    width = vocab.stop - vocab.start
    return places_T.clamp(0, width - 1), (places_T >= 0) & (places_T < width)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(at, min(at + size, length)) for at in range(0, length, size)]


def _plain(hidden_TD: Tensor) -> torch.autocast:
    """Autocast off: it would undo the choice of dtypes."""
    return torch.autocast(hidden_TD.device.type, enabled=False)
