"""Weight transfer: a map of tensors that can be pickled, and opens where it is read, bucket by bucket.

Owns what every transport shares: names, shapes and dtypes, known at once, and the division into buckets that bounds
memory. Refuses to know how bytes travel. Invariant: `items` gives every tensor once, batch by batch; a tensor is valid
until the next batch is taken, so a reader that keeps it copies it.
"""

import math
from abc import abstractmethod
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEVICE_BUCKET_BYTES = 256 << 20
"""How much travels at a time on a GPU: what hides the hand-over. A larger tensor travels alone."""

_ALIGN = 64


class TensorSpec(NamedTuple):
    """One tensor, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together, and where each begins."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    def views(self, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors that lie in `memory`, which holds bytes."""
        mine = memory[: self.num_bytes]
        flat = {dtype: mine.view(dtype) for dtype in {spec.dtype for spec in self.specs}}
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            yield spec.name, flat[spec.dtype].narrow(0, offset // spec.dtype.itemsize, spec.size).view(spec.shape)

    def fill(self, memory: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Put the tensors of this bucket into `memory`, in the bucket's dtype. One call: they are many."""
        views = [view for _, view in self.views(memory)]
        torch._foreach_copy_(views, [tensors[spec.name] for spec in self.specs], non_blocking=True)


def tensor_specs(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())


def make_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of at most `bucket_bytes`, in the order of `specs`."""
    groups: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        size = _aligned(spec.num_bytes)
        if not groups or size > room:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(spec)
        room -= size
    return tuple(_lay_out(group) for group in groups)


def _lay_out(specs: Sequence[TensorSpec]) -> Bucket:
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += _aligned(spec.num_bytes)
    return Bucket(tuple(specs), tuple(offsets), end)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class WeightTransfer(Mapping[str, Tensor]):
    """Weights on their way to engines. A transport says how its values are read."""

    def __init__(self, specs: Sequence[TensorSpec], bucket_bytes: int) -> None:
        self.specs = tuple(specs)
        self.bucket_bytes = bucket_bytes

    @abstractmethod
    def batches(self) -> Iterator[Sequence[tuple[str, Tensor]]]:
        """Every tensor once, in order: those together that are there at once. Each wait in it has a deadline."""

    def read(self) -> Iterator[tuple[str, Tensor]]:
        for batch in self.batches():
            yield from batch

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return make_buckets(self.specs, self.bucket_bytes)

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    @property
    def largest(self) -> int:
        """Room that every bucket fits into."""
        return max([1, *(bucket.num_bytes for bucket in self.buckets)])

    def __iter__(self) -> Iterator[str]:
        return (spec.name for spec in self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __contains__(self, name: object) -> bool:
        return any(spec.name == name for spec in self.specs)

    def __getitem__(self, name: str) -> Tensor:
        """One tensor, copied; `items` is the way to read them all."""
        if name not in self:
            raise KeyError(name)
        reading = self.read()
        try:
            return next(tensor.clone() for other, tensor in reading if other == name)
        finally:
            del reading

    def items(self) -> ItemsView[str, Tensor]:
        return _Items(self)

    def values(self) -> ValuesView[Tensor]:
        return _Values(self)

    def __getstate__(self) -> dict[str, Any]:
        """Specs by columns: one by one they take a while."""
        columns = {"specs": [*zip(*self.specs, strict=True)]}
        return {name: value for name, value in vars(self).items() if name != "buckets"} | columns

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"specs": tuple(map(TensorSpec._make, zip(*state["specs"], strict=True)))})


class _Items(ItemsView[str, Tensor]):
    """Read through, not looked up one by one."""

    _mapping: WeightTransfer

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._mapping.read()


class _Values(ValuesView[Tensor]):
    _mapping: WeightTransfer

    def __iter__(self) -> Iterator[Tensor]:
        return (tensor for _, tensor in self._mapping.read())


class CastTensors(Mapping[str, Tensor]):
    """Tensors in another dtype, made when they are looked at; whole numbers stay as they are."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        self.sources = {name: tensor.detach() if tensor.requires_grad else tensor for name, tensor in tensors.items()}
        """The tensors as they are, for readers that convert the dtype while copying."""
        self._dtype = dtype

    def specs(self) -> tuple[TensorSpec, ...]:
        """What the tensors will be, without making them."""
        return tuple(
            TensorSpec(name, tuple(tensor.shape), self._target(tensor)) for name, tensor in self.sources.items()
        )

    def _target(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.sources[name]
        return tensor.to(self._target(tensor))

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)
