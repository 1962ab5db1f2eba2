"""Paged attention: decode attention over the page table, in one Triton kernel. Imported on CUDA only.

Each program serves one row and one key head with all its query heads: it applies norm and rope to the new heads, writes
the new key and value, and reads only the slots that the row has, block by block: a block lies in one page, which the
table names. The new token never goes through memory: it starts the running softmax, so no program waits for a write.
Where there are few rows, several programs share a row's slots and a second kernel adds them up (split-K).

Shapes: B rows, H query heads, K key heads, G = H / K, D head size; qkv has the heads of a token side by side.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.model.kernels import Norm, apply_rope

_BUSY_PROGRAMS = 512
"""Programs that keep a GPU busy; below this a row's slots are split over programs."""

_MIN_SLOTS_PER_SPLIT = 256
"""Slots that are worth a program of their own."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What the kernels know of one layer's attention."""

    heads: int
    kv_heads: int
    size: int
    scaling: float
    window: int | None
    softcap: float | None
    query_norm: Norm | None
    key_norm: Norm | None


@triton.jit  # type: ignore[untyped-decorator]
def load_rotated(  # type: ignore[no-untyped-def]
    heads, h, d, inside, weight, eps, cosine, sine, D: tl.constexpr, NORMED: tl.constexpr, OFFSET: tl.constexpr
):
    """Heads [h, d], normed where they have a norm, with rope applied."""
    other = (d + D // 2) % D
    x = tl.load(heads + h * D + d, mask=inside, other=0.0)
    partner = tl.load(heads + h * D + other, mask=inside, other=0.0)
    if NORMED:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
        own = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        others = tl.load(weight + other, mask=d < D, other=0.0).to(tl.float32)
        if OFFSET:
            x = (wide * scale * (1.0 + own)).to(x.dtype)
            partner = (partner.to(tl.float32) * scale * (1.0 + others)).to(x.dtype)
        else:
            x = ((wide * scale).to(x.dtype).to(tl.float32) * own).to(x.dtype)
            partner = ((partner.to(tl.float32) * scale).to(partner.dtype).to(tl.float32) * others).to(partner.dtype)
    return apply_rope(x, partner, cosine, sine, d, D // 2)


@triton.jit  # type: ignore[untyped-decorator]
def _add_sinks(  # type: ignore[no-untyped-def]
    top, total, mixed, sinks, G: tl.constexpr, PADDED_G: tl.constexpr, SINKS: tl.constexpr
):
    """Attention sinks: a logit of each head that takes part in the softmax and adds no value, where there are any."""
    if SINKS:
        g = tl.arange(0, PADDED_G)
        sink = tl.load(sinks + g, mask=g < G, other=0.0).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.exp2(sink - higher)
        mixed = mixed * shrink[:, None]
        top = higher
    return top, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def _decode_attention(  # type: ignore[no-untyped-def]
    qkv,
    keys,
    values,
    table,
    active,
    lengths,
    cosines,
    sines,
    query_weight,
    key_weight,
    sinks,
    out,
    parts,
    sums,
    query_eps,
    key_eps,
    scale,
    softcap,
    window,
    null_page,
    stride_row,
    stride_page,
    stride_head,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PADDED_G: tl.constexpr,
    PADDED_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    NORMED: tl.constexpr,
    OFFSET: tl.constexpr,
    SINKS: tl.constexpr,
):
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    g, d = tl.arange(0, PADDED_G)[:, None], tl.arange(0, PADDED_D)[None, :]
    n = tl.arange(0, BLOCK)
    length = tl.load(lengths + row)
    live = tl.load(active + row) != 0
    earlier = tl.where(live, length, 0)
    table += row * stride_row
    cosine = tl.load(cosines + length * D + d, mask=d < D, other=0.0)
    sine = tl.load(sines + length * D + d, mask=d < D, other=0.0)
    new = qkv + row * ((G + 2) * K * D)
    is_query = (g < G) & (d < D)
    queries = load_rotated(new + head * G * D, g, d, is_query, query_weight, query_eps, cosine, sine, D, NORMED, OFFSET)
    one = tl.arange(0, 1)[:, None]
    there = (one == 0) & (d < D)
    new_key = load_rotated(
        new + (G * K + head) * D, one, d, there, key_weight, key_eps, cosine, sine, D, NORMED, OFFSET
    )
    new_value = tl.load(new + (G * K + K + head) * D + one * D + d, mask=there, other=0.0)
    keys += head * stride_head
    values += head * stride_head

    score = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32), axis=1) * scale
    if CAPPED:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
    top = score * 1.4426950408889634
    total = tl.full((PADDED_G,), 1.0, tl.float32)
    mixed = tl.zeros((PADDED_G, PADDED_D), tl.float32) + new_value.to(tl.float32)
    top, total, mixed = _add_sinks(top, total, mixed, sinks + head * G, G, PADDED_G, SINKS)
    first = 0
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(earlier + 1 - window, 0)
        first = lowest // BLOCK * BLOCK
    last = earlier
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(earlier - first, SPLITS), BLOCK) * BLOCK
        first += split * share
        last = tl.minimum(first + share, earlier)
        if split > 0:
            top = tl.full((PADDED_G,), -1.0e30, tl.float32)
            total = tl.zeros((PADDED_G,), tl.float32)
            mixed = tl.zeros((PADDED_G, PADDED_D), tl.float32)
    if split == 0:
        last_page = tl.where(live, tl.load(table + earlier // PAGE), null_page).to(tl.int64)
        place = last_page * stride_page + earlier % PAGE * D
        tl.store(keys + place + one * D + d, new_key, mask=there)
        tl.store(values + place + one * D + d, new_value, mask=there)
    # A block's page is read one block ahead: no load waits for another, and as many are on their way as with no table.
    page = tl.load(table + tl.minimum(first, earlier) // PAGE)
    for start in range(first, last, BLOCK):
        at = start + n
        seen = at < last
        if WINDOWED:
            seen = seen & (at >= lowest)
        held = page.to(tl.int64) * stride_page + (start % PAGE + n)[:, None] * D + d
        page = tl.load(table + tl.minimum(start + BLOCK, earlier) // PAGE)
        mask = seen[:, None] & (d < D)
        block = tl.load(keys + held, mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(block), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        block = tl.load(values + held, mask=mask, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(block.dtype), block, input_precision="ieee")
        total = total * shrink + tl.sum(weights, axis=1)
        top = higher
    if SPLITS == 1:
        target_out = out + (row * K * G + head * G + g) * D + d
        tl.store(target_out, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_query)
    else:
        line = ((row * K * G + head * G + g) * SPLITS + split).to(tl.int64)
        tl.store(parts + line * D + d, mixed, mask=is_query)
        flat = tl.arange(0, PADDED_G)
        pair = sums + ((row * K * G + head * G + flat) * SPLITS + split) * 2
        tl.store(pair, top, mask=flat < G)
        tl.store(pair + 1, total, mask=flat < G)


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    parts, sums, out, D: tl.constexpr, PADDED_D: tl.constexpr, SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED_D)
    tops = tl.load(sums + (head * SPLITS + s) * 2, mask=s < SPLITS, other=float("-inf"))
    totals = tl.load(sums + (head * SPLITS + s) * 2 + 1, mask=s < SPLITS, other=0.0)
    weights = tl.exp2(tops - tl.max(tops, axis=0))
    inside = (s[:, None] < SPLITS) & (d[None, :] < D)
    mixed = tl.load(parts + (head * SPLITS + s[:, None]) * D + d[None, :], mask=inside, other=0.0)
    result = tl.sum(mixed * weights[:, None], axis=0) / tl.sum(totals * weights, axis=0)
    tl.store(out + head * D + d, result.to(out.dtype.element_ty), mask=d < D)


def count_splits(rows: int, kv_heads: int, slots: int) -> int:
    """How many programs share a row's slots (split-K), when rows may have `slots`."""
    wanted = min(_BUSY_PROGRAMS // (rows * kv_heads), slots // _MIN_SLOTS_PER_SPLIT, 32)
    return 1 << max(0, wanted.bit_length() - 1)


def attend_paged(
    qkv: Tensor,
    cache: tuple[Tensor, Tensor],
    rows: "PagedRows",
    angles: tuple[Tensor, Tensor],
    shape: HeadShape,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write one token of each row into one layer's cache, and attend to what the row then has: [B, H * D].

    qkv is [B, (H + 2 K) * D], contiguous; the cache is keys and values, [pages, K, page, D] each and contiguous.
    `sinks` are [H].
    """
    count = len(qkv)
    keys, values = cache
    splits, page = count_splits(count, shape.kv_heads, rows.table.shape[1] * keys.shape[2]), keys.shape[2]
    out = qkv.new_empty((count, shape.heads * shape.size))
    parts = sums = out
    if splits > 1:
        parts = torch.empty((count * shape.heads, splits, shape.size), dtype=torch.float32, device=qkv.device)
        sums = torch.empty((count * shape.heads, splits, 2), dtype=torch.float32, device=qkv.device)
    query_norm, key_norm = shape.query_norm, shape.key_norm
    padded = triton.next_power_of_2(shape.size)
    _decode_attention[(count, shape.kv_heads, splits)](
        *(qkv, keys, values, rows.table, rows.active, rows.length),
        *angles,
        qkv if query_norm is None else query_norm.weight,
        qkv if key_norm is None else key_norm.weight,
        qkv if sinks is None else sinks,
        out,
        parts,
        sums,
        0.0 if query_norm is None else query_norm.eps,
        0.0 if key_norm is None else key_norm.eps,
        shape.scaling,
        shape.softcap or 1.0,
        shape.window or 0,
        rows.null_page,
        rows.table.stride(0),
        keys.stride(0),
        keys.stride(1),
        K=shape.kv_heads,
        G=shape.heads // shape.kv_heads,
        D=shape.size,
        PADDED_G=max(16, triton.next_power_of_2(shape.heads // shape.kv_heads)),
        PADDED_D=max(16, padded),
        PAGE=page,
        SPLITS=splits,
        CAPPED=shape.softcap is not None,
        WINDOWED=shape.window is not None,
        NORMED=query_norm is not None,
        OFFSET=query_norm is not None and query_norm.offset,
        SINKS=sinks is not None,
        **tuning(shape.size, page),
    )
    if splits > 1:
        _add_up[(count * shape.heads,)](
            parts, sums, out, D=shape.size, PADDED_D=padded, SPLITS=splits, PADDED_SPLITS=splits
        )
    return out


def tuning(size: int, page: int) -> dict[str, Any]:
    """Block size of the loop over slots, by head size: a page is a whole number of blocks."""
    return {"BLOCK": min(page & -page, 64 if size <= 128 else 32), "num_warps": 4, "num_stages": 3}


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Which rows take part in a step, how many slots each has and in which pages; others write to `null_page`."""

    table: Tensor
    """[rows, pages] of each row, in int32."""
    active: Tensor
    """As bytes."""
    length: Tensor
    null_page: int
