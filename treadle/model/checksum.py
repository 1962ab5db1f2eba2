"""Checksum of weights: one short word for all tensors of a model, the same on every device.

Owns the arithmetic: each tensor's bytes are read as 64-bit words, each word is mixed with its place, and the sum wraps.
Integers add up to the same in any order, so every device computes the same word for the same bits. Swapped, permuted,
renamed or reshaped tensors give another word. Not meant against an adversary.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

_PLACE = -0x61C8864680B583EB
_MIX = -0x40A7B892E31B1A47
_BATCH_BYTES = 1 << 28
"""At a time on a GPU, where tensors in another dtype are made for it."""
_CHUNK = 1 << 15
"""Words at a time on a CPU: they stay in a core's cache, and are few enough that torch does not share them out to
threads, which costs more than it gains."""


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """16 hex digits for named tensors. The order of the map does not matter; names, shapes, types and bits do."""
    running = RunningChecksum()
    for batch in _batches(tensors):
        running.add_all(batch)
    return running.word()


class RunningChecksum:
    """The checksum of tensors that come by and by, in any order; none is kept."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._sums: list[Tensor] = []
        """Of all names, in their order, in pieces."""

    def add(self, name: str, tensor: Tensor) -> None:
        self.add_all({name: tensor})

    def add_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Some tensors of one device, with new names. On a GPU all of them cost what one does."""
        assert not self._kinds.keys() & tensors.keys(), "each name counts once"
        with torch.no_grad():
            self._sums.append(_sum_words(list(tensors.values())))
        self._kinds |= {name: f"{tensor.dtype}\0{tuple(tensor.shape)}" for name, tensor in tensors.items()}

    def word(self) -> str:
        totals = torch.cat([part.to(self._sums[0].device) for part in self._sums]).tolist() if self._sums else []
        digest = blake2b(digest_size=8)
        for (name, kind), total in sorted(zip(self._kinds.items(), totals, strict=True)):
            digest.update(f"{name}\0{kind}\0{total}\0".encode())
        return digest.hexdigest()


def _batches(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """On a GPU many at a time, but not too many, as what is looked up may be made for that; elsewhere one by one."""
    batch: dict[str, Tensor] = {}
    room = _BATCH_BYTES
    for name in tensors:
        tensor = tensors[name]
        if batch and (room < 0 or not tensor.is_cuda or tensor.device != next(iter(batch.values())).device):
            yield batch
            batch, room = {}, _BATCH_BYTES
        batch[name] = tensor
        room -= tensor.nbytes
    if batch:
        yield batch


def _sum_words(tensors: Sequence[Tensor]) -> Tensor:
    """Each tensor's words, mixed with their places and added up."""
    if tensors[0].is_cuda:
        from treadle.model.kernels import sum_words  # triton comes with it, which CPU machines do not have

        return sum_words([tensor if _is_words(tensor) else _words(tensor) for tensor in tensors], _PLACE, _MIX)
    return torch.stack([_sum_here(_words(tensor)) for tensor in tensors])


def _sum_here(words: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK]
        mixed = torch.arange(start, start + len(chunk), device=words.device).mul_(_PLACE).bitwise_xor_(chunk)
        mixed.mul_(_MIX)
        total += mixed.bitwise_xor_(mixed >> 29).sum()
    return total


def _is_words(tensor: Tensor) -> bool:
    """Whether its memory can be read as 64-bit words just as it is."""
    return tensor.is_contiguous() and not tensor.nbytes % 8 and not tensor.data_ptr() % 8


def _words(tensor: Tensor) -> Tensor:
    """The bytes as 64-bit words, filled up with zeros."""
    octets = tensor.detach().contiguous().flatten().view(torch.uint8)
    if len(octets) % 8 or octets.storage_offset() % 8:
        octets = torch.nn.functional.pad(octets, (0, -len(octets) % 8)).clone()
    return octets.view(torch.int64)
