"""What a simulated run has in place of networks, disks and people: parts that answer and keep nothing.

Owns the policy that only counts its versions, and the journal, checkpoints and lineage of a run that nobody resumes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.checkpoint.store import Checkpoints, Progress
from treadle.journal import Journal
from treadle.policy.batch import TrainBatch
from treadle.policy.protocol import Critic, Policy, Reference
from treadle.rollout.recall import NO_PAST, Past
from treadle.trainer.lineage import UNKNOWN_PROVENANCE, Lineage
from treadle.types import NOTHING, Provenance, Row


class CountingPolicy:
    """A policy, reference and critic at once: it has a version and nothing else."""

    def __init__(self) -> None:
        self.version = 0

    def train(self, batch: TrainBatch) -> Mapping[str, float]:
        self.version += 1
        return {}

    def logprobs(self, rows: Sequence[Row]) -> Tensor:
        return torch.zeros(0)

    def gradient_norms(self, rows: Sequence[Row]) -> Tensor:
        return torch.zeros(0)

    def values(self, rows: Sequence[Row]) -> Tensor:
        return torch.zeros(0)

    def follow(self, policy: Policy, step: int) -> bool:
        return False

    def tensors(self) -> Mapping[str, Any]:
        return {}

    def save(self, directory: Path) -> None: ...

    def restore(self, directory: Path) -> None: ...

    def export(self, directory: Path) -> None: ...

    def close(self) -> None: ...


class NoJournal(Journal):
    """Takes everything and writes nothing."""

    def __init__(self) -> None:
        """There is no directory to hold."""

    def _put(self, record: object) -> None: ...

    async def flush(self, timeout_s: float = 30.0) -> None: ...


class NoCheckpoints(Checkpoints):
    """A run that starts afresh and saves nothing."""

    def __init__(self) -> None:
        """There is no directory to look in."""

    def restore(self, policy: Policy, critic: Critic | None, reference: Reference | None = None) -> Progress | None:
        return None

    def is_due(self, step: int) -> bool:
        return False

    def save(
        self,
        policy: Policy,
        critic: Critic | None,
        step: int,
        state: Mapping[str, Any],
        reference: Reference | None = None,
    ) -> Path:
        return Path()


class NoLineage(Lineage):
    """Nothing was ever begun."""

    def __init__(self) -> None:
        """There is no journal to read."""
        self._resumes = ()
        self.set_aside = NOTHING

    def refuse_lost_checkpoints(self) -> None: ...

    def past(self, uid: str, n: int, *, version: int, oldest: int, made_from: Provenance = UNKNOWN_PROVENANCE) -> Past:
        return NO_PAST
