"""Fused output head on a GPU: logprobs and entropy from hidden states; one Triton kernel forward, one backward.

The same as `logprobs` computes, with a fraction of its passes over memory. Owns the two kernels and the loop over
chunks; imported on CUDA only, as triton comes with it. Logits and sums are float32; gradients of logits have the dtype
of the hidden states, since they go straight into the next products.

T tokens, D hidden size, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit  # type: ignore[untyped-decorator]
def _shape(x, temperature, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    if CAPPED:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
    return x / temperature


@triton.jit  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]
    logits,
    targets,
    logprobs,
    entropies,
    norms,
    temperature,
    softcap,
    vocab_size,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    v = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), -1.0e30, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + v < vocab_size
        x = _shape(tl.load(logits + start + v, mask=inside, other=0.0), temperature, softcap, CAPPED)
        higher = tl.where(inside, tl.maximum(tops, x), tops)
        fade = tl.exp(tops - higher)
        term = tl.where(inside, tl.exp(x - higher), 0.0)
        # Where a lane has seen nothing yet its sums are 0, whatever they are multiplied with.
        weighted = tl.where(sums > 0, (weighted + (tops - higher) * sums) * fade, 0.0) + term * (x - higher)
        sums = sums * fade + term
        tops = higher
    peak = tl.max(tops, axis=0)
    drop = tops - peak
    fade = tl.exp(drop)
    total = tl.sum(sums * fade, axis=0)
    mean = tl.sum(tl.where(sums > 0, (weighted + drop * sums) * fade, 0.0), axis=0) / total
    chosen = _shape(tl.load(logits + tl.load(targets + row)), temperature, softcap, CAPPED)
    tl.store(logprobs + row, chosen - peak - tl.log(total))
    tl.store(entropies + row, tl.log(total) - mean)
    tl.store(norms + row, peak + tl.log(total))


@triton.jit  # type: ignore[untyped-decorator]
def _differentiate(  # type: ignore[no-untyped-def]
    logits,
    targets,
    entropies,
    norms,
    logprob_grads,
    entropy_grads,
    grads,
    temperature,
    softcap,
    vocab_size,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    LOGPROB: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < vocab_size
    raw = tl.load(logits + row * vocab_size + v, mask=inside, other=0.0)
    x = _shape(raw, temperature, softcap, CAPPED)
    log = x - tl.load(norms + row)
    grad = tl.zeros((BLOCK,), tl.float32)
    if ENTROPY:
        grad -= tl.load(entropy_grads + row) * (log + tl.load(entropies + row))
    if LOGPROB:
        grad -= tl.load(logprob_grads + row)
    grad *= tl.exp(log)
    if LOGPROB:
        grad += tl.where(v == tl.load(targets + row), tl.load(logprob_grads + row), 0.0)
    grad /= temperature
    if CAPPED:
        bent = x * temperature / softcap
        grad *= 1.0 - bent * bent
    tl.store(grads + row * vocab_size + v, grad.to(grads.dtype.element_ty), mask=inside)


class FusedHead(torch.autograd.Function):
    """Hidden states [T, D], weight [V, D], bias [V] or None and targets [T] to logprobs and entropy [T] each."""

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
        weight = weight_VD.to(hidden_TD.dtype)
        logprobs_T, entropy_T, norm_T = (
            torch.empty(len(targets_T), dtype=torch.float32, device=hidden_TD.device) for _ in range(3)
        )
        kept_TV = None
        with torch.autocast("cuda", enabled=False):
            for at in _chunks(len(targets_T), chunk):
                logits_TV = _logits(hidden_TD[at], weight, bias_V)
                _read[(len(logits_TV),)](
                    logits_TV,
                    targets_T[at],
                    logprobs_T[at],
                    entropy_T[at],
                    norm_T[at],
                    temperature,
                    softcap or 1.0,
                    len(weight),
                    BLOCK=min(4096, triton.next_power_of_2(len(weight))),
                    CAPPED=softcap is not None,
                    num_warps=8,
                )
                if len(targets_T) <= chunk and any(ctx.needs_input_grad):
                    kept_TV = logits_TV
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, targets_T, norm_T, entropy_T, kept_TV)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grad_T: Tensor | None, entropy_grad_T: Tensor | None) -> tuple[Tensor | None, ...]:
        if logprob_grad_T is None and entropy_grad_T is None:
            return (None,) * 7
        hidden_TD, weight_VD, bias_V, targets_T, norm_T, entropy_T, kept_TV = ctx.saved_tensors
        weight = weight_VD.to(hidden_TD.dtype)
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden_TD) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        grad_bias = None if bias_V is None or not wants_bias else torch.zeros_like(bias_V, dtype=torch.float32)
        with torch.autocast("cuda", enabled=False):
            for at in _chunks(len(targets_T), ctx.chunk):
                logits_TV = kept_TV if kept_TV is not None else _logits(hidden_TD[at], weight, bias_V)
                grads = (_part(logprob_grad_T, at), _part(entropy_grad_T, at))
                facts = (targets_T[at], entropy_T[at], norm_T[at])
                grad_TV = _grad_of_logits(ctx, logits_TV, hidden_TD.dtype, *facts, grads)
                if grad_hidden is not None:
                    torch.mm(grad_TV, weight, out=grad_hidden[at])
                if grad_weight is not None:
                    grad_weight += _multiply(grad_TV.T, hidden_TD[at])
                if grad_bias is not None:
                    grad_bias += grad_TV.sum(0, dtype=torch.float32)
        pairs = ((grad_weight, weight_VD), (grad_bias, bias_V))
        narrow = (None if grad is None else grad.to(of.dtype) for grad, of in pairs)
        return grad_hidden, *narrow, None, None, None, None


def _grad_of_logits(
    ctx: Any,
    logits_TV: Tensor,
    dtype: torch.dtype,
    targets_T: Tensor,
    entropy_T: Tensor,
    norm_T: Tensor,
    grads: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    grad_TV = torch.empty_like(logits_TV, dtype=dtype)
    tokens, vocab_size = logits_TV.shape
    logprob_grad_T, entropy_grad_T = (None if grad is None else grad.float().contiguous() for grad in grads)
    block = min(4096, triton.next_power_of_2(vocab_size))
    _differentiate[(tokens, triton.cdiv(vocab_size, block))](
        logits_TV,
        targets_T,
        entropy_T,
        norm_T,
        norm_T if logprob_grad_T is None else logprob_grad_T,
        norm_T if entropy_grad_T is None else entropy_grad_T,
        grad_TV,
        ctx.temperature,
        ctx.softcap or 1.0,
        vocab_size,
        BLOCK=block,
        CAPPED=ctx.softcap is not None,
        LOGPROB=logprob_grad_T is not None,
        ENTROPY=entropy_grad_T is not None,
        num_warps=8,
    )
    return grad_TV


def _logits(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    logits_TV = _multiply(hidden_TD, weight_VD.T)
    return logits_TV if bias_V is None else logits_TV.add_(bias_V)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in float32."""
    narrow = left.dtype != torch.float32
    return torch.mm(left, right, out_dtype=torch.float32) if narrow else left @ right


def _part(values_T: Tensor | None, at: slice) -> Tensor | None:
    return None if values_T is None else values_T[at]


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(at, min(at + chunk, length)) for at in range(0, length, chunk)]
