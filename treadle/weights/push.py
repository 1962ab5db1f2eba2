"""Pushing weights from a policy to an engine, and proving that they arrived.

Owns the number format on the way, the checksum and its comparison. Knows no transport: an engine takes tensors, or
holds the policy's own module already and takes none.
Invariant: a push that returns was confirmed by the engine, bit for bit; anything else is a RunError.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treadle.engine.protocol import WeightUpdate
from treadle.errors import DeadlineError, RunError
from treadle.model.checksum import checksum
from treadle.policy.protocol import Policy


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


async def push(
    policy: Policy, engine: Receiver, version: int, *, shared: bool, timeout_s: float, dtype: torch.dtype | None = None
) -> PushReport:
    """Give `engine` the weights of `policy` as `version`, in its `dtype` (None: the policy's).

    `shared` says that the engine holds the policy's very own module: then no tensor travels, and both sides read the
    same memory. Nobody may train meanwhile.
    """
    began = time.perf_counter()
    tensors, expected = await asyncio.to_thread(_prepare, policy, None if shared else dtype)
    ready = time.perf_counter()
    update = WeightUpdate(version, expected, {} if shared else tensors)
    try:
        async with asyncio.timeout(timeout_s):
            confirmed = await engine.update_weights(update)
    except TimeoutError as error:
        raise DeadlineError(
            f"{engine.name} did not confirm the weights of version {version} within {timeout_s:g} s"
        ) from error
    if confirmed != expected:
        raise RunError(
            f"{engine.name} holds other weights than the policy: version {version} has checksum {expected}, the engine "
            f"confirms {confirmed}"
        )
    num_bytes = sum(tensor.nbytes for tensor in update.tensors.values())
    return PushReport(version, confirmed, num_bytes, ready - began, time.perf_counter() - ready)


def _prepare(policy: Policy, dtype: torch.dtype | None) -> tuple[Mapping[str, Tensor], str]:
    """The weights as the engine will hold them, and their checksum."""
    tensors: dict[str, Tensor] = dict(policy.tensors())
    if dtype is not None:
        tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return tensors, checksum(tensors)
