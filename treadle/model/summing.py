"""The sum of a checksum in one Triton kernel a tensor. Imported on CUDA only; `checksum` owns the arithmetic."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _sum(words, total, count, PLACE: tl.constexpr, MIX: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    mixed = ((at * PLACE) ^ tl.load(words + at, mask=inside, other=0)) * MIX
    mixed = tl.where(inside, mixed ^ (mixed >> 29), 0)
    tl.atomic_add(total, tl.sum(mixed, axis=0))


def sum_words(words: Tensor, place: int, mix: int) -> Tensor:
    """Each 64-bit word mixed with its place, all added up; both wrap."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if len(words):
        _sum[(triton.cdiv(len(words), _BLOCK),)](words, total, len(words), place, mix, _BLOCK)
    return total
