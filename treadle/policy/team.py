"""The processes that train one network together, seen from one of them.

Owns what they say to each other about numbers: sums and figures. How weights are cut over them is `sharding`'s.
Every rank holds the whole batch, so all agree on mini batches and denominators without a word; each computes its share.
Invariant: what a call returns is the same on every rank.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor

from treadle.algorithm.measures import Measure, Measures, merge
from treadle.policy.packing import Members, deal


class Team:
    """A team of one: this process trains alone."""

    rank = 0
    size = 1

    def deal(self, lengths: Sequence[int], budget: int, key: str) -> tuple[Members, ...]:
        """This rank's micro batches; every rank has as many. An empty one is computed all the same, and not counted."""
        return deal(lengths, budget, key, self.size)[self.rank]

    def enlarge(self, loss: Tensor) -> Tensor:
        """A share of the loss, such that the mean over ranks of all gradients is the gradient of the whole."""
        return loss if self.size == 1 else loss * self.size

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks, of values on the CPU."""
        return values

    def merge(self, measures: Measures) -> Measures:
        """Figures of all ranks as one."""
        return measures


ALONE = Team()


class RankTeam(Team):
    """The ranks of torch's default process group."""

    def __init__(self) -> None:
        from torch import distributed

        self._distributed = distributed
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()

    def total(self, values: Tensor) -> Tensor:
        if len(values):
            self._distributed.all_reduce(values)
        return values

    def merge(self, measures: Measures) -> Measures:
        here = {name: _to_cpu(measure) for name, measure in measures.items()}
        found: list[Any] = [None] * self.size
        self._distributed.all_gather_object(found, here)
        return merge(found)


def _to_cpu(measure: Measure) -> Measure:
    """A measure that can travel; all of ours are records of tensors."""
    if not is_dataclass(measure):
        return measure
    values = (getattr(measure, field.name) for field in fields(measure))
    moved = (value.cpu() if isinstance(value, torch.Tensor) else value for value in values)
    return cast(Measure, type(measure)(*moved))
