"""What a trainer sees of the networks, wherever they run: one device here, or many behind the same calls.

Every call blocks until it is done; an event loop goes through `asyncio.to_thread`. Calls come one at a time. Per-token
results are on the CPU, one value for each response token of the given rows, row after row, 0 where none was sampled.
Refuses to know what a network is made of, and who samples from it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from treadle.policy.batch import TrainBatch
from treadle.types import Row

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
