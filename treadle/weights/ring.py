"""A few slots of memory that two processes of one machine share: on the host, or on one GPU.

Owns the memory and how the other side gets at it: a file descriptor that no name leads to, so that nothing stays behind
when a process is killed, or a CUDA IPC handle. Knows nothing of weights.
"""

import mmap
import os
import pickle
import socket
from typing import Any, Protocol

import torch
from torch import Tensor

_HANDLE_BYTES = 1 << 16


class Ring(Protocol):
    """Slots of equal size, as bytes."""

    slots: tuple[Tensor, ...]

    def send(self, connection: socket.socket) -> None:
        """Let whoever is at the other end of `connection` attach to the slots."""
        ...

    def settle(self) -> None:
        """Return when what was written is there for the other side."""
        ...


class HostRing:
    """Slots in memory of the machine."""

    def __init__(self, descriptor: int, size: int, count: int) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, size * count)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.slots = tuple(whole[start : start + size] for start in range(0, size * count, size))

    @classmethod
    def create(cls, size: int, count: int) -> "HostRing":
        descriptor = os.memfd_create("treadle-weights")
        os.ftruncate(descriptor, size * count)
        return cls(descriptor, size, count)

    def send(self, connection: socket.socket) -> None:
        socket.send_fds(connection, [b"host"], [self._descriptor])

    def settle(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the policy may be on a device

    def __del__(self) -> None:
        os.close(self._descriptor)


class DeviceRing:
    """Slots on a GPU that both processes see."""

    def __init__(self, memory: Tensor, size: int) -> None:
        self._memory = memory
        self.slots = tuple(memory[start : start + size] for start in range(0, len(memory), size))

    @classmethod
    def create(cls, size: int, count: int, device: torch.device) -> "DeviceRing":
        return cls(torch.empty(size * count, dtype=torch.uint8, device=device), size)

    def send(self, connection: socket.socket) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(self._memory)  # type: ignore[no-untyped-call]
        identity = _identity(self._memory.device)
        connection.sendall(pickle.dumps((identity, rebuild, arguments)))

    def settle(self) -> None:
        torch.cuda.synchronize(self._memory.device)


def attach(connection: socket.socket, size: int, count: int) -> Ring:
    """The slots that the other end of `connection` sent."""
    message, descriptors, _, _ = socket.recv_fds(connection, _HANDLE_BYTES, 1)
    if descriptors:
        return HostRing(descriptors[0], size, count)
    if not message:
        raise ConnectionError("the sender has gone")
    identity, rebuild, arguments = pickle.loads(message)
    return DeviceRing(rebuild(*_here(arguments, identity)), size)


def _here(arguments: tuple[Any, ...], identity: str) -> tuple[Any, ...]:
    """The arguments of a CUDA tensor, with the number that its device has in this process."""
    for index in range(torch.cuda.device_count()):
        if _identity(torch.device("cuda", index)) == identity:
            return (*arguments[:6], index, *arguments[7:])
    raise RuntimeError(f"the weights are on GPU {identity}, which this process does not see")


def _identity(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
