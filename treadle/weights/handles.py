"""CUDA IPC handles: tensors of a GPU, for another process on it.

Owns how a handle is made and opened, whatever number the GPU has on the other side. Whoever opened one keeps memory of
the process that made it, and says with `at_exit` how to let go of that: otherwise torch warns when the maker ends.
"""

from collections.abc import Callable
from functools import cache
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor

Handle = tuple[str, Callable[..., Tensor], tuple[Any, ...]]
"""Which GPU, and how the tensor is opened there."""


def make_handle(tensor: Tensor) -> Handle:
    """For one other process: torch counts who holds it."""
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return _identity(tensor.device), rebuild, arguments


def open_handle(handle: Handle) -> Tensor:
    identity, rebuild, arguments = handle
    for index in range(torch.cuda.device_count()):
        if _identity(torch.device("cuda", index)) == identity:
            return rebuild(*arguments[:6], index, *arguments[7:])
    raise RuntimeError(f"the weights are on GPU {identity}, which this process does not see")


@cache
def at_exit(let_go: Callable[[], None]) -> None:
    """Call `let_go` when this process ends, once; unlike atexit, in processes of multiprocessing too."""
    Finalize(None, let_go, exitpriority=1)


@cache
def _identity(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
