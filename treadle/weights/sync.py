"""Weight sync: pushing the policy's weights to engines, and proving that they arrived.

Owns the push: the dtype on the way, the checksum, the deadline, and the lock between a training step, which changes the
weights, and everything that reads them. Knows no transport: a sender publishes a version, a receiver takes a map of
tensors, and the sender retires the version when every receiver is done. The policy in this process is one sender; ranks
elsewhere that gather their shards are another.
Invariant: a push that returns was confirmed by the engine, bit for bit; anything else is a RunError, or the receiver's
EngineFailure. Either way the sender has retired the version.

What waits for what: a restarted engine waits until the policy's weights are those that engines have (`WeightLock`); a
training step waits until nothing reads the weights.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treadle.engine.protocol import WeightUpdate
from treadle.errors import DeadlineError, RunError
from treadle.model.checksum import checksum
from treadle.policy.protocol import Policy
from treadle.weights.transfer import CastTensors, WeightTransfer


class WeightLock:
    """Used on one loop. Starts unsettled: nobody has been given anything."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._version: int | None = None
        self._settled = asyncio.Event()
        self._waiting = 0
        self._wanted = asyncio.Event()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """A training step. Until the next push, the weights are nobody's."""
        async with self._lock:
            self._version = None
            self._settled.clear()
            yield

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Between two training steps: the policy computes nothing."""
        async with self._lock:
            yield

    def settle(self, version: int) -> None:
        """Engines were given the weights as they are, under this number."""
        self._version = version
        self._settled.set()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[int]:
        """Wait until the weights are those that engines have, and keep them so; their version."""
        while True:
            await self._wait_settled()
            async with self._lock:
                if self._version is not None:
                    yield self._version
                    return

    async def wanted(self) -> None:
        """Wait until somebody waits for the next push."""
        await self._wanted.wait()

    async def _wait_settled(self) -> None:
        if self._settled.is_set():
            return
        self._waiting += 1
        self._wanted.set()
        try:
            await self._settled.wait()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._wanted.clear()


class WeightSender(Protocol):
    """Whoever has the weights. Calls come one at a time."""

    async def publish(self, version: int) -> WeightUpdate:
        """Make the weights of `version` available; nobody trains until they are retired."""
        ...

    async def retire(self, version: int) -> None:
        """Every receiver is done or gone: free what the version took."""
        ...


class Transport(Protocol):
    """How tensors reach other processes: `local`, `collective` or `disk`."""

    def offer(self, version: int, tensors: CastTensors) -> Mapping[str, Tensor]:
        """A map of these tensors that can be pickled and read elsewhere."""
        ...

    def retire(self, version: int) -> None: ...

    def close(self) -> None: ...


class PolicySender:
    """The policy of this process."""

    def __init__(
        self,
        policy: Policy,
        *,
        dtype: torch.dtype | None = None,
        transport: Transport | None = None,
        shared: bool = False,
    ) -> None:
        """Send in `dtype` (None: the policy's), by `transport` (None: engines are in this process too).

        `shared` says that the engine holds the policy's very own module: then no tensor travels.
        """
        self._policy = policy
        self._dtype = None if shared else dtype
        self._transport = transport
        self._shared = shared

    async def publish(self, version: int) -> WeightUpdate:
        return await asyncio.to_thread(self._publish, version)

    def _publish(self, version: int) -> WeightUpdate:
        tensors = CastTensors(self._policy.tensors(), self._dtype)
        expected = checksum(tensors)
        if self._shared:
            return WeightUpdate(version, expected, {})
        if self._transport is None:
            return WeightUpdate(version, expected, dict(tensors))
        return WeightUpdate(version, expected, self._transport.offer(version, tensors))

    async def retire(self, version: int) -> None:
        if self._transport is not None:
            await asyncio.to_thread(self._transport.retire, version)


class WeightReceiver(Protocol):
    """Whoever takes weights: an engine, or a rollout with engines of its own."""

    @property
    def name(self) -> str: ...

    async def update_weights(self, update: WeightUpdate) -> str: ...


@dataclass(frozen=True, slots=True)
class PushReport:
    """What was proven to arrive, and how long that took."""

    version: int
    checksum: str
    num_bytes: int
    """Handed over; 0 where the engine holds the same module."""
    prepare_s: float
    """Casting and checksum, on the policy's side."""
    update_s: float
    """In the engine, its own checksum included."""

    @property
    def seconds(self) -> float:
        return self.prepare_s + self.update_s

    def metrics(self) -> dict[str, float]:
        return {
            "weights/push_s": self.seconds,
            "weights/prepare_s": self.prepare_s,
            "weights/update_s": self.update_s,
            "weights/bytes": float(self.num_bytes),
        }


async def push_weights(sender: WeightSender, receiver: WeightReceiver, version: int, *, timeout_s: float) -> PushReport:
    """Give `receiver` the weights that `sender` publishes as `version`."""
    began = time.perf_counter()
    publishing = asyncio.ensure_future(sender.publish(version))
    try:
        update = await asyncio.shield(publishing)
    except asyncio.CancelledError:
        await asyncio.wait({publishing})  # it works in a thread, which cannot be stopped
        await asyncio.shield(sender.retire(version))
        raise
    ready = time.perf_counter()
    try:
        confirmed = await _deliver(update, receiver, timeout_s)
    finally:
        await asyncio.shield(sender.retire(version))
    return PushReport(version, confirmed, _count_bytes(update), ready - began, time.perf_counter() - ready)


async def _deliver(update: WeightUpdate, receiver: WeightReceiver, timeout_s: float) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            confirmed = await receiver.update_weights(update)
    except TimeoutError as error:
        raise DeadlineError(
            f"{receiver.name} did not confirm the weights of version {update.version} within {timeout_s:g} s"
        ) from error
    if confirmed != update.checksum:
        raise RunError(
            f"{receiver.name} holds other weights than the policy: version {update.version} has checksum "
            f"{update.checksum}, the engine confirms {confirmed}"
        )
    return confirmed


def _count_bytes(update: WeightUpdate) -> int:
    if isinstance(update.tensors, WeightTransfer):
        return update.tensors.num_bytes
    return sum(tensor.nbytes for tensor in update.tensors.values())
