"""The sums of a checksum, for many tensors in one Triton kernel. CUDA only; `checksum` owns the arithmetic."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

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
