"""Sharded policy, reference and critic in the driving process: each call runs on all ranks.

Owns what is sent: rows go out flat, once for all ranks; the result is the first rank's. Knows no process: ranks are
called through `RankGroup`, wherever they run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from treadle.config.training import (
    ActorConfig,
    CriticConfig,
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPRefConfig,
    RefConfig,
)
from treadle.errors import RunError
from treadle.policy.fsdp import FSDPCritic, FSDPReference
from treadle.policy.packed_inputs import FlatRows
from treadle.policy.protocol import Metrics, Policy, TrainBatch
from treadle.policy.rank import FSDPRank, NetworksSpec
from treadle.policy.rank_group import RankGroup, RankHandles
from treadle.policy.reference import FrozenReference
from treadle.types import Row

_SHARDED = (FSDPActorConfig, FSDPRefConfig, FSDPCriticConfig)


class ShardedPolicy:
    """A `Policy` over ranks. Closing it ends them, and with them reference and critic."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def train(self, batch: TrainBatch) -> Metrics:
        flat = replace(batch, rows=FlatRows.of(batch.rows))
        reports = self.ranks.run("training", _train, flat)
        self._version = _same_version([version for version, _ in reports])
        metrics: Metrics = reports[0][1]
        return {**metrics, "actor/ranks": float(len(self.ranks))}

    def logprobs(self, rows: Sequence[Row]) -> Tensor:
        found: Tensor = self.ranks.run("logprobs", _logprobs, FlatRows.of(rows))[0]
        return found

    def frozen_logprobs(self, rows: Sequence[Row]) -> Tensor | None:
        found: Tensor | None = self.ranks.run("frozen logprobs", _frozen_logprobs, FlatRows.of(rows))[0]
        return found

    def annotations(self) -> Tensor | None:
        found: Tensor | None = self.ranks.run("annotations", _annotations)[0]
        return found

    def gradient_norms(self, rows: Sequence[Row]) -> Tensor:
        found: Tensor = self.ranks.run("gradient norms", _gradient_norms, FlatRows.of(rows))[0]
        return found

    def tensors(self) -> Mapping[str, Tensor]:
        """The weights by name, gathered by the first rank and copied here: for small models and for checks.

        A push of any size goes from the ranks themselves: see `FSDPPolicy.full_tensors`.
        """
        found: Mapping[str, Tensor] = self.ranks.run("gathering weights", _tensors)[0]
        return found

    def save(self, directory: Path) -> None:
        self.ranks.run(f"saving to {directory}", _save, directory)

    def restore(self, directory: Path) -> None:
        self._version = _same_version(self.ranks.run(f"restoring {directory}", _restore, directory))

    def export(self, directory: Path) -> None:
        self.ranks.run(f"exporting to {directory}", _export, directory)

    def close(self) -> None:
        self.ranks.close()


class ShardedReference:
    """A `Reference` over ranks."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def logprobs(self, rows: Sequence[Row]) -> Tensor:
        found: Tensor = self._ranks.run("reference logprobs", _reference_logprobs, FlatRows.of(rows))[0]
        return found

    def follow(self, policy: Policy, step: int) -> bool:
        """The policy is the one on the same ranks."""
        return bool(self._ranks.run("reference sync", _follow, step)[0])

    def save(self, directory: Path) -> None:
        self._ranks.run(f"saving the reference to {directory}", _save_reference, directory)

    def restore(self, directory: Path) -> None:
        self._ranks.run(f"restoring the reference from {directory}", _restore_reference, directory)

    def close(self) -> None:
        """Goes with the ranks."""


class ShardedCritic:
    """A `Critic` over ranks."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def values(self, rows: Sequence[Row]) -> Tensor:
        found: Tensor = self._ranks.run("values", _values, FlatRows.of(rows))[0]
        return found

    def train(self, batch: TrainBatch) -> Metrics:
        flat = replace(batch, rows=FlatRows.of(batch.rows))
        metrics: Metrics = self._ranks.run("training the critic", _train_critic, flat)[0]
        return metrics

    def save(self, directory: Path) -> None:
        self._ranks.run(f"saving the critic to {directory}", _save_critic, directory)

    def restore(self, directory: Path) -> None:
        self._ranks.run(f"restoring the critic from {directory}", _restore_critic, directory)

    def close(self) -> None:
        """Goes with the ranks."""


