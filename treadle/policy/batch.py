"""What a network trains on: the rows of a step, with what the step found out about each token.

    S  sequences: the rows of a step, in the order of `rows_of`
    T  tokens: every response token of all rows, row after row; what stands on tokens that were not sampled is not read

Owns the record and nothing else. Tensors are on the CPU, so that a batch can travel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from treadle.policy.sequence import FlatRows
from treadle.types import Group, Row


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One step's data. Old logprobs may be left out: the policy computes them where it needs them."""

    rows: tuple[Row, ...] | FlatRows
    """As they are, or flat where they have a journey before them."""
    group_S: tuple[int, ...]
    """Which group each row belongs to; never falls."""
    trajectory_S: tuple[int, ...]
    """Which trajectory; forks share one, and stay in one mini batch."""
    advantages_T: Tensor
    old_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    values_T: Tensor | None = None
    """What the critic expected, as the advantages were computed from."""
    returns_T: Tensor | None = None


def belongings(groups: Sequence[Group]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The group and the trajectory of each row that trains, counted over survivors, in the order of `rows_of`."""
    members = [(at, trajectory) for at, group in enumerate(groups) for trajectory in group.survivors]
    pairs = [(at, number) for number, (at, trajectory) in enumerate(members) for _ in trajectory.rows]
    return tuple(group for group, _ in pairs), tuple(number for _, number in pairs)
