"""What advantages are computed from, and what they are: a whole batch, packed flat, on the CPU.

    T  response tokens of all rows, row after row    S  sequences (rows)    N  trajectories    G  groups

Owns the records, their order, and the reductions that estimators share. A failed trajectory never gets here: groups
hold survivors only, and may differ in size. Rows of one trajectory (forks) share its advantage, and it counts once in
any baseline. Statistics are taken in float64, of rewards in float32: the mean of equal rewards is exactly that reward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.config.algorithm import AlgorithmConfig
from treadle.errors import MisuseError
from treadle.types import Group, Row


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """A batch's rewards and how its tokens, sequences, trajectories and groups belong together."""

    rewards_N: Tensor
    group_N: Tensor
    num_groups: int
    trajectory_S: Tensor
    sequence_T: Tensor
    """Never falls: the tokens of a sequence stand together, in order."""
    mask_T: Tensor
    token_rewards_T: Tensor | None = None
    """What single tokens get beside the trajectory's reward, such as KL penalties."""
    values_T: Tensor | None = None
    """What the value model expected before each token, for gae."""
    baselines_G: Tensor | None = None
    """The reward of each group's greedy answer, for remax; NaN where that answer failed."""

    def __post_init__(self) -> None:
        assert self.sequence_T.shape == self.mask_T.shape, "one sequence index for each token"
        assert bool((self.sequence_T.diff() >= 0).all()), "the tokens of a sequence must stand together"

    @property
    def num_sequences(self) -> int:
        return len(self.trajectory_S)

    @property
    def num_trajectories(self) -> int:
        return len(self.rewards_N)

    @property
    def trajectory_T(self) -> Tensor:
        return self.trajectory_S[self.sequence_T]

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        *,
        token_rewards_T: Tensor | None = None,
        values_T: Tensor | None = None,
        baselines_G: Tensor | None = None,
    ) -> "AdvantageInputs":
        """The inputs of a batch of groups; tokens in the order of `rows_of`."""
        members = [(at, trajectory) for at, group in enumerate(groups) for trajectory in group.survivors]
        rows = [(at, row) for at, (_, trajectory) in enumerate(members) for row in trajectory.rows]
        lengths = torch.tensor([len(row.ids) for _, row in rows], dtype=torch.int64)
        rewards = []
        for _, trajectory in members:
            if trajectory.reward is None:
                raise MisuseError(f"trajectory {trajectory.uid}/{trajectory.sample} has no reward: name some functions")
            rewards.append(trajectory.reward.value)
        return cls(
            rewards_N=torch.tensor(rewards, dtype=torch.float32),
            group_N=torch.tensor([at for at, _ in members], dtype=torch.int64),
            num_groups=len(groups),
            trajectory_S=torch.tensor([at for at, _ in rows], dtype=torch.int64),
            sequence_T=torch.arange(len(rows)).repeat_interleave(lengths),
            mask_T=torch.tensor([flag for _, row in rows for flag in row.mask], dtype=torch.bool),
            token_rewards_T=token_rewards_T,
            values_T=values_T,
            baselines_G=baselines_G,
        )


@dataclass(frozen=True, slots=True)
class Advantages:
    """One advantage per token, 0 where it was not sampled."""

    advantages_T: Tensor
    returns_T: Tensor | None = None
    """What the value model should have expected, from gae."""


AdvantageEstimator = Callable[[AdvantageInputs, AlgorithmConfig], Advantages]


def rows_of(groups: Sequence[Group]) -> tuple[Row, ...]:
    """Every row that trains, in the order that all flat tensors of the batch follow."""
    return tuple(row for group in groups for trajectory in group.survivors for row in trajectory.rows)


def add_up(values: Tensor, index: Tensor, size: int) -> Tensor:
    """One float64 sum for each index."""
    return torch.zeros(size, dtype=torch.float64).index_add(0, index, values.double())


def score(inputs: AdvantageInputs) -> Tensor:
    """What each trajectory got in all, N: its reward, and what its sampled tokens got in any of its rows."""
    scores_N = inputs.rewards_N.double()
    if inputs.token_rewards_T is None:
        return scores_N
    gained_T = torch.where(inputs.mask_T, inputs.token_rewards_T, 0)
    return scores_N + add_up(gained_T, inputs.trajectory_T, inputs.num_trajectories)


def spread(inputs: AdvantageInputs, advantages_N: Tensor) -> Advantages:
    """The advantage of each trajectory on every token that it sampled."""
    advantages_T = torch.where(inputs.mask_T, advantages_N[inputs.trajectory_T], 0)
    return Advantages(advantages_T.to(inputs.rewards_N.dtype))
