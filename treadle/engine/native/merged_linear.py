"""Merged linear layers: modules that read the same input (qkv, gate and up) as one matrix product.

Their weights are adjacent in one tensor, and each module's parameter becomes a view of it: training or loading the
parameters changes the merged weight too, and nothing is copied after the first time.
Invariant: parameters keep their identity, shape and values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class MergedLinear:
    """Linear modules that read the same input, as one product."""

    def __init__(self, *modules: nn.Linear) -> None:
        self._modules = modules
        self._weight = self._bias = torch.empty(0)
        self.merge()

    @torch.no_grad()
    def merge(self) -> bool:
        """Lay the parameters side by side, unless they are; whether anything had to move."""
        weights: list[Any] = [module.weight for module in self._modules]
        biases: list[Any] = [module.bias for module in self._modules if module.bias is not None]
        moved = not _are_adjacent(weights, self._weight) or not _are_adjacent(biases, self._bias)
        if moved:
            self._weight, self._bias = _concatenate(weights), _concatenate(biases)
        return moved

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias if len(self._bias) else None)


def _are_adjacent(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether tensors are the parts of `whole`, one after another."""
    at = whole.data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.dtype != whole.dtype:
            return False
        at += part.nbytes
    return at == whole.data_ptr() + whole.nbytes


def _concatenate(parts: Sequence[nn.Parameter]) -> Tensor:
    """One tensor whose parts the parameters become, or are already. A single one stays where it is."""
    if not parts:
        return torch.empty(0)
    first, rows = parts[0].data, [len(part) for part in parts]
    storage = first.untyped_storage()
    if all(part.untyped_storage().data_ptr() == storage.data_ptr() for part in parts):
        room = storage.nbytes() // first.itemsize - first.storage_offset()
        if first.is_contiguous() and room >= sum(part.numel() for part in parts):
            whole = first.as_strided((sum(rows), *first.shape[1:]), first.stride())
            if _are_adjacent(parts, whole):
                return whole
    whole = torch.cat([part.data for part in parts])
    for part, place in zip(parts, torch.split(whole, rows), strict=True):
        part.data = place
    return whole
