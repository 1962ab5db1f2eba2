"""Merged linear: modules that read the same input (qkv, gate and up) as one product. Needs no GPU.

Owns where their weights lie: side by side in one tensor, of which each module's parameter is a view, so training or
loading the parameters changes what is computed here, and nothing is copied after the first time.
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
        self.tie()

    @torch.no_grad()
    def tie(self) -> bool:
        """Lay the parameters side by side, unless they are; whether anything had to move."""
        weights: list[Any] = [module.weight for module in self._modules]
        biases: list[Any] = [module.bias for module in self._modules if module.bias is not None]
        moved = not _lie_in(weights, self._weight) or not _lie_in(biases, self._bias)
        if moved:
            self._weight, self._bias = _lay(weights), _lay(biases)
        return moved

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias if len(self._bias) else None)


def _lie_in(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether tensors are the parts of `whole`, one after another."""
    at = whole.data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.dtype != whole.dtype:
            return False
        at += part.nbytes
    return at == whole.data_ptr() + whole.nbytes


def _lay(parts: Sequence[nn.Parameter]) -> Tensor:
    """One tensor whose parts the parameters become, or are already. A single one stays where it is."""
    if not parts:
        return torch.empty(0)
    first, rows = parts[0].data, [len(part) for part in parts]
    storage = first.untyped_storage()
    if all(part.untyped_storage().data_ptr() == storage.data_ptr() for part in parts):
        room = storage.nbytes() // first.itemsize - first.storage_offset()
        if first.is_contiguous() and room >= sum(part.numel() for part in parts):
            whole = first.as_strided((sum(rows), *first.shape[1:]), first.stride())
            if _lie_in(parts, whole):
                return whole
    whole = torch.cat([part.data for part in parts])
    for part, place in zip(parts, torch.split(whole, rows), strict=True):
        part.data = place
    return whole
