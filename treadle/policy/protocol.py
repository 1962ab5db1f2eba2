"""Policy, reference and critic protocols, and the batch they train on.

    S  sequences: the rows of a step, in the order of `rows_of`
    T  tokens: every response token of all rows, row after row; values on tokens that were not sampled are not read

The same calls for one device and for many ranks. Every call blocks until it is done; an event loop goes through
`asyncio.to_thread`. Calls come one at a time. Per-token tensors are on the CPU, one value for each response token of
the given rows, row after row, 0 where none was sampled. Refuses to know what a network is made of, or which engine
samples from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from treadle.policy.packed_inputs import FlatRows
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
    annotate: bool = False
    """Whether the policy is to keep what it computed for each token (see `Policy.annotations`)."""


def group_and_trajectory_ids(groups: Sequence[Group]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The group and the trajectory of each row that trains, counted over survivors, in the order of `rows_of`."""
    members = [(at, trajectory) for at, group in enumerate(groups) for trajectory in group.survivors]
    pairs = [(at, number) for number, (at, trajectory) in enumerate(members) for _ in trajectory.rows]
    return tuple(group for group, _ in pairs), tuple(number for _, number in pairs)


Metrics = Mapping[str, float]


class Policy(Protocol):
    """The network that learns to act. Whole when it can be reached; `close` is the last call."""

    @property
    def version(self) -> int:
        """How many times the weights were updated: by one in each `train`, however many optimizer steps that takes."""
        ...

    def train(self, batch: TrainBatch) -> Metrics:
        """Learn from one step's batch."""
        ...

    def logprobs(self, rows: Sequence[Row]) -> Tensor:
        """The current weights' logprob of each sampled token."""
        ...

    def frozen_logprobs(self, rows: Sequence[Row]) -> Tensor | None:
        """Logprob of each sampled token by the frozen weights, without adapters (LoRA); None without any adapter."""
        ...

    def annotations(self) -> Tensor | None:
        """What the last `train` computed for each sampled token of its batch, as it first trained on it: [5, M].

        Rows: logprob, old logprob, entropy, importance weight, and flags (1: clipped, 2: left out of the loss). NaN
        where it was not computed; None where the batch did not ask.
        """
        ...

    def gradient_norms(self, rows: Sequence[Row]) -> Tensor:
        """The squared norm of the gradient of each sampled token's logprob by its logits, 1 - 2π + Σπ²."""
        ...

    def tensors(self) -> Mapping[str, Any]:
        """The weights by name, as they are, not copied: for a push."""
        ...

    def save(self, directory: Path) -> None:
        """Write a Hugging Face model into `directory`, and all else that going on needs into `directory/training`."""
        ...

    def restore(self, directory: Path) -> None:
        """Take the weights and the state of training from what `save` wrote, in place."""
        ...

    def export(self, directory: Path) -> None:
        """Write the Hugging Face model alone."""
        ...

    def close(self) -> None:
        """Free everything. Closing twice is harmless."""
        ...


class Reference(Protocol):
    """The policy as it was before training, or one that follows the policy, as `ref.sync_freq` has it."""

    def logprobs(self, rows: Sequence[Row]) -> Tensor:
        """Its logprob of each sampled token."""
        ...

    def follow(self, policy: Policy, step: int) -> bool:
        """Mix the policy's weights in, if it is time after this training step; whether it was."""
        ...

    def save(self, directory: Path) -> None:
        """Write the weights into `directory/training/reference`, if they are no longer those of the model."""
        ...

    def restore(self, directory: Path) -> None:
        """Take what `save` wrote; nothing where it wrote nothing."""
        ...

    def close(self) -> None: ...


class Critic(Protocol):
    """The network that learns what to expect."""

    def values(self, rows: Sequence[Row]) -> Tensor:
        """The value it expects before each sampled token."""
        ...

    def train(self, batch: TrainBatch) -> Metrics:
        """Learn from one step's returns."""
        ...

    def save(self, directory: Path) -> None:
        """Write everything that going on needs into `directory/training/critic`."""
        ...

    def restore(self, directory: Path) -> None: ...

    def close(self) -> None: ...
