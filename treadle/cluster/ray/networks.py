"""The networks of a training run, on ranks of a cluster: sharded where several ranks train, and else on one device."""

from treadle.cluster.ray.placement import Reservation
from treadle.cluster.ray.ranks import RemoteRanks
from treadle.cluster.ray.solo import SoloSpec
from treadle.config import TrainConfig
from treadle.config.actor import CriticConfig, FSDPActorConfig, FSDPCriticConfig, FSDPRefConfig, RefConfig
from treadle.data.tasks import TaskSource
from treadle.policy.learner import Sampling
from treadle.policy.rank import NetworksSpec
from treadle.policy.ranks import Ranks
from treadle.policy.sharded import ShardedCritic, ShardedPolicy, ShardedReference, check_sharded
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


def make_step(config: TrainConfig, ranks: Ranks) -> StepParts:
    """What a training step works with, on these ranks."""
    reference = None if _ref(config) is None else ShardedReference(ranks)
    critic = None if _critic(config) is None else ShardedCritic(ranks)
    return StepParts(ShardedPolicy(ranks), config.actor, config.algorithm, config.trainer, reference, critic)


def _spec(config: TrainConfig, tasks: TaskSource, num_ranks: int) -> NetworksSpec | SoloSpec:
    actor, ref, critic, rollout = config.actor, _ref(config), _critic(config), config.rollout
    correction, sampling = (
        config.algorithm.rollout_correction,
        Sampling(rollout.temperature, rollout.response_length),
    )
    steps = total_steps(config, tasks)
    if num_ranks == 1:
        return SoloSpec(config.model, actor, correction, sampling, steps, ref, critic)
    check_sharded(num_ranks, actor, ref, critic)
    assert isinstance(actor, FSDPActorConfig), "checked just before"
    assert ref is None or isinstance(ref, FSDPRefConfig), "checked just before"
    assert critic is None or isinstance(critic, FSDPCriticConfig), "checked just before"
    return NetworksSpec(config.model, actor, correction, sampling, steps, ref, critic)


def _ref(config: TrainConfig) -> RefConfig | None:
    """The reference's section, where there is a reference."""
    actor, algorithm = config.actor, config.algorithm
    return config.ref if actor.use_kl_loss or algorithm.use_kl_in_reward else None


def _critic(config: TrainConfig) -> CriticConfig | None:
    """The critic's section, where there is a critic."""
    return config.critic if config.algorithm.needs_critic() else None
