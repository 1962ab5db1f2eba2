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
from typing import Protocol

import torch
from torch import Tensor

from treadle.weights.door import HEAD_BYTES, NAME_BYTES, frame, read_frame
from treadle.weights.handles import at_exit, make_handle, open_handle


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
            self._reader, self._message = reader, pickle.dumps(make_handle(self._memory))
        connection.sendall(frame(self._message))

    def settle(self) -> None:
        torch.cuda.synchronize(self._memory.device)


class _Attached:
    """The ring that this process got last."""

    message: bytes = b""
    ring: Ring | None = None


def attach(connection: socket.socket, size: int, count: int) -> Ring:
    """The slots that the other end of `connection` sends."""
    head, descriptors, _, _ = socket.recv_fds(connection, HEAD_BYTES, 1)
    message = read_frame(connection, head)
    if message == _Attached.message and _Attached.ring is not None:
        for descriptor in descriptors:
            os.close(descriptor)
        return _Attached.ring
    if descriptors:
        ring: Ring = HostRing(descriptors[0], size, count)
    else:
        ring = DeviceRing(open_handle(pickle.loads(message)), size)
        at_exit(_detach)
    _Attached.message, _Attached.ring = message, ring
    return ring


def _detach() -> None:
    _Attached.message, _Attached.ring = b"", None
