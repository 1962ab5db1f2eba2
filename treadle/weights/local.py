"""Weights to other processes of the same machine: through slots of shared memory, or read where they lie on a GPU.

Owns the versions on offer, and a door that parcels lead to. Whoever opens a parcel enters, gets the slots of a ring of
its own, and reads bucket after bucket; the sender fills the slots in turn, and fills one again only when the reader is
done with it. So memory is bounded by the ring, readers do not wait for each other, and one that dies is noticed by its
socket.

On a GPU that both sides are on, a policy whose weights have the right number format already is read in place: `direct`.

Who waits for whom: a reader waits for the next bucket, the sender for a slot to be free, or for the end of a reading in
place; each for `timeout_s` at most. `retire` waits until every reader is done or gone.
"""

import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.errors import EngineFailure
from treadle.weights.direct import Shares, open_shares
from treadle.weights.door import ME, NAME_BYTES, Door, enter, read_exactly
from treadle.weights.parcel import DEVICE_BUCKET_BYTES, Cast, Parcel, Spec
from treadle.weights.ring import DeviceRing, HostRing, Ring, attach

SLOTS = 2
HOST_BUCKET_BYTES = 4 << 20
"""Small, so that what one process wrote is still in the cache when the other reads it: 32 MB take twice as long."""

_NUMBER = struct.Struct("<q")
_DONE = -1


class LocalTransport:
    """The sender's side, to be closed. Slots are on `device`: the receivers' own GPU, or the CPU for all others."""

    def __init__(
        self, *, device: torch.device | str = "cpu", timeout_s: float = 60.0, bucket_bytes: int | None = None
    ) -> None:
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        default = DEVICE_BUCKET_BYTES if self._device.type == "cuda" else HOST_BUCKET_BYTES
        self._bucket_bytes = bucket_bytes or default
        self._offers: dict[int, _Offer] = {}
        self._changed = threading.Condition()
        self._rings = _Rings(self._device)
        self._shares = Shares()
        self._door: Door | None = None

    def offer(self, version: int, tensors: Cast) -> Parcel:
        """A parcel of these tensors, to be opened by any number of processes of this machine."""
        self._door = self._door or Door(self._serve, timeout_s=self._timeout_s)
        specs = tensors.specs()
        parcel = LocalParcel(
            specs,
            self._bucket_bytes,
            address=self._door.address,
            version=version,
            timeout_s=self._timeout_s,
            direct=_lie_ready(tensors.sources, specs, self._device),
        )
        with self._changed:
            self._offers[version] = _Offer(parcel, tensors.sources)
        return parcel

    def retire(self, version: int) -> None:
        with self._changed:
            if offer := self._offers.pop(version, None):
                self._changed.wait_for(lambda: not offer.readers)  # each of their waits has a deadline

    def close(self) -> None:
        door, self._door = self._door, None
        if door is not None:
            door.close()
        for version in list(self._offers):
            self.retire(version)

    def _serve(self, connection: socket.socket) -> None:
        """Send everything to one reader. It may be gone, or stuck: then it has no claim any more."""
        reader, version = read_exactly(connection, NAME_BYTES), _receive(connection)
        with self._reading(version) as offer:
            if offer.parcel.direct:
                self._share(offer, connection, reader)
            else:
                self._stream(offer, connection, reader)

    @contextmanager
    def _reading(self, version: int) -> Iterator["_Offer"]:
        with self._changed:
            if (offer := self._offers.get(version)) is None:
                raise ConnectionError(f"version {version} is not on offer")
            offer.readers += 1
        try:
            yield offer
        finally:
            with self._changed:
                offer.readers -= 1
                self._changed.notify_all()

    def _share(self, offer: "_Offer", connection: socket.socket, reader: bytes) -> None:
        torch.cuda.synchronize(self._device)  # whatever was to be computed for them is done
        self._shares.send(connection, reader, list(offer.tensors.values()))
        _await_end(connection)

    def _stream(self, offer: "_Offer", connection: socket.socket, reader: bytes) -> None:
        """Through a ring, which goes if this fails: a stuck reader may still look at it."""
        size = offer.parcel.largest
        ring = self._rings.take(size, reader)
        ring.send(connection, reader)
        with torch.no_grad():
            for number, bucket in enumerate(offer.parcel.buckets):
                if number >= SLOTS:
                    _receive(connection)
                bucket.fill(ring.slots[number % SLOTS], offer.tensors)
                ring.settle()
                connection.sendall(_NUMBER.pack(number))
        _await_end(connection)
        self._rings.give_back(size, reader, ring)


class LocalParcel(Parcel):
    """Opened by connecting to the sender."""

    def __init__(
        self,
        specs: Sequence[Spec],
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
            with enter(self._address, timeout_s=self._timeout_s) as connection:
                connection.sendall(ME + _NUMBER.pack(self._version))
                yield from self._open(connection) if self.direct else self._empty_slots(connection)
                connection.sendall(_NUMBER.pack(_DONE))
        except TimeoutError:
            raise EngineFailure(f"the sender of the weights was silent for {self._timeout_s:g} s") from None
        except OSError as error:
            raise EngineFailure(f"the sender of the weights has gone, or taken them back: {error}") from error

    def _open(self, connection: socket.socket) -> Iterator[Sequence[tuple[str, Tensor]]]:
        tensors = open_shares(connection)
        try:
            yield [*zip((spec.name for spec in self.specs), tensors, strict=True)]
        finally:
            for device in {tensor.device for tensor in tensors}:
                torch.cuda.synchronize(device)  # what was read may still be on its way

    def _empty_slots(self, connection: socket.socket) -> Iterator[Sequence[tuple[str, Tensor]]]:
        ring = attach(connection, self.largest, SLOTS)
        for number, bucket in enumerate(self.buckets):
            if _receive(connection) != number:
                raise ConnectionError("the sender skipped a bucket")
            yield [*bucket.views(ring.slots[number % SLOTS])]
            ring.settle()
            connection.sendall(_NUMBER.pack(number))


class _Rings:
    """Rings that were made, for the next time: each reader gets its own again, if there is one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[tuple[int, bytes, Ring]] = []
        self._lock = threading.Lock()

    def take(self, size: int, reader: bytes) -> Ring:
        with self._lock:
            fitting = [entry for entry in self._free if entry[0] == size]
            own = [entry for entry in fitting if entry[1] == reader]
            if fitting:
                entry = (own or fitting)[0]
                self._free.remove(entry)
                return entry[2]
        if self._device.type == "cuda":
            return DeviceRing.create(size, SLOTS, self._device)
        return HostRing.create(size, SLOTS)

    def give_back(self, size: int, reader: bytes, ring: Ring) -> None:
        with self._lock:
            self._free.append((size, reader, ring))


@dataclass(slots=True)
class _Offer:
    """One version on offer."""

    parcel: LocalParcel
    tensors: Mapping[str, Tensor]
    readers: int = 0
    """Processes that read it now."""


def _lie_ready(tensors: Mapping[str, Tensor], specs: Sequence[Spec], device: torch.device) -> bool:
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
