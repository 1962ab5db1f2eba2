"""Triton kernels of the embedded engine. Imported on CUDA only.

Owns decode attention over the slot cache: each program serves one row and one key head with all its query heads, writes
the row's new key and value to the cache, and reads only the places that the row has. The new token never goes through
memory: it starts the running softmax, so no program waits for a write.

Shapes: B rows, H query heads, K key heads, G = H / K, D head size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _decode_attention(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    keys,
    values,
    places,
    lengths,
    out,
    scale,
    softcap,
    window,
    stride_qh,
    stride_qb,
    stride_kh,
    stride_kb,
    stride_vh,
    stride_vb,
    stride_slot,
    stride_head,
    heads,
    G: tl.constexpr,
    D: tl.constexpr,
    PADDED_G: tl.constexpr,
    PADDED_D: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    g = tl.arange(0, PADDED_G)
    d = tl.arange(0, PADDED_D)
    n = tl.arange(0, BLOCK)
    inside = (g[:, None] < G) & (d[None, :] < D)
    queries = tl.load(
        query + row * stride_qb + (head * G + g[:, None]) * stride_qh + d[None, :], mask=inside, other=0.0
    )
    new_key = tl.load(key + row * stride_kb + head * stride_kh + d, mask=d < D, other=0.0)
    new_value = tl.load(value + row * stride_vb + head * stride_vh + d, mask=d < D, other=0.0)
    base = row * stride_slot + head * stride_head
    place = tl.load(places + row)
    tl.store(keys + base + place * D + d, new_key, mask=d < D)
    tl.store(values + base + place * D + d, new_value, mask=d < D)

    score = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * scale
    if CAPPED:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
    top = score
    total = tl.full((PADDED_G,), 1.0, tl.float32)
    mixed = tl.zeros((PADDED_G, PADDED_D), tl.float32) + new_value.to(tl.float32)[None, :]

    earlier = tl.load(lengths + row) - 1
    first = 0
    if WINDOWED:
        first = tl.maximum(earlier + 1 - window, 0)
    for start in range(first, earlier, BLOCK):
        at = start + n
        there = at < earlier
        held = base + at[:, None] * D + d[None, :]
        mask = there[:, None] & (d[None, :] < D)
        block = tl.load(keys + held, mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(block), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        block = tl.load(values + held, mask=mask, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(block.dtype), block, input_precision="ieee")
        total = total * shrink + tl.sum(weights, axis=1)
        top = higher
    mixed = mixed / total[:, None]
    places_out = out + (row * heads + head * G + g[:, None]) * D + d[None, :]
    tl.store(places_out, mixed.to(out.dtype.element_ty), mask=inside)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    places_B: Tensor,
    lengths_B: Tensor,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Write one token of each row into one layer's cache, and attend to what the row then has: [B, H, D].

    query is [1, H, B, D], key and value are [1, K, B, D]; keys and values are [slots, K, length, D] and contiguous.
    """
    _, heads, rows, size = query.shape
    kv_heads = key.shape[1]
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    out = torch.empty((rows, heads, size), dtype=query.dtype, device=query.device)
    _decode_attention[(rows, kv_heads)](
        query,
        key,
        value,
        keys,
        values,
        places_B,
        lengths_B,
        out,
        size**-0.5 if scaling is None else scaling,
        softcap or 1.0,
        window or 0,
        query.stride(1),
        query.stride(2),
        key.stride(1),
        key.stride(2),
        value.stride(1),
        value.stride(2),
        keys.stride(0),
        keys.stride(1),
        heads,
        G=heads // kv_heads,
        D=size,
        PADDED_G=max(16, triton.next_power_of_2(heads // kv_heads)),
        PADDED_D=max(16, triton.next_power_of_2(size)),
        BLOCK=64 if size <= 128 else 32,
        CAPPED=softcap is not None,
        WINDOWED=window is not None,
    )
    return out
