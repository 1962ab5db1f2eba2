"""Collective transport: a broadcast group (NCCL or gloo) that carries each bucket of weights to all receivers at once.

Owns the sender's side: for each version a store that receivers sign in at, and rounds. A round is a broadcast group of
the receivers that signed in at about the same time (gloo on CPUs, NCCL on GPUs, apart from any group the process is in
already), and one broadcast of every bucket. A receiver that comes late, or was in a round that broke, signs in again
and is served by the next round. Memory is one bucket on each side.
Invariant: a group lives as long as its block; leaving it ends the connections, which the others see.

What waits for what: the sender waits for the first receiver of a round until the version is retired, and for the others
`JOIN_S` after the last one came. A receiver waits for its rank, then all wait for each other at each bucket, a quarter
of `timeout_s` at most. So a receiver that dies or hangs breaks one round, and the others have the next.
"""

import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from treadle.errors import EngineFailure
from treadle.policy.rendezvous import RendezvousServer, join_store
from treadle.weights.transfer import DEVICE_BUCKET_BYTES, CastTensors, TensorSpec, WeightTransfer

Group = Any
"""A ProcessGroupGloo or a ProcessGroupNCCL; the second is not there in CPU builds of torch."""

_GLOO: Any = getattr(dist, "ProcessGroupGloo", None)


@dataclass(frozen=True, slots=True)
class BroadcastRank:
    """A member's place: which round, which rank, how many there are. The sender is rank 0."""

    round: int
    rank: int
    size: int

    def __str__(self) -> str:
        return f"{self.round} {self.rank} {self.size}"

    @classmethod
    def parse(cls, text: bytes) -> Self:
        return cls(*map(int, text.split()))


class BroadcastGroup:
    """Broadcast group of the processes that signed in."""

    def __init__(self, group: Group, device: torch.device, wait: timedelta) -> None:
        self._group = group
        self._device = device
        self._wait = wait

    @classmethod
    @contextmanager
    def enter(
        cls, place: tuple[Store, BroadcastRank], address: tuple[str, int], device: torch.device, timeout_s: float
    ) -> Iterator[Self]:
        """Meet the others of a round; `address` is the sender's. No wait takes longer than `timeout_s`."""
        store, rank = place
        wait, inner = timedelta(seconds=timeout_s), PrefixStore(f"round/{rank.round}", store)
        group = cls(_join_group(inner, rank, address, device, wait), device, wait)
        try:
            yield group
        finally:
            del group._group  # processes that still wait for this one see it leave

    def broadcast(self, memory: Tensor) -> None:
        """From the sender to all; return when it is done here."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([memory], options).wait(self._wait)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _join_group(
    store: Store, rank: BroadcastRank, address: tuple[str, int], device: torch.device, wait: timedelta
) -> Group:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = 4 * wait  # its watchdog ends the process: the deadline of a broadcast comes first
        return dist.ProcessGroupNCCL(store, rank.rank, rank.size, nccl)
    options = _GLOO._Options()
    options._timeout = wait
    options._devices = [_GLOO.create_device(hostname=own_address(rank, address))]
    return _GLOO(store, rank.rank, rank.size, options)


def own_address(rank: BroadcastRank, address: tuple[str, int]) -> str:
    """Where the others reach this process: the sender as they did already, others by the interface that leads there.

    Left to itself, gloo looks its host's name up, which on many machines is the loopback.
    """
    if rank.rank == 0:
        return address[0]
    family = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def check_reachable(host: str, port: int, timeout_s: float) -> None:
    """Refuse an address where no process listens any more. torch would keep retrying."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        raise EngineFailure(f"the sender of the weights at {host}:{port} has gone: {error}") from error


log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Rounds in which a receiver takes part before it gives up."""

JOIN_S = 0.5
"""How long a round waits for one more receiver, where fewer came than are expected."""

HOST_BUCKET_BYTES = 16 << 20

_SIGNED, _RANK, _END = "signed", "rank", "end"
_LONG = timedelta(days=1)


class CollectiveTransport:
    """The sender's side. `host` is where receivers reach this machine; `receivers` how many are expected to come."""

    def __init__(
        self,
        *,
        host: str,
        receivers: int,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
        bucket_bytes: int | None = None,
    ) -> None:
        self._host = host
        self._receivers = receivers
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        default = DEVICE_BUCKET_BYTES if self._device.type == "cuda" else HOST_BUCKET_BYTES
        self._bucket_bytes = bucket_bytes or default
        self._published: dict[int, _BroadcastRounds] = {}

    def publish(self, version: int, tensors: CastTensors) -> WeightTransfer:
        """A transfer of these tensors, to be opened by any number of processes that reach `host`."""
        patience = timedelta(seconds=self._timeout_s)
        key = token_hex(16)
        server = RendezvousServer(self._host, key, patience)
        address = self._host, server.port
        transfer = CollectiveTransfer(
            tensors.specs(), self._bucket_bytes, address, key, self._timeout_s, self._device.type
        )
        self._published[version] = _BroadcastRounds(server, transfer, tensors, self._device, self._receivers)
        return transfer

    def retire(self, version: int) -> None:
        published = self._published.pop(version, None)
        if published is not None:
            published.close()

    def close(self) -> None:
        for version in list(self._published):
            self.retire(version)


