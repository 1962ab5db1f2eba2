"""Where weights come from: something that publishes a version, and takes it back when everybody has it.

Owns the number format on the way and the checksum of what leaves. Knows no engine. The policy in this process is one
sender; ranks elsewhere that gather their shards are another, and look the same from here.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from treadle.engine.protocol import WeightUpdate
from treadle.model.checksum import checksum
from treadle.policy.protocol import Policy
from treadle.weights.parcel import Cast


class Sender(Protocol):
    """Whoever has the weights. Calls come one at a time."""

    async def publish(self, version: int) -> WeightUpdate:
        """Make the weights of `version` available; nobody trains until they are retired."""
        ...

    async def retire(self, version: int) -> None:
        """Every receiver is done or gone: free what the version took."""
        ...


class Transport(Protocol):
    """How tensors reach other processes: `local`, `collective` or `disk`."""

    def offer(self, version: int, tensors: Cast) -> Mapping[str, Tensor]:
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
        tensors = Cast(self._policy.tensors(), self._dtype)
        expected = checksum(tensors)
        if self._shared:
            return WeightUpdate(version, expected, {})
        if self._transport is None:
            return WeightUpdate(version, expected, dict(tensors))
        return WeightUpdate(version, expected, self._transport.offer(version, tensors))

    async def retire(self, version: int) -> None:
        if self._transport is not None:
            await asyncio.to_thread(self._transport.retire, version)
