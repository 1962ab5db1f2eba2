"""Shared-memory transport: weights to other processes of the same machine, through host or GPU memory.

Owns the published versions, a Unix server that transfers connect to, and the ring of slots that both processes map: a
file descriptor without a name on the host, so that nothing stays behind a killed process, or a CUDA IPC handle on a
GPU. A reader connects, gets the slots of a ring of its own, and reads bucket after bucket; the sender fills the slots
in turn, and fills one again only when the reader is done with it. So memory is bounded by the ring, readers do not wait
for each other, and one that dies is noticed by its socket. Mapping a ring takes milliseconds on a GPU, so both sides
keep it: a reader at most one.

On a GPU that both sides are on, a policy whose weights have the right dtype already is read in place: `cuda_ipc`.

What waits for what: a reader waits for the next bucket, the sender for a slot to be free, or for the end of a reading
in place; each for `timeout_s` at most. `retire` waits until every reader is done or gone.
"""

import mmap
import os
import pickle
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treadle.errors import EngineFailure
from treadle.weights.cuda_ipc import IpcHandleCache, at_exit, make_handle, open_handle, open_ipc_tensors
from treadle.weights.transfer import DEVICE_BUCKET_BYTES, CastTensors, TensorSpec, WeightTransfer
from treadle.weights.unix_server import (
    HEAD_BYTES,
    ID_BYTES,
    OWN_ID,
    UnixServer,
    connect_unix,
    frame,
    read_exactly,
    read_frame,
)


class SlotRing(Protocol):
    """Slots of equal size, as bytes."""

    slots: tuple[Tensor, ...]

    def send(self, connection: socket.socket, reader: bytes) -> None:
        """Let `reader`, at the other end of `connection`, attach to the slots."""
        ...

    def settle(self) -> None:
        """Return when what was written is there for the other side."""
        ...


class HostSlotRing:
    """Slots in memory of the machine."""

    def __init__(self, descriptor: int, size: int, count: int) -> None:
        self._name = os.urandom(ID_BYTES)
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, size * count)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.slots = tuple(whole[start : start + size] for start in range(0, size * count, size))

    @classmethod
    def create(cls, size: int, count: int) -> "HostSlotRing":
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


class DeviceSlotRing:
    """Slots on a GPU that both processes see."""

    def __init__(self, memory: Tensor, size: int) -> None:
        self._reader = b""
        self._message = b""
        self._memory = memory
        self.slots = tuple(memory[start : start + size] for start in range(0, len(memory), size))

    @classmethod
    def create(cls, size: int, count: int, device: torch.device) -> "DeviceSlotRing":
        return cls(torch.empty(size * count, dtype=torch.uint8, device=device), size)

    def send(self, connection: socket.socket, reader: bytes) -> None:
        if reader != self._reader:  # a handle is for one process: torch counts its holders
            self._reader, self._message = reader, pickle.dumps(make_handle(self._memory))
        connection.sendall(frame(self._message))

    def settle(self) -> None:
        torch.cuda.synchronize(self._memory.device)


class _AttachedRing:
    """The ring that this process got last."""

    message: bytes = b""
    ring: SlotRing | None = None


def attach_ring(connection: socket.socket, size: int, count: int) -> SlotRing:
    """The slots that the other end of `connection` sends."""
    head, descriptors, _, _ = socket.recv_fds(connection, HEAD_BYTES, 1)
    message = read_frame(connection, head)
    if message == _AttachedRing.message and _AttachedRing.ring is not None:
        for descriptor in descriptors:
            os.close(descriptor)
        return _AttachedRing.ring
    if descriptors:
        ring: SlotRing = HostSlotRing(descriptors[0], size, count)
    else:
        ring = DeviceSlotRing(open_handle(pickle.loads(message)), size)
        at_exit(_detach_ring)
    _AttachedRing.message, _AttachedRing.ring = message, ring
    return ring


def _detach_ring() -> None:
    _AttachedRing.message, _AttachedRing.ring = b"", None


SLOTS = 2
HOST_BUCKET_BYTES = 4 << 20
"""Small, so that what one process wrote is still in the cache when the other reads it: 32 MB take twice as long."""

_NUMBER = struct.Struct("<q")
_DONE = -1


