"""Weight sender of a cluster: weights from the ranks of the policy to the replicas.

Owns the first half of the way: all ranks gather their shards, the first one casts and sums them up. From there they go
to Ray's store, where every replica reads them, or through a transport that the first rank keeps open. The driver never
sees a tensor. What was published stays until the next version takes its place, for replicas that come back; so it is a
copy, and training goes on beside it.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import ray
import torch
from torch import Tensor

from treadle.cluster.ray.object_store import InStore, Packed, StoredTensors, pack
from treadle.engine.protocol import WeightUpdate
from treadle.model.checksum import RunningChecksum
from treadle.policy.rank_group import RankGroup
from treadle.weights.sync import Transport
from treadle.weights.transfer import CastTensors, TensorSpec, WeightTransfer, tensor_specs
from treadle.weights.transports import TransportSpec


class StoredWeights(WeightTransfer, InStore):
    """Weights in the store. Readable in every process of the cluster that Ray runs."""

    def __init__(self, specs: Sequence[TensorSpec], reference: Any) -> None:
        super().__init__(specs, bucket_bytes=sum(spec.num_bytes for spec in specs))
        self.reference = reference

    def batches(self) -> Iterator[Sequence[tuple[str, Tensor]]]:
        packed: Mapping[str, Packed] = ray.get(self.reference)
        yield [*StoredTensors(packed).items()]


class RankSender:
    """Sender of the policy's weights, for ranks on the cluster."""

    def __init__(self, ranks: RankGroup, dtype: torch.dtype, route: TransportSpec) -> None:
        self._ranks = ranks
        self._dtype = dtype
        self._route = route

    async def publish(self, version: int) -> WeightUpdate:
        order = publish, version, self._dtype, self._route
        published, *_ = await asyncio.to_thread(self._ranks.run, "publishing weights", *order)
        return WeightUpdate(version, published.checksum, published.transfer)

    async def retire(self, version: int) -> None:
        """Nothing: weights stay until the next version takes their place."""


@dataclass(frozen=True, slots=True)
class Published:
    """What the first rank has published."""

    checksum: str
    transfer: WeightTransfer


class WeightPublisher:
    """The first rank's copy of the weights, and the transport that publishes it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._held: dict[str, Tensor] = {}
        self._version: int | None = None

    def publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> Published:
        """Take the last version back, and put these in its place: in the same memory, which is faster than new."""
        if self._version is not None:
            self._transport.retire(self._version)
        checksum, held = RunningChecksum(), self._held
        for name, tensor in tensors:
            if name not in held:
                held[name] = torch.empty_like(tensor, device="cpu")
            held[name].copy_(tensor)
            checksum.add(name, tensor)
        self._version = version
        transfer = self._transport.publish(version, CastTensors(held, None))
        assert isinstance(transfer, WeightTransfer), "it goes to other processes"
        return Published(checksum.word(), transfer)


_publishers: WeakKeyDictionary[Any, WeightPublisher] = WeakKeyDictionary()
"""By rank: a process has one, which lives as long as the process."""


def publish(rank: Any, version: int, dtype: torch.dtype, route: TransportSpec) -> Published | None:
    """In a rank: gather all weights; the first rank keeps them. Collective."""
    tensors = rank.policy.full_tensors(dtype)
    if rank.rank_spec.rank:
        for _ in tensors:
            pass  # the first rank needs the rows of all
        return None
    if route.way == "store":
        return _store(tensors)
    if rank not in _publishers:
        _publishers[rank] = WeightPublisher(route.open(ray.util.get_node_ip_address()))
    return _publishers[rank].publish(version, tensors)


def _store(tensors: Iterator[tuple[str, Tensor]]) -> Published:
    """Write everything into Ray's store, once."""
    checksum, specs = RunningChecksum(), list[TensorSpec]()
    packed: dict[str, Packed] = {}
    for name, tensor in tensors:
        checksum.add(name, tensor)
        specs += tensor_specs({name: tensor})
        packed |= pack({name: tensor})
    return Published(checksum.word(), StoredWeights(specs, ray.put(packed)))