@dataclass(frozen=True, slots=True)
class ShardedNetworks:
    """The networks of a run, on one set of ranks."""

    policy: ShardedPolicy
    reference: ShardedReference | None
    critic: ShardedCritic | None

    @classmethod
    def over(cls, handles: RankHandles, spec: NetworksSpec, timeout_s: float) -> "ShardedNetworks":
        """On ranks that have started with this spec. `timeout_s` bounds each call."""
        ranks = RankGroup(handles, timeout_s)
        return cls(
            ShardedPolicy(ranks),
            None if spec.ref is None else ShardedReference(ranks),
            None if spec.critic is None else ShardedCritic(ranks),
        )


def needs_ranks(num_ranks: int, *networks: ActorConfig | RefConfig | CriticConfig | None) -> bool:
    """Whether networks must be on ranks: there are several, or one asks for what only FSDP does on a single device."""
    configs = [network.fsdp_config for network in networks if isinstance(network, _SHARDED)]
    return num_ranks > 1 or any(
        fsdp_config.param_offload or fsdp_config.optimizer_offload or fsdp_config.offload_policy
        for fsdp_config in configs
    )


def _same_version(versions: Sequence[int]) -> int:
    if len(set(versions)) != 1:
        raise RunError(f"the policy's ranks are at different versions: {', '.join(map(str, versions))}")
    return versions[0]


def _train(rank: FSDPRank, batch: TrainBatch) -> tuple[int, Metrics]:
    metrics = rank.policy.train(batch)
    return rank.policy.version, metrics


def _logprobs(rank: FSDPRank, rows: FlatRows) -> Tensor | None:
    return _from_first(rank, rank.policy.logprobs(rows))


def _frozen_logprobs(rank: FSDPRank, rows: FlatRows) -> Tensor | None:
    found = rank.policy.frozen_logprobs(rows)
    return None if found is None else _from_first(rank, found)


def _annotations(rank: FSDPRank) -> Tensor | None:
    found = rank.policy.annotations()
    return None if found is None else _from_first(rank, found)


def _gradient_norms(rank: FSDPRank, rows: FlatRows) -> Tensor | None:
    return _from_first(rank, rank.policy.gradient_norms(rows))


def _tensors(rank: FSDPRank) -> Mapping[str, Tensor] | None:
    if rank.rank_spec.rank == 0:
        return {name: tensor.cpu() for name, tensor in rank.policy.full_tensors()}
    for _ in rank.policy.full_tensors():
        pass  # the first rank needs the rows of all
    return None


def _save(rank: FSDPRank, directory: Path) -> None:
    rank.policy.save(directory)


def _restore(rank: FSDPRank, directory: Path) -> int:
    rank.policy.restore(directory)
    return rank.policy.version


def _export(rank: FSDPRank, directory: Path) -> None:
    rank.policy.export(directory)


def _reference_logprobs(rank: FSDPRank, rows: FlatRows) -> Tensor | None:
    return _from_first(rank, _reference(rank).logprobs(rows))


def _follow(rank: FSDPRank, step: int) -> bool:
    return _reference(rank).follow(rank.policy, step)


def _save_reference(rank: FSDPRank, directory: Path) -> None:
    _reference(rank).save(directory)


def _restore_reference(rank: FSDPRank, directory: Path) -> None:
    _reference(rank).restore(directory)


def _reference(rank: FSDPRank) -> FSDPReference | FrozenReference:
    assert rank.reference is not None, "the spec says which networks there are"
    return rank.reference


def _values(rank: FSDPRank, rows: FlatRows) -> Tensor | None:
    return _from_first(rank, _critic(rank).values(rows))


def _train_critic(rank: FSDPRank, batch: TrainBatch) -> Metrics:
    return _critic(rank).train(batch)


def _save_critic(rank: FSDPRank, directory: Path) -> None:
    _critic(rank).save(directory)


def _restore_critic(rank: FSDPRank, directory: Path) -> None:
    _critic(rank).restore(directory)


def _critic(rank: FSDPRank) -> FSDPCritic:
    assert rank.critic is not None, "the spec says which networks there are"
    return rank.critic


def _from_first(rank: FSDPRank, found: Tensor) -> Tensor | None:
    """What all ranks know travels once."""
    return found if rank.rank_spec.rank == 0 else None
