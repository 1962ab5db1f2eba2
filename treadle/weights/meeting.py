"""Processes that meet for one broadcast: a group of their own, apart from any that they are in already.

Owns the group (gloo on CPUs, NCCL on GPUs), the address under which a member is reached, and its deadlines.
Knows no weights. Invariant: a group lives as long as its block; leaving it ends the connections, which the others see.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from treadle.errors import EngineFailure

Group = Any
"""A ProcessGroupGloo or a ProcessGroupNCCL; the second is not there in CPU builds of torch."""

_GLOO: Any = getattr(dist, "ProcessGroupGloo", None)


@dataclass(frozen=True, slots=True)
class Seat:
    """A member's place: which round, which rank, how many there are. The sender is rank 0."""

    round: int
    rank: int
    size: int

    def __str__(self) -> str:
        return f"{self.round} {self.rank} {self.size}"

    @classmethod
    def parse(cls, text: bytes) -> Self:
        return cls(*map(int, text.split()))


class Circle:
    """Those who have met."""

    def __init__(self, group: Group, device: torch.device, wait: timedelta) -> None:
        self._group = group
        self._device = device
        self._wait = wait

    @classmethod
    @contextmanager
    def enter(
        cls, place: tuple[Store, Seat], address: tuple[str, int], device: torch.device, timeout_s: float
    ) -> Iterator[Self]:
        """Meet the others of a round; `address` is the sender's. No wait takes longer than `timeout_s`."""
        store, seat = place
        wait, inner = timedelta(seconds=timeout_s), PrefixStore(f"round/{seat.round}", store)
        circle = cls(_join(inner, seat, address, device, wait), device, wait)
        try:
            yield circle
        finally:
            del circle._group  # whoever still waits for this process learns that it has gone

    def broadcast(self, memory: Tensor) -> None:
        """From the sender to all; return when it is done here."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([memory], options).wait(self._wait)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _join(store: Store, seat: Seat, address: tuple[str, int], device: torch.device, wait: timedelta) -> Group:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = 4 * wait  # its watchdog ends the process: the deadline of a broadcast comes first
        return dist.ProcessGroupNCCL(store, seat.rank, seat.size, nccl)
    options = _GLOO._Options()
    options._timeout = wait
    options._devices = [_GLOO.create_device(hostname=own_address(seat, address))]
    return _GLOO(store, seat.rank, seat.size, options)


def own_address(seat: Seat, address: tuple[str, int]) -> str:
    """Where the others reach this process: the sender as they did already, others by the interface that leads there.

    Left to itself, gloo looks its host's name up, which on many machines is the loopback.
    """
    if seat.rank == 0:
        return address[0]
    family = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def knock(host: str, port: int, timeout_s: float) -> None:
    """Refuse an address where nobody listens any more. torch would go on trying."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        raise EngineFailure(f"the sender of the weights at {host}:{port} has gone: {error}") from error
