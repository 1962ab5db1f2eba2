"""CUDA IPC: tensors of one GPU as another process on that GPU sees them; nothing is copied.

Owns how a handle is made and opened, whatever number the GPU has on the other side, and which reader was given which
handles. Making and opening them takes milliseconds, so both sides keep them: the sender as long as its tensors stay
where they are, the reader until it opens others, or ends. A process that opened a handle holds memory of the process
that made it, and releases it at exit (`at_exit`): otherwise torch warns when the maker ends.
"""

import os
import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor

from treadle.weights.unix_server import ID_BYTES, frame, read_exactly, read_frame

IpcHandle = tuple[str, Callable[..., Tensor], tuple[Any, ...]]
"""Which GPU, and how the tensor is opened there."""


def make_handle(tensor: Tensor) -> IpcHandle:
    """For one other process: torch counts its holders."""
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return _identity(tensor.device), rebuild, arguments


def open_handle(handle: IpcHandle) -> Tensor:
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


TensorAddress = tuple[int, torch.Size, torch.dtype]
"""Where a tensor lies, and as what."""

_NOTHING = bytes(ID_BYTES)


class IpcHandleCache:
    """The sender's side: what each reader was given."""

    def __init__(self) -> None:
        self._given: dict[bytes, tuple[Sequence[TensorAddress], bytes]] = {}
        """For each reader, the places, and their name."""
        self._lock = threading.Lock()

    def send(self, connection: socket.socket, reader: bytes, tensors: Sequence[Tensor]) -> None:
        """Let `reader`, at the other end of `connection`, open these tensors."""
        places = [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]
        with self._lock:
            before, name = self._given.get(reader, ((), _NOTHING))
            if before != places:
                name = os.urandom(ID_BYTES)
                self._given[reader] = (places, name)
        known = read_exactly(connection, ID_BYTES) == name
        connection.sendall(name if known else name + frame(pickle.dumps([make_handle(tensor) for tensor in tensors])))


class _Opened:
    """What this process opened last."""

    name: bytes = _NOTHING
    tensors: Sequence[Tensor] = ()


def open_ipc_tensors(connection: socket.socket) -> Sequence[Tensor]:
    """The tensors that the other end of `connection` shares, in its order."""
    connection.sendall(_Opened.name)
    name = read_exactly(connection, ID_BYTES)
    if name != _Opened.name:
        _close_opened()  # what they take on the GPU goes first
        _Opened.tensors = [open_handle(handle) for handle in pickle.loads(read_frame(connection))]
        _Opened.name = name
        at_exit(_close_opened)
    return _Opened.tensors


def _close_opened() -> None:
    _Opened.name, _Opened.tensors = _NOTHING, ()
