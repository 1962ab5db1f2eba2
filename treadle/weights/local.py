"""Weights to other processes of the same machine: through slots of shared memory, or read where they lie on a GPU.

Owns a socket that a parcel leads to. Whoever opens a parcel connects, gets the slots of a ring of its own, and reads
bucket after bucket; the sender fills the slots in turn, and fills one again only when the reader is done with it. So
memory is bounded by the ring, readers do not wait for each other, and one that dies is noticed by its socket.

On a GPU that both sides are on, a policy whose weights have the right number format already is read in place: `direct`.

Who waits for whom: a reader waits for the next bucket, the sender for a slot to be free; both for `timeout_s` at most.
`retire` waits until every reader is done or gone.
"""

import socket
import struct
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from treadle.errors import EngineFailure
from treadle.weights.direct import Shares, open_shares
from treadle.weights.parcel import DEVICE_BUCKET_BYTES, Cast, Parcel, Spec
from treadle.weights.ring import NAME_BYTES, DeviceRing, HostRing, Ring, attach, introduce, read_exactly

SLOTS = 2
HOST_BUCKET_BYTES = 4 << 20
"""Small, so that what one process wrote is still in the cache when the other reads it: 32 MB take twice as long."""

_NUMBER = struct.Struct("<q")
_DONE = -1


class LocalTransport:
    """The sender's side. The slots are on `device`: a GPU that the receivers are on, or the CPU for all others."""

    def __init__(
        self, *, device: torch.device | str = "cpu", timeout_s: float = 60.0, bucket_bytes: int | None = None
    ) -> None:
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        default = DEVICE_BUCKET_BYTES if self._device.type == "cuda" else HOST_BUCKET_BYTES
        self._bucket_bytes = bucket_bytes or default
        self._offers: dict[int, _Offer] = {}
        self._rings = _Rings(self._device)
        self._shares = Shares()

    def offer(self, version: int, tensors: Cast) -> Parcel:
        """A parcel of these tensors, to be opened by any number of processes of this machine."""
        shares = self._shares if _lie_ready(tensors, self._device) else None
        offer = self._offers[version] = _Offer(tensors, self._rings, shares, self._timeout_s, self._bucket_bytes)
        return offer.parcel

    def retire(self, version: int) -> None:
        offer = self._offers.pop(version, None)
        if offer is not None:
            offer.close()

    def close(self) -> None:
        for version in list(self._offers):
            self.retire(version)


class LocalParcel(Parcel):
    """Opened by connecting to the sender."""

    def __init__(
        self, specs: Sequence[Spec], bucket_bytes: int, address: str, timeout_s: float, *, direct: bool
    ) -> None:
        super().__init__(specs, bucket_bytes)
        self._address = address
        self._direct = direct
        self._timeout_s = timeout_s

    def read(self) -> Iterator[tuple[str, Tensor]]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(self._timeout_s)
            try:
                connection.connect(self._address)
                yield from self._read(connection)
            except TimeoutError:
                raise EngineFailure(f"the sender of the weights was silent for {self._timeout_s:g} s") from None
            except OSError as error:
                raise EngineFailure(f"the sender of the weights has gone: {error}") from error

    def _read(self, connection: socket.socket) -> Iterator[tuple[str, Tensor]]:
        introduce(connection)
        yield from self._read_in_place(connection) if self._direct else self._read_slots(connection)
        connection.sendall(_NUMBER.pack(_DONE))

    def _read_in_place(self, connection: socket.socket) -> Iterator[tuple[str, Tensor]]:
        tensors = open_shares(connection)
        _receive(connection)  # whatever was to be computed for them is done
        yield from zip((spec.name for spec in self.specs), tensors, strict=True)
        torch.cuda.synchronize()

    def _read_slots(self, connection: socket.socket) -> Iterator[tuple[str, Tensor]]:
        ring = attach(connection, self.largest, SLOTS)
        for number, bucket in enumerate(self.buckets):
            if _receive(connection) != number:
                raise ConnectionError("the sender skipped a bucket")
            yield from bucket.views(ring.slots[number % SLOTS])
            ring.settle()  # what was read from a device's slot may still be on its way
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


class _Offer:
    """One version on offer: a listening socket, and a thread for each reader."""

    def __init__(
        self, tensors: Cast, rings: _Rings, shares: Shares | None, timeout_s: float, bucket_bytes: int
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="treadle-weights-"))
        self._tensors = tensors
        self._rings = rings
        self._shares = shares
        self._timeout_s = timeout_s
        self._readers: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "socket"))
        self._listener.listen()
        address = str(self._folder / "socket")
        self.parcel = LocalParcel(tensors.specs(), bucket_bytes, address, timeout_s, direct=shares is not None)
        self._accepting = threading.Thread(target=self._accept, name="weights", daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # `close` ended it
            connection.settimeout(self._timeout_s)
            reader = threading.Thread(target=self._serve, args=(connection,), name="weights reader", daemon=True)
            self._readers.append(reader)
            reader.start()

    def _serve(self, connection: socket.socket) -> None:
        """Send everything to one reader. It may be gone, or stuck: then it has no claim any more."""
        with connection, suppress(OSError):
            reader = read_exactly(connection, NAME_BYTES)
            if self._shares is not None:
                self._share(connection, reader, self._shares)
            else:
                self._stream(connection, reader)

    def _share(self, connection: socket.socket, reader: bytes, shares: Shares) -> None:
        shares.send(connection, reader, list(self._tensors.sources.values()))
        torch.cuda.synchronize()
        connection.sendall(_NUMBER.pack(0))
        while _receive(connection) != _DONE:
            continue

    def _stream(self, connection: socket.socket, reader: bytes) -> None:
        """Through a ring, which goes if this fails: a stuck reader may still look at it."""
        buckets, size = self.parcel.buckets, self.parcel.largest
        ring = self._rings.take(size, reader)
        ring.send(connection, reader)
        with torch.no_grad():
            for number, bucket in enumerate(buckets):
                if number >= SLOTS:
                    _receive(connection)
                bucket.fill(ring.slots[number % SLOTS], self._tensors.sources)
                ring.settle()
                connection.sendall(_NUMBER.pack(number))
        while _receive(connection) != _DONE:
            continue
        self._rings.give_back(size, reader, ring)

    def close(self) -> None:
        """Let nobody else in, and wait for those who read."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for reader in self._readers:
            reader.join()  # each of its waits has a deadline
        (self._folder / "socket").unlink()
        self._folder.rmdir()


def _lie_ready(tensors: Cast, device: torch.device) -> bool:
    """Whether everything lies on a GPU as its reader wants it."""
    pairs = zip(tensors.sources.values(), tensors.specs(), strict=True)
    return device.type == "cuda" and all(
        source.device.type == "cuda"
        and source.device.index == (device.index or 0)
        and source.dtype == spec.dtype
        and source.is_contiguous()
        for source, spec in pairs
    )


def _receive(connection: socket.socket) -> int:
    number: int = _NUMBER.unpack(read_exactly(connection, _NUMBER.size))[0]
    return number
