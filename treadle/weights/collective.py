"""Weights to processes on other machines: one broadcast of each bucket to all receivers at once.

Owns the meeting of sender and receivers for one version, over a store that the sender keeps: receivers sign in, the
sender closes the list, and whoever is on it forms a group (gloo on CPUs, NCCL on GPUs). A receiver that does not sign
in within `timeout_s` is left out; one that dies during the broadcast ends it for all, and the sender says so. Memory is
one bucket on each side.

Who waits for whom: the sender waits for the receivers to sign in, a receiver for the list, then all for each other at
each bucket; each of these waits ends after `timeout_s`. A parcel of this kind can be read once by each receiver.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from treadle.errors import EngineFailure
from treadle.weights.parcel import DEVICE_BUCKET_BYTES, HOST_BUCKET_BYTES, Bucket, Cast, Parcel, Spec

Group = Any
"""A ProcessGroupGloo or a ProcessGroupNCCL; the second is not there in CPU builds of torch."""

_LIST = "list"
_SIGNED = "signed"


class CollectiveTransport:
    """The sender's side. `host` is where receivers reach this machine; `receivers` how many processes will read."""

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
        self._running: dict[int, threading.Thread] = {}
        self.failure: str | None = None
        """Why the last broadcast ended early, if it did."""

    def offer(self, version: int, tensors: Cast) -> Parcel:
        """A parcel that `receivers` processes are expected to open."""
        wait = timedelta(seconds=self._timeout_s)
        store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=wait)
        address = self._host, store.port
        parcel = CollectiveParcel(tensors.specs(), self._bucket_bytes, address, self._timeout_s, self._device.type)
        work = threading.Thread(target=self._broadcast, args=(store, parcel, tensors), name="weights", daemon=True)
        self._running[version] = work
        work.start()
        return parcel

    def _broadcast(self, store: Store, parcel: "CollectiveParcel", tensors: Cast) -> None:
        self.failure = None
        try:
            present = _close_list(store, self._receivers, self._timeout_s)
            if present:
                group = _join(store, 0, present + 1, self._device, self._timeout_s)
                memory = _make_room(parcel, self._device)
                for bucket in parcel.buckets:
                    _send(group, bucket, tensors, memory[: bucket.num_bytes])
        except RuntimeError as error:  # what torch raises for a peer that has gone, and for time that is over
            self.failure = str(error)

    def retire(self, version: int) -> None:
        work = self._running.pop(version, None)
        if work is not None:
            work.join()  # each of its waits has a deadline

    def close(self) -> None:
        for version in list(self._running):
            self.retire(version)


class CollectiveParcel(Parcel):
    """Opened by signing in with the sender."""

    def __init__(
        self, specs: Sequence[Spec], bucket_bytes: int, address: tuple[str, int], timeout_s: float, kind: str
    ) -> None:
        super().__init__(specs, bucket_bytes)
        self._address = address
        self._timeout_s = timeout_s
        self._kind = kind

    def read(self) -> Iterator[tuple[str, Tensor]]:
        device = torch.device(self._kind, torch.cuda.current_device()) if self._kind == "cuda" else torch.device("cpu")
        try:
            group = self._sign_in(device)
            memory = _make_room(self, device)
            for bucket in self.buckets:
                _wait(group, memory[: bucket.num_bytes])
                yield from bucket.views(memory)
        except RuntimeError as error:
            raise EngineFailure(f"the broadcast of the weights ended early: {error}") from error

    def _sign_in(self, device: torch.device) -> Group:
        host, port = self._address
        wait = timedelta(seconds=self._timeout_s)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
        rank = store.add(_SIGNED, 1)
        store.set(f"{_SIGNED}/{rank}", "")
        store.wait([_LIST], wait)
        present = int(store.get(_LIST))
        if rank > present:
            raise EngineFailure(f"signed in as number {rank} when the list of {present} receivers was closed")
        return _join(store, rank, present + 1, device, self._timeout_s)


def _close_list(store: Store, expected: int, timeout_s: float) -> int:
    """Wait for the receivers to sign in; how many are on the list then."""
    with suppress(RuntimeError):  # some may not come in time: the others need not wait for them any longer
        store.wait([f"{_SIGNED}/{rank}" for rank in range(1, expected + 1)], timedelta(seconds=timeout_s))
    present: int = min(store.add(_SIGNED, 0), expected)
    store.set(_LIST, str(present))
    return present


def _join(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Group:
    """A group of its own, apart from any that the process is in already."""
    wait, inner = timedelta(seconds=timeout_s), PrefixStore("group", store)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        return dist.ProcessGroupNCCL(inner, rank, size, options)
    return dist.ProcessGroupGloo(inner, rank, size, wait)


def _make_room(parcel: Parcel, device: torch.device) -> Tensor:
    return torch.empty(max(bucket.num_bytes for bucket in parcel.buckets), dtype=torch.uint8, device=device)


def _send(group: Group, bucket: Bucket, tensors: Cast, memory: Tensor) -> None:
    with torch.no_grad():
        bucket.fill(memory, tensors)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    _wait(group, memory)


def _wait(group: Group, memory: Tensor) -> None:
    """Broadcast from the sender, and return when it is done here."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([memory], options).wait()
    if memory.device.type == "cuda":
        torch.cuda.synchronize(memory.device)
