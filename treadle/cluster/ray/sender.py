"""Weights from the policy's ranks to Ray's store, from where every replica reads them.

Owns the way: all ranks gather their shards, the first one casts, sums up and writes them down once. The driver never
sees a tensor. What lies in the store stays until the next version takes its place, for replicas that come back.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor

from treadle.cluster.ray.tensors import InStore, Packed, StoredTensors, pack
from treadle.engine.protocol import WeightUpdate
from treadle.model.checksum import Tally
from treadle.policy.ranks import Ranks
from treadle.weights.parcel import Parcel, Spec


class StoredParcel(Parcel, InStore):
    """Weights in the store. Readable in every process of the cluster that Ray runs."""

    def __init__(self, specs: Sequence[Spec], reference: Any) -> None:
        super().__init__(specs, bucket_bytes=sum(spec.num_bytes for spec in specs))
        self.reference = reference

    def read(self) -> Iterator[tuple[str, Tensor]]:
        packed: Mapping[str, Packed] = ray.get(self.reference)
        yield from StoredTensors(packed).items()


class StoreSender:
    """A `Sender` for ranks on the cluster."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype) -> None:
        self._ranks = ranks
        self._dtype = dtype

    async def publish(self, version: int) -> WeightUpdate:
        published, *_ = await asyncio.to_thread(self._ranks.run, "publishing weights", publish, self._dtype)
        return WeightUpdate(version, published.checksum, StoredParcel(published.specs, published.held[0]))

    async def retire(self, version: int) -> None:
        """Nothing: see the module."""


@dataclass(frozen=True, slots=True)
class Published:
    """What the first rank wrote down."""

    checksum: str
    specs: tuple[Spec, ...]
    held: tuple[Any, ...]
    """The reference, in a tuple: bare, Ray would fetch what it refers to."""


def publish(rank: Any, dtype: torch.dtype) -> Published | None:
    """In a rank: gather all weights; the first rank keeps them. Collective."""
    if rank.seat.rank:
        for _ in rank.policy.full_tensors(dtype):
            pass  # the first rank needs everybody's rows
        return None
    tally = Tally()
    specs: list[Spec] = []
    packed: dict[str, Packed] = {}
    for name, tensor in rank.policy.full_tensors(dtype):
        tally.add(name, tensor)
        specs.append(Spec(name, tuple(tensor.shape), tensor.dtype))
        packed |= pack({name: tensor})
    return Published(tally.word(), tuple(specs), (ray.put(packed),))
