"""Tensors that are cut over ranks, and plain ones, seen alike: which rows are here, and how the whole comes together.

FSDP2 cuts a parameter along its first dimension into equal runs of rows; the last ranks may have fewer, or none.
Invariant: the rows of all parts, in the order of the ranks, are the tensor.
"""

from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it: a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it. Every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rows_here(tensor: Tensor) -> range:
    """Which of its rows this rank holds."""
    if not tensor.dim():
        return range(0)
    if not isinstance(tensor, DTensor):
        return range(len(tensor))
    dimension = _cut_dimension(tensor)
    if dimension is None:
        return range(len(tensor))
    share = -(-tensor.shape[0] // tensor.device_mesh.size(dimension))
    start = min(share * tensor.device_mesh.get_local_rank(dimension), tensor.shape[0])
    here = range(start, min(start + share, tensor.shape[0]))
    assert len(here) == len(tensor.to_local()), "FSDP cuts parameters into equal runs of rows"
    return here


@torch.no_grad()
def like(part: Tensor, tensor: Tensor) -> Tensor:
    """A copy of rows that belong here, as a tensor that is cut in the way of another, on the same device."""
    copy = torch.empty_like(tensor, dtype=part.dtype)
    local(copy).copy_(part)
    return copy


@torch.no_grad()
def gather(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """All of it on `device`, narrowed before it travels. Every rank must ask."""
    part = local(tensor.detach()).to(device, dtype if tensor.is_floating_point() else None)
    if not isinstance(tensor, DTensor):
        return part
    # The rows may wait in CPU memory, where the ranks' collectives cannot take them from.
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    return DTensor.from_local(part, mesh, tensor.placements, run_check=False, shape=shape, stride=stride).full_tensor()


def _cut_dimension(tensor: DTensor) -> int | None:
    """Along which dimension of its mesh it is cut."""
    cut = [at for at, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    assert len(cut) <= 1 and all(cast(Shard, tensor.placements[at]).dim == 0 for at in cut), "FSDP cuts rows, once"
    return cut[0] if cut else None
