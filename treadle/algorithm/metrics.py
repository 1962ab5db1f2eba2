"""Loss metrics that merge over micro batches and ranks, in any split.

Owns the kinds of metric, and no names. Each holds what its value is computed from (a sum and a count, never a mean), so
that a mini batch reads the same however it was split. Nothing waits for the device until `read_metrics`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol, Self

import torch
from torch import Tensor


class LossMetric(Protocol):
    """One figure: joined with the same figure of other tokens, then read, under its name plus a suffix."""

    def join(self, other: Self) -> Self: ...
    def read(self) -> Mapping[str, Tensor]: ...


LossMetrics = Mapping[str, LossMetric]


@dataclass(frozen=True, slots=True)
class SumMetric:
    """A part of a mini batch's value, such as a loss that its denominator has already divided."""

    total: Tensor

    def join(self, other: "SumMetric") -> "SumMetric":
        return SumMetric(self.total + other.total)

    def read(self) -> Mapping[str, Tensor]:
        return {"": self.total}


@dataclass(frozen=True, slots=True)
class MeanMetric:
    """A mean over tokens or sequences; 0 over none."""

    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, among: Tensor) -> "MeanMetric":
        """The mean of `values` where `among` is true; what stands elsewhere does not matter."""
        return cls(torch.where(among, values, 0).sum(dtype=torch.float64), among.sum())

    def join(self, other: "MeanMetric") -> "MeanMetric":
        return MeanMetric(self.total + other.total, self.count + other.count)

    def read(self) -> Mapping[str, Tensor]:
        return {"": self.total / self.count.clamp(min=1)}


@dataclass(frozen=True, slots=True)
class MaxMetric:
    """The largest value; 0 over none, so for values that are not negative."""

    largest: Tensor

    @classmethod
    def of(cls, values: Tensor, among: Tensor) -> "MaxMetric":
        masked = torch.where(among, values, 0)
        return cls(masked.max() if masked.numel() else masked.sum())

    def join(self, other: "MaxMetric") -> "MaxMetric":
        return MaxMetric(torch.maximum(self.largest, other.largest))

    def read(self) -> Mapping[str, Tensor]:
        return {"": self.largest}


@dataclass(frozen=True, slots=True)
class ImportanceWeightMetric:
    """Importance weights: their mean, and the fraction of the samples that they are worth."""

    total: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def of(cls, weights: Tensor, among: Tensor) -> "ImportanceWeightMetric":
        masked = torch.where(among, weights, 0).double()
        return cls(masked.sum(), masked.square().sum(), among.sum())

    def join(self, other: "ImportanceWeightMetric") -> "ImportanceWeightMetric":
        return ImportanceWeightMetric(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def read(self) -> Mapping[str, Tensor]:
        count = self.count.clamp(min=1)
        worth = self.total.square() / (count * self.squares).clamp(min=torch.finfo(torch.float64).tiny)
        return {"_mean": self.total / count, "_eff_sample_size": worth}


def merge_metrics(parts: Sequence[LossMetrics]) -> LossMetrics:
    """Merge the metrics of several micro batches; each must have the same names."""
    assert all(part.keys() == parts[0].keys() for part in parts), "micro batches that measure different things"
    return {name: reduce(lambda a, b: a.join(b), (part[name] for part in parts)) for name in parts[0]} if parts else {}


def read_metrics(metrics: LossMetrics) -> dict[str, float]:
    """The values by name. The only wait for the device, once for all of them."""
    tensors = {name + end: value for name, measure in metrics.items() for end, value in measure.read().items()}
    if not tensors:
        return {}
    values = torch.stack([value.detach().double() for value in tensors.values()]).tolist()
    return dict(zip(tensors, values, strict=True))
