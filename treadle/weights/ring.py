"""A few slots of memory that two processes of one machine share: on the host, or on one GPU.

Owns the memory and how the other side gets at it: a file descriptor that no name leads to, so that nothing stays behind
when a process is killed, or a CUDA IPC handle. Knows nothing of weights.

Getting at it takes milliseconds on a GPU. So whoever attaches says who it is, gets the same ring each time, and keeps
it: at most one, until another comes.
"""

import mmap
import os
import pickle
import socket
import struct
from collections.abc import Callable
from functools import cache
from multiprocessing.util import Finalize
from typing import Any, Protocol

import torch
from torch import Tensor

NAME_BYTES = 16
_SIZE = struct.Struct("<I")
"""Before every handle, as other messages follow it at once."""
ME = os.urandom(NAME_BYTES)
"""This process, to the rings it attaches to."""


class Ring(Protocol):
    """Slots of equal size, as bytes."""

    slots: tuple[Tensor, ...]

    def send(self, connection: socket.socket, reader: bytes) -> None:
        """Let `reader`, at the other end of `connection`, attach to the slots."""
        ...

    def settle(self) -> None:
        """Return when what was written is there for the other side."""
        ...


class HostRing:
    """Slots in memory of the machine."""

    def __init__(self, descriptor: int, size: int, count: int) -> None:
        self._name = os.urandom(NAME_BYTES)
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, size * count)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.slots = tuple(whole[start : start + size] for start in range(0, size * count, size))

    @classmethod
    def create(cls, size: int, count: int) -> "HostRing":
        descriptor = os.memfd_create("treadle-weights")
        os.ftruncate(descriptor, size * count)
        return cls(descriptor, size, count)

    def send(self, connection: socket.socket, reader: bytes) -> None:
        socket.send_fds(connection, [frame(self._name)], [self._descriptor])

    def settle(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the policy may be on a device

    def __del__(self) -> None:
        os.close(self._descriptor)


class DeviceRing:
    """Slots on a GPU that both processes see."""

    def __init__(self, memory: Tensor, size: int) -> None:
        self._reader = b""
        self._message = b""
        self._memory = memory
        self.slots = tuple(memory[start : start + size] for start in range(0, len(memory), size))

    @classmethod
    def create(cls, size: int, count: int, device: torch.device) -> "DeviceRing":
        return cls(torch.empty(size * count, dtype=torch.uint8, device=device), size)

    def send(self, connection: socket.socket, reader: bytes) -> None:
        if reader != self._reader:  # a handle is for one process: torch counts who holds it
            self._reader, self._message = reader, pickle.dumps(reduce(self._memory))
        connection.sendall(frame(self._message))

    def settle(self) -> None:
        torch.cuda.synchronize(self._memory.device)


class _Attached:
    """The ring that this process got last."""

    message: bytes = b""
    ring: Ring | None = None


def attach(connection: socket.socket, size: int, count: int) -> Ring:
    """The slots that the other end of `connection` sends."""
    head, descriptors, _, _ = socket.recv_fds(connection, _SIZE.size, 1)
    message = read_frame(connection, head)
    if message == _Attached.message and _Attached.ring is not None:
        for descriptor in descriptors:
            os.close(descriptor)
        return _Attached.ring
    if descriptors:
        ring: Ring = HostRing(descriptors[0], size, count)
    else:
        ring = DeviceRing(rebuild(pickle.loads(message)), size)
        Finalize(None, _detach, exitpriority=1)
    _Attached.message, _Attached.ring = message, ring
    return ring


def _detach() -> None:
    """The other side's memory is its own again; otherwise torch warns of it when that side ends."""
    _Attached.message, _Attached.ring = b"", None


def frame(message: bytes) -> bytes:
    """A message that others may follow at once."""
    return _SIZE.pack(len(message)) + message


def read_frame(connection: socket.socket, head: bytes = b"") -> bytes:
    """A message, of which `head` was read already."""
    head += read_exactly(connection, _SIZE.size - len(head))
    return read_exactly(connection, _SIZE.unpack(head)[0])


def read_exactly(connection: socket.socket, size: int) -> bytes:
    found = connection.recv(size, socket.MSG_WAITALL) if size else b""
    if len(found) < size:
        raise ConnectionError("the other side has gone")
    return found


Handle = tuple[str, Callable[..., Tensor], tuple[Any, ...]]
"""A CUDA tensor for another process: its GPU, and how it is opened there."""


def reduce(tensor: Tensor) -> Handle:
    from torch.multiprocessing.reductions import reduce_tensor

    rebuilding, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return _identity(tensor.device), rebuilding, arguments


def rebuild(handle: Handle) -> Tensor:
    """The tensor behind a handle, whatever number its GPU has in this process."""
    identity, rebuilding, arguments = handle
    for index in range(torch.cuda.device_count()):
        if _identity(torch.device("cuda", index)) == identity:
            return rebuilding(*arguments[:6], index, *arguments[7:])
    raise RuntimeError(f"the weights are on GPU {identity}, which this process does not see")


@cache
def _identity(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
