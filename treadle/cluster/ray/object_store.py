"""Weights in Ray's object store: written once, read in place by every process of a node.

Owns the form in which tensors lie there: plain bytes with their shape and dtype, since Ray shares the memory
of arrays between processes and copies that of tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """One tensor as bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Any
    """A flat array of bytes."""


class InStore:
    """A map of weights that lie in the store; `reference` says where."""

    reference: Any


def pack(tensors: "Mapping[str, Tensor]") -> dict[str, Packed]:
    """Tensors as they go into the store. Those on the CPU are not copied here."""
    return {name: _pack(tensors[name]) for name in tensors}


def _pack(tensor: "Tensor") -> Packed:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return Packed(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy())


class StoredTensors(Mapping[str, Any]):
    """Weights by name, in a process that reads them from the store. Nothing writes to them."""

    def __init__(self, packed: Mapping[str, Packed]) -> None:
        self._packed = packed

    def __getitem__(self, name: str) -> "Tensor":
        import torch  # an actor sets itself up before it imports torch
        from torch.utils.dlpack import from_dlpack

        packed = self._packed[name]
        if not packed.data.nbytes:
            return torch.empty(packed.shape, dtype=getattr(torch, packed.dtype))
        flat = from_dlpack(packed.data)
        return flat.view(getattr(torch, packed.dtype)).reshape(packed.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)
