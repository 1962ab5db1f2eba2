"""Cache kernels: Triton kernels that write keys and values into pages and copy pages. Imported on CUDA only.

Owns the way of prefilled tokens into the cache (norm, rope, write: vLLM's reshape_and_cache) and copies of pages, many
at once. Knows no attention.

Shapes: T tokens, H query heads, K key heads, D head size; qkv has the heads of a token side by side.
"""

import triton
import triton.language as tl
from torch import Tensor

from treadle.engine.native.paged_attention import HeadShape, load_rotated


@triton.jit  # type: ignore[untyped-decorator]
def _admit(  # type: ignore[no-untyped-def]
    qkv,
    rotated,
    keys,
    values,
    pages,
    slots,
    positions,
    cosines,
    sines,
    query_weight,
    key_weight,
    query_eps,
    key_eps,
    stride_page,
    stride_head,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    HEADS: tl.constexpr,
    NORMED: tl.constexpr,
    OFFSET: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, PADDED_D)[None, :]
    at = tl.load(positions + token)
    base = tl.load(pages + token) * stride_page + tl.load(slots + token) * D
    cosine = tl.load(cosines + at * D + d, mask=d < D, other=0.0)
    sine = tl.load(sines + at * D + d, mask=d < D, other=0.0)
    new = qkv + token * ((H + 2 * K) * D)
    is_query = (h < H) & (d < D)
    query = load_rotated(new, h, d, is_query, query_weight, query_eps, cosine, sine, D, NORMED, OFFSET)
    tl.store(rotated + (token * (H + K) + h) * D + d, query, mask=is_query)
    is_key = (h >= H) & (h < H + K) & (d < D)
    key = load_rotated(new, h, d, is_key, key_weight, key_eps, cosine, sine, D, NORMED, OFFSET)
    tl.store(rotated + (token * (H + K) + h) * D + d, key, mask=is_key)
    tl.store(keys + base + (h - H) * stride_head + d, key, mask=is_key)
    is_value = (h >= H + K) & (h < H + 2 * K) & (d < D)
    value = tl.load(new + h * D + d, mask=is_value, other=0.0)
    tl.store(values + base + (h - H - K) * stride_head + d, value, mask=is_value)


def norm_rope_and_cache(
    qkv: Tensor,
    cache: tuple[Tensor, Tensor],
    pages_T: Tensor,
    offsets_T: Tensor,
    positions_T: Tensor,
    angles: tuple[Tensor, Tensor],
    shape: HeadShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate the heads of new tokens, write keys and values into one layer's cache, and return all three.

    qkv is [T, (H + 2 K) * D]; queries are [T, H, D], keys and values [T, K, D].
    """
    tokens, all_heads = len(qkv), shape.heads + 2 * shape.kv_heads
    rotated = qkv.new_empty((tokens, shape.heads + shape.kv_heads, shape.size))
    keys, values = cache
    query_norm, key_norm = shape.query_norm, shape.key_norm
    block = min(16, triton.next_power_of_2(all_heads))
    _admit[(tokens, triton.cdiv(all_heads, block))](
        qkv,
        rotated,
        keys,
        values,
        pages_T,
        offsets_T,
        positions_T,
        *angles,
        qkv if query_norm is None else query_norm.weight,
        qkv if key_norm is None else key_norm.weight,
        0.0 if query_norm is None else query_norm.eps,
        0.0 if key_norm is None else key_norm.eps,
        keys.stride(0),
        keys.stride(1),
        H=shape.heads,
        K=shape.kv_heads,
        D=shape.size,
        PADDED_D=triton.next_power_of_2(shape.size),
        HEADS=block,
        NORMED=query_norm is not None,
        OFFSET=query_norm is not None and query_norm.offset,
    )
    value_T = qkv.view(tokens, all_heads, shape.size)[:, shape.heads + shape.kv_heads :]
    return rotated[:, : shape.heads], rotated[:, shape.heads :], value_T


@triton.jit  # type: ignore[untyped-decorator]
def _copy_pages(  # type: ignore[no-untyped-def]
    kv, moves, stride_plane, stride_page, stride_head, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    plane, move = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = tl.load(moves + move * 3), tl.load(moves + move * 3 + 1)
    numbers = tl.load(moves + move * 3 + 2) * D
    at = (plane // K) * stride_plane + (plane % K) * stride_head
    for start in range(0, numbers, BLOCK):
        n = start + tl.arange(0, BLOCK)
        block = tl.load(kv + at + source * stride_page + n, mask=n < numbers, other=0.0)
        tl.store(kv + at + target * stride_page + n, block, mask=n < numbers)


def copy_pages(kv: Tensor, moves: Tensor) -> None:
    """Copy the first tokens of pages to others, all at once: [moves, 3] of source, target and tokens.

    kv is [layers, 2, pages, K, page, D]. No page is both source and target.
    """
    layers, _, _, kv_heads, _, size = kv.shape
    grid = (layers * 2 * kv_heads, len(moves))
    _copy_pages[grid](kv, moves, kv.stride(1), kv.stride(2), kv.stride(3), K=kv_heads, D=size, BLOCK=2048)
