"""Weights to processes on other machines: one broadcast of each bucket to all receivers at once.

Owns the sender's side: for each version a store that receivers sign in at, and rounds. A round is a group (see
`meeting`) of those who signed in at about the same time, and one broadcast of every bucket. Whoever comes late, or was
in a round that broke, signs in again and is served by the next round; nobody is sent for. Memory is one bucket on each
side.

Who waits for whom: the sender waits for the first receiver of a round until the version is taken back, and for the
others `JOIN_S` after the last one came. A receiver waits for its seat, then all wait for each other at each bucket, a
quarter of `timeout_s` at most. So a receiver that dies or hangs breaks one round, and the others have the next.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from secrets import token_hex

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from treadle.errors import EngineFailure
from treadle.policy.rendezvous import RendezvousServer, join_store
from treadle.weights.meeting import Circle, Seat, knock
from treadle.weights.parcel import DEVICE_BUCKET_BYTES, Cast, Parcel, Spec

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Rounds in which a receiver takes part before it gives up."""

JOIN_S = 0.5
"""How long a round waits for one more receiver, where fewer came than are expected."""

HOST_BUCKET_BYTES = 16 << 20

_SIGNED, _SEAT, _END = "signed", "seat", "end"
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
        self._offers: dict[int, _Offer] = {}

    def offer(self, version: int, tensors: Cast) -> Parcel:
        """A parcel of these tensors, to be opened by any number of processes that reach `host`."""
        patience = timedelta(seconds=self._timeout_s)
        key = token_hex(16)
        server = RendezvousServer(self._host, key, patience)
        address = self._host, server.port
        parcel = CollectiveParcel(tensors.specs(), self._bucket_bytes, address, key, self._timeout_s, self._device.type)
        self._offers[version] = _Offer(server, parcel, tensors, self._device, self._receivers)
        return parcel

    def retire(self, version: int) -> None:
        offer = self._offers.pop(version, None)
        if offer is not None:
            offer.close()

    def close(self) -> None:
        for version in list(self._offers):
            self.retire(version)


class CollectiveParcel(Parcel):
    """Opened by signing in with the sender."""

    def __init__(
        self, specs: Sequence[Spec], bucket_bytes: int, address: tuple[str, int], key: str, timeout_s: float, kind: str
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
        done, memory = 0, make_room(self, device)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with Circle.enter(self._sign_in(), self.address, device, self.stall_s) as circle:
                    for number, bucket in enumerate(self.buckets):
                        circle.broadcast(memory[: bucket.num_bytes])
                        if number == done:
                            yield [*bucket.views(memory)]
                            done += 1
                return
            except RuntimeError as error:  # what torch raises for a peer that has gone, and for time that is over
                if attempt == ATTEMPTS:
                    raise EngineFailure(f"the broadcast of the weights broke {attempt} times: {error}") from error

    def _sign_in(self) -> tuple[Store, Seat]:
        """A seat in the next round."""
        host, port = self.address
        knock(host, port, self.timeout_s)
        wait = timedelta(seconds=self.timeout_s)
        try:
            store = join_store(host, port, self.key, wait)
            number = store.add(_SIGNED, 1)
            store.set(f"{_SIGNED}/{number}", "")
            store.wait([f"{_SEAT}/{number}"], wait)
            return store, Seat.parse(store.get(f"{_SEAT}/{number}"))
        except RuntimeError as error:
            waited = f"no seat in a broadcast of the weights from {host}:{port} within {self.timeout_s:g} s"
            raise EngineFailure(f"{waited}: {error}") from error


def make_room(parcel: Parcel, device: torch.device) -> Tensor:
    """Memory for the largest bucket."""
    return torch.empty(parcel.largest, dtype=torch.uint8, device=device)


class _Offer:
    """One version on offer: rounds in a thread, until it is taken back."""

    def __init__(
        self, server: RendezvousServer, parcel: CollectiveParcel, tensors: Cast, device: torch.device, receivers: int
    ) -> None:
        self._server = server
        self._store = server.store
        self._parcel = parcel
        self._tensors = tensors
        self._device = device
        self._missing = receivers
        """Receivers that are expected and have not been served yet."""
        self._seated = 0
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
        """The numbers of those who signed in since the last round, when it is time for another."""
        first = self._seated + 1
        while self._seated + 1 - first < max(1, self._missing):
            patience = _LONG if self._seated + 1 == first else timedelta(seconds=JOIN_S)
            try:
                self._store.wait([f"{_SIGNED}/{self._seated + 1}"], patience)
            except RuntimeError:
                break  # nobody else comes, for now
            if self._store.get(f"{_SIGNED}/{self._seated + 1}") == _END.encode():
                self._ending = True
                break
            self._seated += 1
        return range(first, self._seated + 1)

    def _broadcast(self, numbers: range) -> None:
        size = len(numbers) + 1
        for rank, number in enumerate(numbers, 1):
            self._store.set(f"{_SEAT}/{number}", str(Seat(numbers.start, rank, size)))
        parcel, mine = self._parcel, Seat(numbers.start, 0, size)
        memory = make_room(parcel, self._device)
        with Circle.enter((self._store, mine), parcel.address, self._device, parcel.stall_s) as circle, torch.no_grad():
            for bucket in parcel.buckets:
                bucket.fill(memory, self._tensors.sources)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                circle.broadcast(memory[: bucket.num_bytes])

    def close(self) -> None:
        """Let nobody else in, and wait for the round that runs. The thread's own store is busy waiting."""
        host, port = self._parcel.address
        store = join_store(host, port, self._parcel.key)
        store.set(f"{_SIGNED}/{store.add(_SIGNED, 1)}", _END)
        self._work.join()  # each of its waits ends: the first now, the others by their deadlines
