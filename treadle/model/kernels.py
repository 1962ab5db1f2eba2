"""Triton kernels of the model: RMS norm, gated product, rope, and the sums of a checksum. Imported on CUDA only.

Owns the root-mean-square norm with the residual added before it, the gated product, and the rotation of heads, forward
and backward. They round where transformers' own modules round, so that a layer gives the same numbers either way.
`sum_words` sums many tensors at once for `checksum`, which owns the arithmetic. Knows no model; `fused_layers` decides
where the kernels apply.

Shapes: T tokens, D the size of a norm, I the inner size, H heads of size E.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""What may stand in a gated product; kernels know them by number."""

_BACKWARD_PROGRAMS = 1024
"""Programs that share the rows of a norm's backward: each sums the weight's gradient over its rows."""


class Norm(NamedTuple):
    """A norm's weight and numbers. `offset`: the weight counts from 1, and is applied before rounding (Gemma)."""

    weight: Tensor
    eps: float
    offset: bool


@triton.jit  # type: ignore[untyped-decorator]
def scale_to_norm(x, weight, size, eps, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row, normed and weighed; zero outside stays zero."""
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    if OFFSET:
        out = normed * (1.0 + weight.to(tl.float32))
    else:
        out = normed.to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    return out.to(x.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    hidden,
    delta,
    total,
    out,
    post_weight,
    weight,
    post_eps,
    eps,
    size,
    SIZE: tl.constexpr,
    DELTA: tl.constexpr,
    POST: tl.constexpr,
    OFFSET: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * size
    d = tl.arange(0, SIZE)
    inside = d < size
    x = tl.load(hidden + at + d, mask=inside, other=0.0)
    if DELTA:
        change = tl.load(delta + at + d, mask=inside, other=0.0)
        if POST:
            change = scale_to_norm(change, tl.load(post_weight + d, mask=inside, other=0.0), size, post_eps, OFFSET)
        x = (x.to(tl.float32) + change.to(tl.float32)).to(x.dtype)
        tl.store(total + at + d, x, mask=inside)
    factor = tl.load(weight + d, mask=inside, other=0.0)
    tl.store(out + at + d, scale_to_norm(x, factor, size, eps, OFFSET), mask=inside)


def norm_rows(
    hidden: Tensor, norm: Norm, *, delta: Tensor | None = None, post: Norm | None = None, total: Tensor | None = None
) -> Tensor:
    """Norm of the last axis; of `hidden` + `delta` where that is given, whose sum goes to `total`.

    `post` norms `delta` before it is added. All rows are contiguous; `total` may be `hidden` itself.
    """
    size = hidden.shape[-1]
    out = torch.empty_like(hidden)
    width = triton.next_power_of_2(size)
    _norm[(hidden.numel() // size,)](
        hidden,
        hidden if delta is None else delta,
        hidden if total is None else total,
        out,
        norm.weight if post is None else post.weight,
        norm.weight,
        norm.eps if post is None else post.eps,
        norm.eps,
        size,
        SIZE=width,
        DELTA=delta is not None,
        POST=post is not None,
        OFFSET=norm.offset,
        num_warps=_warps(width),
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward(  # type: ignore[no-untyped-def]
    total,
    weight,
    grad_out,
    grad_total,
    grad_in,
    grad_weight,
    eps,
    size,
    rows,
    SIZE: tl.constexpr,
    ADDED: tl.constexpr,
    OFFSET: tl.constexpr,
):
    d = tl.arange(0, SIZE)
    inside = d < size
    factor = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        factor += 1.0
    share = tl.zeros((SIZE,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * size
        x = tl.load(total + at + d, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_out + at + d, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
        normed = x * scale
        share += grad * normed
        inner = grad * factor
        result = scale * (inner - normed * (tl.sum(inner * normed, axis=0) / size))
        if ADDED:
            result += tl.load(grad_total + at + d, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_in + at + d, result.to(grad_in.dtype.element_ty), mask=inside)
    tl.store(grad_weight + tl.program_id(0) * size + d, share, mask=inside)


def norm_rows_backward(total: Tensor, norm: Norm, grad_out: Tensor, grad_total: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of what was normed and of the weight. `grad_total` comes in by the residual."""
    size = total.shape[-1]
    rows = total.numel() // size
    programs = min(rows, _BACKWARD_PROGRAMS)
    grad_in = torch.empty_like(total)
    grad_weight = torch.empty((programs, size), dtype=torch.float32, device=total.device)
    width = triton.next_power_of_2(size)
    _norm_backward[(programs,)](
        total,
        norm.weight,
        grad_out,
        grad_out if grad_total is None else grad_total,
        grad_in,
        grad_weight,
        norm.eps,
        size,
        rows,
        SIZE=width,
        ADDED=grad_total is not None,
        OFFSET=norm.offset,
        num_warps=_warps(width),
    )
    return grad_in, grad_weight.sum(0).to(norm.weight.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _activate(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation and its derivative, in float32."""
    if ACTIVATION == 0:
        gate = tl.sigmoid(x)
        value = x * gate
        slope = gate * (1.0 + x * (1.0 - gate))
    elif ACTIVATION == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        bend = 2.0 * tl.sigmoid(2.0 * inner) - 1.0
        value = 0.5 * x * (1.0 + bend)
        slope = 0.5 * (1.0 + bend) + 0.5 * x * (1.0 - bend * bend) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    else:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * share
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return value, slope


@triton.jit  # type: ignore[untyped-decorator]
def _gate(gate, up, out, stride, size, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < size
    x = tl.load(gate + row * stride + d, mask=inside, other=0.0)
    value, _ = _activate(x.to(tl.float32), ACTIVATION)
    factor = tl.load(up + row * stride + d, mask=inside, other=0.0)
    product = value.to(x.dtype).to(tl.float32) * factor.to(tl.float32)
    tl.store(out + row * size + d, product.to(x.dtype), mask=inside)


def gate_rows(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """activation(gate) * up: [T, I] each, with the same stride between rows."""
    rows, size = gate.shape
    out = torch.empty((rows, size), dtype=gate.dtype, device=gate.device)
    block = min(1024, triton.next_power_of_2(size))
    grid = (rows, triton.cdiv(size, block))
    _gate[grid](gate, up, out, gate.stride(0), size, BLOCK=block, ACTIVATION=activation)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _gate_backward(  # type: ignore[no-untyped-def]
    gate, up, grad, grad_gate, grad_up, total, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    incoming = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    value, slope = _activate(x, ACTIVATION)
    tl.store(grad_gate + at, (incoming * factor * slope).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, (incoming * value).to(grad_up.dtype.element_ty), mask=inside)


def gate_rows_backward(gate: Tensor, up: Tensor, grad: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `up`; all contiguous."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    block = 1024
    grid = (triton.cdiv(gate.numel(), block),)
    _gate_backward[grid](gate, up, grad, grad_gate, grad_up, gate.numel(), BLOCK=block, ACTIVATION=activation)
    return grad_gate, grad_up


@triton.jit  # type: ignore[untyped-decorator]
def apply_rope(x, partner, cosine, sine, d, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotate heads: `partner` is the other half of each. Rounds after each product, as the modules do."""
    straight = (x.to(tl.float32) * cosine.to(tl.float32)).to(x.dtype)
    across = tl.where(d < HALF, -partner.to(tl.float32), partner.to(tl.float32)) * sine.to(tl.float32)
    return (straight.to(tl.float32) + across.to(x.dtype).to(tl.float32)).to(x.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    heads_in,
    cosines,
    sines,
    heads_out,
    stride,
    num_heads,
    direction,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, PADDED_E)[None, :]
    inside = (h < num_heads) & (d < E)
    x = tl.load(heads_in + row * stride + h * E + d, mask=inside, other=0.0)
    partner = tl.load(heads_in + row * stride + h * E + (d + E // 2) % E, mask=inside, other=0.0)
    cosine = tl.load(cosines + row * E + d, mask=d < E, other=0.0)
    sine = tl.load(sines + row * E + d, mask=d < E, other=0.0).to(tl.float32) * direction
    tl.store(heads_out + (row * num_heads + h) * E + d, apply_rope(x, partner, cosine, sine, d, E // 2), mask=inside)


def rotate_heads(heads: Tensor, cosines: Tensor, sines: Tensor, *, back: bool = False) -> Tensor:
    """Turn each head by its token's angles, or back: heads [T, H, E] with heads of a token together, angles [T, E]."""
    tokens, count, size = heads.shape
    out = torch.empty((tokens, count, size), dtype=heads.dtype, device=heads.device)
    block = min(16, triton.next_power_of_2(count))
    _rotate[(tokens, triton.cdiv(count, block))](
        heads,
        cosines,
        sines,
        out,
        heads.stride(0),
        count,
        -1.0 if back else 1.0,
        E=size,
        PADDED_E=triton.next_power_of_2(size),
        HEADS=block,
    )
    return out


def _warps(width: int) -> Any:
    """Enough threads to load a row in one go, and no more."""
    return min(16, max(1, width // 512))


_BLOCK = 2048
_PARTS = 128
"""Programs for each tensor, which go through it together: a small one costs little, and a large one fills a GPU."""


@triton.jit  # type: ignore[untyped-decorator]
def _sum(addresses, counts, totals, PLACE: tl.constexpr, MIX: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    which = tl.program_id(0)
    words = tl.load(addresses + which).to(tl.pointer_type(tl.int64))
    count = tl.load(counts + which)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(tl.program_id(1).to(tl.int64) * BLOCK, count, PARTS * BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = at < count
        mixed = ((at * PLACE) ^ tl.load(words + at, mask=inside, other=0)) * MIX
        total += tl.where(inside, mixed ^ (mixed >> 29), 0)
    tl.atomic_add(totals + which, tl.sum(total, axis=0))


def sum_words(tensors: Sequence[Tensor], place: int, mix: int) -> Tensor:
    """For each tensor, whole 64-bit words of one device: each word mixed with its place, all added up; both wrap."""
    device = tensors[0].device
    places = [(tensor.data_ptr(), tensor.nbytes // 8) for tensor in tensors]
    addresses, counts = torch.tensor(places, dtype=torch.int64).T.contiguous().to(device)
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    _sum[(len(tensors), _PARTS)](addresses, counts, totals, place, mix, _PARTS, _BLOCK)
    return totals
