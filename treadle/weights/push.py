"""Pushing weights to engines, and proving that they arrived.

Owns the comparison of checksums and the deadline. Knows no transport: a sender publishes, a receiver takes a map.
Invariant: a push that returns was confirmed by the engine, bit for bit; anything else is a RunError, or the receiver's
EngineFailure. Either way the sender has taken the version back.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from treadle.engine.protocol import WeightUpdate
from treadle.errors import DeadlineError, RunError
from treadle.weights.parcel import Parcel
from treadle.weights.sender import Sender


class Receiver(Protocol):
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


async def send(sender: Sender, receiver: Receiver, version: int, *, timeout_s: float) -> PushReport:
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


async def _deliver(update: WeightUpdate, receiver: Receiver, timeout_s: float) -> str:
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
    if isinstance(update.tensors, Parcel):
        return update.tensors.num_bytes
    return sum(tensor.nbytes for tensor in update.tensors.values())
