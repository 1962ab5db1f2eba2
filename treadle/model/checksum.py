"""One short word for all weights of a model.

Owns the arithmetic: each tensor's bytes are read as 64-bit words, each word is mixed with its place, and the sum wraps.
Whole numbers add up to the same in any order, so every device computes the same word for the same bits. Swapped,
permuted, renamed or reshaped tensors give another word. Not meant against an adversary.
"""

from collections.abc import Mapping
from hashlib import blake2b

import torch
from torch import Tensor

_PLACE = -0x61C8864680B583EB
_MIX = -0x40A7B892E31B1A47
_CHUNK = 1 << 15
"""Words at a time: they stay in a core's cache, and are few enough that torch does not share them out to threads, which
costs more than it gains."""


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """16 hex digits for named tensors. The order of the map does not matter; names, shapes, types and bits do."""
    tally = Tally()
    for name in tensors:
        tally.add(name, tensors[name])
    return tally.word()


class Tally:
    """The checksum of tensors that come one by one, in any order; none is kept."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        with torch.no_grad():
            self._sums[name] = _sum_words(tensor.detach())
        self._kinds[name] = f"{tensor.dtype}\0{tuple(tensor.shape)}"

    def word(self) -> str:
        names = sorted(self._sums)
        digest = blake2b(digest_size=8)
        for name, total in zip(names, _gather([self._sums[name] for name in names]), strict=True):
            digest.update(f"{name}\0{self._kinds[name]}\0{total}\0".encode())
        return digest.hexdigest()


def _gather(sums: list[Tensor]) -> list[int]:
    """The sums as numbers, with one copy from each device."""
    found: dict[int, int] = {}
    for device in {total.device for total in sums}:
        places = [at for at, total in enumerate(sums) if total.device == device]
        found |= dict(zip(places, torch.stack([sums[at] for at in places]).tolist(), strict=True))
    return [found[at] for at in range(len(sums))]


def _sum_words(tensor: Tensor) -> Tensor:
    words = _words(tensor)
    if words.is_cuda:
        from treadle.model.summing import sum_words  # triton comes with it, which CPU machines do not have

        return sum_words(words, _PLACE, _MIX)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK]
        mixed = torch.arange(start, start + len(chunk), device=words.device).mul_(_PLACE).bitwise_xor_(chunk)
        mixed.mul_(_MIX)
        total += mixed.bitwise_xor_(mixed >> 29).sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """The bytes as 64-bit words, filled up with zeros."""
    octets = tensor.contiguous().flatten().view(torch.uint8)
    if len(octets) % 8 or octets.storage_offset() % 8:
        octets = torch.nn.functional.pad(octets, (0, -len(octets) % 8)).clone()
    return octets.view(torch.int64)