class SharedMemoryTransport:
    """The sender's side, to be closed. Slots are on `device`: the receivers' own GPU, or the CPU for all others."""

    def __init__(
        self, *, device: torch.device | str = "cpu", timeout_s: float = 60.0, bucket_bytes: int | None = None
    ) -> None:
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        default = DEVICE_BUCKET_BYTES if self._device.type == "cuda" else HOST_BUCKET_BYTES
        self._bucket_bytes = bucket_bytes or default
        self._published: dict[int, _PublishedVersion] = {}
        self._changed = threading.Condition()
        self._rings = _RingPool(self._device)
        self._shares = IpcHandleCache()
        self._server: UnixServer | None = None

    def publish(self, version: int, tensors: CastTensors) -> WeightTransfer:
        """A transfer of these tensors, to be opened by any number of processes of this machine."""
        self._server = self._server or UnixServer(self._serve, timeout_s=self._timeout_s)
        specs = tensors.specs()
        transfer = SharedMemoryTransfer(
            specs,
            self._bucket_bytes,
            address=self._server.address,
            version=version,
            timeout_s=self._timeout_s,
            direct=_readable_in_place(tensors.sources, specs, self._device),
        )
        with self._changed:
            self._published[version] = _PublishedVersion(transfer, tensors.sources)
        return transfer

    def retire(self, version: int) -> None:
        with self._changed:
            if published := self._published.pop(version, None):
                self._changed.wait_for(lambda: not published.readers)  # each of their waits has a deadline

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for version in list(self._published):
            self.retire(version)

    def _serve(self, connection: socket.socket) -> None:
        """Send everything to one reader. It may be gone, or stuck: then it has no claim any more."""
        reader, version = read_exactly(connection, ID_BYTES), _receive(connection)
        with self._reading(version) as published:
            if published.transfer.direct:
                self._share(published, connection, reader)
            else:
                self._stream(published, connection, reader)

    @contextmanager
    def _reading(self, version: int) -> Iterator["_PublishedVersion"]:
        with self._changed:
            if (published := self._published.get(version)) is None:
                raise ConnectionError(f"version {version} is not published")
            published.readers += 1
        try:
            yield published
        finally:
            with self._changed:
                published.readers -= 1
                self._changed.notify_all()

    def _share(self, published: "_PublishedVersion", connection: socket.socket, reader: bytes) -> None:
        torch.cuda.synchronize(self._device)  # whatever was to be computed for them is done
        self._shares.send(connection, reader, list(published.tensors.values()))
        _await_end(connection)

    def _stream(self, published: "_PublishedVersion", connection: socket.socket, reader: bytes) -> None:
        """Through a ring, which goes if this fails: a stuck reader may still look at it."""
        size = published.transfer.largest
        ring = self._rings.take(size, reader)
        ring.send(connection, reader)
        with torch.no_grad():
            for number, bucket in enumerate(published.transfer.buckets):
                if number >= SLOTS:
                    _receive(connection)
                bucket.fill(ring.slots[number % SLOTS], published.tensors)
                ring.settle()
                connection.sendall(_NUMBER.pack(number))
        _await_end(connection)
        self._rings.give_back(size, reader, ring)


class SharedMemoryTransfer(WeightTransfer):
    """Opened by connecting to the sender."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        bucket_bytes: int,
        *,
        address: str,
        version: int,
        timeout_s: float,
        direct: bool,
    ) -> None:
        super().__init__(specs, bucket_bytes)
        self.direct = direct
        """Whether it is read where it lies."""
        self._address = address
        self._version = version
        self._timeout_s = timeout_s

    def batches(self) -> Iterator[Sequence[tuple[str, Tensor]]]:
        try:
            with connect_unix(self._address, timeout_s=self._timeout_s) as connection:
                connection.sendall(OWN_ID + _NUMBER.pack(self._version))
                yield from self._open(connection) if self.direct else self._empty_slots(connection)
                connection.sendall(_NUMBER.pack(_DONE))
        except TimeoutError:
            raise EngineFailure(f"the sender of the weights was silent for {self._timeout_s:g} s") from None
        except OSError as error:
            raise EngineFailure(f"the sender of the weights has gone, or taken them back: {error}") from error

    def _open(self, connection: socket.socket) -> Iterator[Sequence[tuple[str, Tensor]]]:
        tensors = open_ipc_tensors(connection)
        try:
            yield [*zip((spec.name for spec in self.specs), tensors, strict=True)]
        finally:
            for device in {tensor.device for tensor in tensors}:
                torch.cuda.synchronize(device)  # what was read may still be on its way

    def _empty_slots(self, connection: socket.socket) -> Iterator[Sequence[tuple[str, Tensor]]]:
        ring = attach_ring(connection, self.largest, SLOTS)
        for number, bucket in enumerate(self.buckets):
            if _receive(connection) != number:
                raise ConnectionError("the sender skipped a bucket")
            yield [*bucket.views(ring.slots[number % SLOTS])]
            ring.settle()
            connection.sendall(_NUMBER.pack(number))


class _RingPool:
    """Rings that were made, for the next time: each reader gets its own again, if there is one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[tuple[int, bytes, SlotRing]] = []
        self._lock = threading.Lock()

    def take(self, size: int, reader: bytes) -> SlotRing:
        with self._lock:
            fitting = [entry for entry in self._free if entry[0] == size]
            own = [entry for entry in fitting if entry[1] == reader]
            if fitting:
                entry = (own or fitting)[0]
                self._free.remove(entry)
                return entry[2]
        if self._device.type == "cuda":
            return DeviceSlotRing.create(size, SLOTS, self._device)
        return HostSlotRing.create(size, SLOTS)

    def give_back(self, size: int, reader: bytes, ring: SlotRing) -> None:
        with self._lock:
            self._free.append((size, reader, ring))


@dataclass(slots=True)
class _PublishedVersion:
    """One published version."""

    transfer: SharedMemoryTransfer
    tensors: Mapping[str, Tensor]
    readers: int = 0
    """Processes that read it now."""


def _readable_in_place(tensors: Mapping[str, Tensor], specs: Sequence[TensorSpec], device: torch.device) -> bool:
    """Whether everything lies on a GPU as its reader wants it."""
    if device.type != "cuda":
        return False
    there = torch.device("cuda", device.index or 0)
    pairs = zip(tensors.values(), specs, strict=True)
    return all(
        tensor.device == there and tensor.dtype == spec.dtype and tensor.is_contiguous() for tensor, spec in pairs
    )


def _await_end(connection: socket.socket) -> None:
    while _receive(connection) != _DONE:
        continue


def _receive(connection: socket.socket) -> int:
    number: int = _NUMBER.unpack(read_exactly(connection, _NUMBER.size))[0]
    return number
