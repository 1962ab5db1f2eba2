"""Logprobs and entropy from hidden states, a chunk of tokens at a time: the full logits never exist at once.

T tokens, D hidden size, V vocabulary. Owns the last matrix product of a model and everything after it. Knows no model.
Invariant: at most a few chunk × V buffers live at any moment; logits, sums and the gradient of the weight are at least
fp32 whatever the number format of the hidden states. Backward computes each chunk again, unless there is only one.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of each target: its logprob, and the entropy of the distribution that it was drawn from."""

    logprobs_T: Tensor
    entropy_T: Tensor


@dataclass(frozen=True, slots=True)
class _Head:
    """How hidden states become log-probabilities: a product, a soft cap (in some models), a temperature."""

    weight_VD: Tensor
    bias_V: Tensor | None
    temperature: float
    softcap: float | None

    def logits(self, hidden_TD: Tensor) -> Tensor:
        logits_TV = _multiply(hidden_TD, self.weight_VD.T)
        if self.bias_V is not None:
            logits_TV += self.bias_V
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

    The number format of the hidden states is that of the products; `chunk` tokens take chunk × V × 4 bytes a buffer.
    """
    assert chunk > 0 and temperature > 0, "a chunk has tokens, and greedy sampling has no logprobs"
    logprobs_T, entropy_T = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden_TD, weight_VD, bias_V, targets_T, chunk, temperature, softcap
    )
    return TokenLogprobs(logprobs_T, entropy_T)


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
        ctx.chunk, ctx.temperature, ctx.softcap = chunk, temperature, softcap
        head, hidden = _operands(hidden_TD, weight_VD, bias_V, temperature, softcap)
        logprobs_T = torch.empty(len(targets_T), dtype=_wide(hidden_TD.dtype), device=hidden_TD.device)
        norm_T, entropy_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        kept_TV = None
        with _plain(hidden_TD):
            for at in _chunks(len(targets_T), chunk):
                shifted_TV = head.logits(hidden[at])
                peak_T = shifted_TV.amax(-1)
                shifted_TV -= peak_T[:, None]
                terms_TV = shifted_TV.exp()
                total_T = terms_TV.sum(-1)
                log_total_T = total_T.log()
                logprobs_T[at] = shifted_TV.gather(1, targets_T[at, None])[:, 0] - log_total_T
                # Both terms are positive, so nothing cancels.
                entropy_T[at] = log_total_T - terms_TV.mul_(shifted_TV).sum(-1) / total_T
                norm_T[at] = peak_T + log_total_T
                if len(targets_T) <= chunk and any(ctx.needs_input_grad):
                    kept_TV = shifted_TV.sub_(log_total_T[:, None])
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, targets_T, norm_T, entropy_T, kept_TV)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grad_T: Tensor | None, entropy_grad_T: Tensor | None) -> tuple[Tensor | None, ...]:
        if logprob_grad_T is None and entropy_grad_T is None:
            return (None,) * 7
        hidden_TD, weight_VD, bias_V, targets_T, norm_T, entropy_T, kept_TV = ctx.saved_tensors
        head, hidden = _operands(hidden_TD, weight_VD, bias_V, ctx.temperature, ctx.softcap)
        wide = _wide(hidden_TD.dtype)
        grads = _Gradients.zeros(ctx.needs_input_grad, hidden_TD, weight_VD, wide)
        with _plain(hidden_TD):
            for at in _chunks(len(targets_T), ctx.chunk):
                log_TV = kept_TV if kept_TV is not None else head.logits(hidden[at]).sub_(norm_T[at, None])
                slope = head.slope(log_TV + norm_T[at, None]) if head.softcap else head.slope(log_TV)
                grad_TV = _grad_of_logits(
                    log_TV, targets_T[at], entropy_T[at], _part(logprob_grad_T, at), _part(entropy_grad_T, at)
                )
                grads.add(at, grad_TV.mul_(slope), head, hidden[at])
        return *grads.cast(hidden_TD, weight_VD, bias_V), None, None, None, None


def _grad_of_logits(
    log_TV: Tensor, targets_T: Tensor, entropy_T: Tensor, logprob_grad_T: Tensor | None, entropy_grad_T: Tensor | None
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
        grad_TV.scatter_add_(1, targets_T[:, None], logprob_grad_T[:, None])
    return grad_TV


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Sums over chunks; None where nobody asks."""

    hidden_TD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None

    @classmethod
    def zeros(cls, needed: tuple[bool, ...], hidden_TD: Tensor, weight_VD: Tensor, wide: torch.dtype) -> "_Gradients":
        return cls(
            torch.empty_like(hidden_TD) if needed[0] else None,
            torch.zeros_like(weight_VD, dtype=wide) if needed[1] else None,
            torch.zeros_like(weight_VD[:, 0], dtype=wide) if needed[2] else None,
        )

    def add(self, at: slice, grad_TV: Tensor, head: _Head, hidden_TD: Tensor) -> None:
        if self.bias_V is not None:
            self.bias_V.add_(grad_TV.sum(0))
        narrow_TV = grad_TV.to(hidden_TD.dtype)
        if self.hidden_TD is not None:
            self.hidden_TD[at] = _multiply(narrow_TV, head.weight_VD)
        if self.weight_VD is not None:
            _accumulate(self.weight_VD, narrow_TV.T, hidden_TD)

    def cast(self, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = ((self.hidden_TD, hidden_TD), (self.weight_VD, weight_VD), (self.bias_V, bias_V))
        return tuple(None if grad is None or of is None else grad.to(of.dtype) for grad, of in pairs)


def _operands(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float, softcap: float | None
) -> tuple[_Head, Tensor]:
    """The head and the hidden states in the number format of the products. CPUs have no narrow product with a wide
    result, so there products are wide altogether."""
    dtype = hidden_TD.dtype if hidden_TD.is_cuda else _wide(hidden_TD.dtype)
    bias_V = None if bias_V is None else bias_V.to(_wide(hidden_TD.dtype))
    return _Head(weight_VD.to(dtype), bias_V, temperature, softcap), hidden_TD.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, at least fp32."""
    wide = _wide(left.dtype)
    return left @ right if left.dtype == wide else torch.mm(left, right, out_dtype=wide)


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(_multiply(left, right))


def _part(values_T: Tensor | None, at: slice) -> Tensor | None:
    return None if values_T is None else values_T[at]


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(at * chunk, (at + 1) * chunk) for at in range(math.ceil(length / chunk))]


def _plain(hidden_TD: Tensor) -> torch.autocast:
    """Autocast would undo the choice of number formats."""
    return torch.autocast(hidden_TD.device.type, enabled=False)