class CollectiveTransfer(WeightTransfer):
    """Opened by signing in with the sender."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        bucket_bytes: int,
        address: tuple[str, int],
        key: str,
        timeout_s: float,
        kind: str,
    ) -> None:
        super().__init__(specs, bucket_bytes)
        self.address = address
        self.key = key
        self.timeout_s = timeout_s
        self._kind = kind

    @property
    def stall_s(self) -> float:
        """How long a round may stand still: less than a receiver has in all, so that there is time for another."""
        return self.timeout_s / 4

    def batches(self) -> Iterator[Sequence[tuple[str, Tensor]]]:
        """A round begins with the first bucket; those that were in an earlier round are passed over."""
        device = torch.device(self._kind, torch.cuda.current_device()) if self._kind == "cuda" else torch.device("cpu")
        done, memory = 0, bucket_memory(self, device)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with BroadcastGroup.enter(self._sign_in(), self.address, device, self.stall_s) as group:
                    for number, bucket in enumerate(self.buckets):
                        group.broadcast(memory[: bucket.num_bytes])
                        if number == done:
                            yield [*bucket.views(memory)]
                            done += 1
                return
            except RuntimeError as error:  # what torch raises for a peer that has gone, and for time that is over
                if attempt == ATTEMPTS:
                    raise EngineFailure(f"the broadcast of the weights broke {attempt} times: {error}") from error

    def _sign_in(self) -> tuple[Store, BroadcastRank]:
        """This receiver's rank in the next round."""
        host, port = self.address
        check_reachable(host, port, self.timeout_s)
        wait = timedelta(seconds=self.timeout_s)
        try:
            store = join_store(host, port, self.key, wait)
            number = store.add(_SIGNED, 1)
            store.set(f"{_SIGNED}/{number}", "")
            store.wait([f"{_RANK}/{number}"], wait)
            return store, BroadcastRank.parse(store.get(f"{_RANK}/{number}"))
        except RuntimeError as error:
            waited = f"no rank in a broadcast of the weights from {host}:{port} within {self.timeout_s:g} s"
            raise EngineFailure(f"{waited}: {error}") from error


def bucket_memory(transfer: WeightTransfer, device: torch.device) -> Tensor:
    """Memory for the largest bucket."""
    return torch.empty(transfer.largest, dtype=torch.uint8, device=device)


class _BroadcastRounds:
    """One published version: rounds in a thread, until it is taken back."""

    def __init__(
        self,
        server: RendezvousServer,
        transfer: CollectiveTransfer,
        tensors: CastTensors,
        device: torch.device,
        receivers: int,
    ) -> None:
        self._server = server
        self._store = server.store
        self._transfer = transfer
        self._tensors = tensors
        self._device = device
        self._missing = receivers
        """Receivers that are expected and have not been served yet."""
        self._admitted = 0
        self._ending = False
        self._work = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._work.start()

    def _serve(self) -> None:
        numbers = range(0)
        while not self._ending:
            try:
                numbers = self._admit()
                if numbers:
                    self._broadcast(numbers)
                    self._missing -= len(numbers)
            except RuntimeError as error:
                log.warning("a broadcast of weights to %d receivers broke: %s", len(numbers), error)

    def _admit(self) -> range:
        """The numbers of receivers that signed in since the last round, when it is time for another."""
        first = self._admitted + 1
        while self._admitted + 1 - first < max(1, self._missing):
            wait = _LONG if self._admitted + 1 == first else timedelta(seconds=JOIN_S)
            try:
                self._store.wait([f"{_SIGNED}/{self._admitted + 1}"], wait)
            except RuntimeError:
                break  # no other receiver comes, for now
            if self._store.get(f"{_SIGNED}/{self._admitted + 1}") == _END.encode():
                self._ending = True
                break
            self._admitted += 1
        return range(first, self._admitted + 1)

    def _broadcast(self, numbers: range) -> None:
        size = len(numbers) + 1
        for rank, number in enumerate(numbers, 1):
            self._store.set(f"{_RANK}/{number}", str(BroadcastRank(numbers.start, rank, size)))
        transfer, mine = self._transfer, BroadcastRank(numbers.start, 0, size)
        memory = bucket_memory(transfer, self._device)
        with (
            BroadcastGroup.enter((self._store, mine), transfer.address, self._device, transfer.stall_s) as group,
            torch.no_grad(),
        ):
            for bucket in transfer.buckets:
                bucket.fill(memory, self._tensors.sources)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                group.broadcast(memory[: bucket.num_bytes])

    def close(self) -> None:
        """Close sign-in, and wait for the round that runs. The thread's own store is busy waiting."""
        host, port = self._transfer.address
        store = join_store(host, port, self._transfer.key)
        store.set(f"{_SIGNED}/{store.add(_SIGNED, 1)}", _END)
        self._work.join()  # each of its waits ends: the first now, the others by their deadlines
