"""The networks of a training run, on ranks of a cluster: sharded where several ranks train, and else on one device."""

from treadle.cluster.ray.placement import Reservation
from treadle.cluster.ray.ranks import RemoteRanks
from treadle.cluster.ray.solo import SoloSpec
from treadle.cluster.runtime import sharded_spec
from treadle.config import TrainConfig
from treadle.data.tasks import TaskSource
from treadle.policy.policy import Sampling
from treadle.policy.rank import NetworksSpec
from treadle.policy.rank_group import RankGroup
from treadle.policy.sharded import ShardedCritic, ShardedPolicy, ShardedReference
from treadle.trainer.step import StepParts
from treadle.trainer.terms import total_steps


def start_ranks(config: TrainConfig, tasks: TaskSource, reservation: Reservation) -> RemoteRanks:
    """Every rank that the plan places, with its networks loaded; or an error. Blocks."""
    places = reservation.rank_seats()
    return RemoteRanks.start(
        _spec(config, tasks, len(places)),
        places,
        launch_timeout_s=config.rollout.limits.launch_timeout_s,
        timeout_s=config.trainer.rank_timeout_s,
    )


def make_step(config: TrainConfig, ranks: RankGroup) -> StepParts:
    """What a training step works with, on these ranks."""
    _, ref, critic = config.used_networks()
    return StepParts(
        ShardedPolicy(ranks),
        config.actor,
        config.algorithm,
        config.trainer,
        None if ref is None else ShardedReference(ranks),
        None if critic is None else ShardedCritic(ranks),
        config.reward,
    )


def _spec(config: TrainConfig, tasks: TaskSource, num_ranks: int) -> NetworksSpec | SoloSpec:
    steps = total_steps(config, tasks)
    if num_ranks > 1:
        return sharded_spec(config, steps)
    actor, ref, critic = config.used_networks()
    correction, sampling = config.algorithm.rollout_correction, Sampling.of(config.rollout)
    return SoloSpec(config.model, actor, correction, sampling, steps, ref, critic)
