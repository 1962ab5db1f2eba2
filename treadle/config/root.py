"""The whole config: a rollout that stands alone, or a training run around one."""

from treadle.config.actor import ActorConfig, CriticConfig, RefConfig
from treadle.config.algorithm import AlgorithmConfig
from treadle.config.cluster import ClusterConfig
from treadle.config.data import DataConfig
from treadle.config.logging import LoggingConfig
from treadle.config.model import ModelConfig
from treadle.config.reward import RewardConfig
from treadle.config.rollout import RolloutConfig
from treadle.config.section import REQUIRED, Section, key
from treadle.config.trainer import CheckpointConfig, TrainerConfig


class Config(Section):
    """A stand-alone rollout: no trainer, no actor, no algorithm to see."""

    model: ModelConfig = key(REQUIRED, "weights, tokenizer and chat template")
    data: DataConfig = key(DataConfig(), "tasks")
    rollout: RolloutConfig = key(RolloutConfig(), "engines, agent loops, tools and limits")
    reward: RewardConfig = key(RewardConfig(), "scores")
    logging: LoggingConfig = key(LoggingConfig(), "run directory, journal and trackers")
    cluster: ClusterConfig = key(ClusterConfig(), "where processes run")


class TrainConfig(Config):
    """A training run: a rollout, and what learns from it."""

    actor: ActorConfig = key(ActorConfig(), "the policy and its optimizer")
    ref: RefConfig = key(RefConfig(), "the reference policy")
    critic: CriticConfig = key(CriticConfig(), "the value model")
    algorithm: AlgorithmConfig = key(AlgorithmConfig(), "advantages, KL, filtering, off-policy correction")
    trainer: TrainerConfig = key(TrainerConfig(), "schedule, length, validation")
    checkpoint: CheckpointConfig = key(CheckpointConfig(), "saving and resuming")

    def used_networks(self) -> tuple[ActorConfig, RefConfig | None, CriticConfig | None]:
        """The sections of the networks that the run loads; None where it needs none."""
        ref = self.ref if self.actor.use_kl_loss or self.algorithm.use_kl_in_reward else None
        return self.actor, ref, self.critic if self.algorithm.needs_critic() else None
