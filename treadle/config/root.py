"""The whole config, of a stand-alone rollout or of a training run; and the `data`, `logging` and `cluster` sections."""

from typing import Literal

from treadle.config.reward import RewardConfig
from treadle.config.rollout import ModelConfig, RolloutConfig
from treadle.config.section import REQUIRED, Options, Section, Strings, key
from treadle.config.training import (
    ActorConfig,
    AlgorithmConfig,
    CheckpointConfig,
    CriticConfig,
    RefConfig,
    TrainerConfig,
)


class DataConfig(Section):
    """Tasks for training and validation: JSONL or Parquet files, `reasoning_gym:NAME`, or `package.module:function`."""

    train_files: Strings = key((), "task files, generators or functions to train on or roll out, read in this order")
    val_files: Strings = key((), "task files, generators or functions to validate on")
    train_max_samples: int = key(-1, "use at most this many training tasks; -1 for all", ge=-1)
    val_max_samples: int = key(-1, "use at most this many validation tasks; -1 for all", ge=-1)
    train_batch_size: int = key(64, "tasks per training step", ge=1)
    prompt_key: str = key("prompt", "field of a row that holds the prompt, as text or as chat messages")
    answer_key: str = key("answer", "field of a row that holds the ground truth")
    reward_fn_key: str = key("data_source", "field of a row that says which data set it belongs to")
    shuffle: bool = key(True, "draw training tasks in a random order, fixed by the seed")
    max_n: int = key(1024, "most samples that a row may ask for by its own `n`", ge=1)
    seed: int = key(42, "seed of that order", ge=0)
    source_kwargs: Options = key({}, "arguments for task generators, by dataset or function name")


Tracker = Literal["console", "tensorboard", "wandb", "mlflow", "trackio"]


class LoggingConfig(Section):
    """Where a run leaves its traces. Metrics are always written as JSONL too."""

    project_name: str = key("treadle", "project, for trackers and the default run directory")
    experiment_name: str = key(
        "run", "experiment, for trackers and the default run directory; the name of the config file or recipe if unset"
    )
    run_dir: str | None = key(
        None,
        "directory that holds everything about the run; null for runs/project/experiment, with -rollout or -validation "
        "after it for treadle rollout",
    )
    logger: tuple[Tracker, ...] = key(
        ("console",), "where metrics go; without console, training shows no steps on the terminal, and logs them alone"
    )
    journal: bool = key(True, "keep every trajectory in the run directory")
    journal_max_mb: int = key(
        4096, "size of the journal; the oldest tokens and messages are dropped for it, then the oldest records", ge=1
    )
    prometheus_port: int | None = key(
        None,
        "port of this machine at which a Prometheus scraper finds the newest metrics; null for none",
        ge=1,
        le=65535,
    )
    log_val_generations: int = key(0, "validation transcripts to send to the trackers", ge=0)

    def directory(self, purpose: Literal["train", "rollout", "validation"] = "train") -> str:
        """The run directory: by default one for each purpose, so that a run's samples never become an evaluation."""
        suffix = "" if purpose == "train" else f"-{purpose}"
        return self.run_dir or f"runs/{self.project_name}/{self.experiment_name}{suffix}"


class ClusterConfig(Section):
    """This machine, or Ray."""

    backend: Literal["local", "ray"] = key("local", "local runs on this machine; ray on a Ray cluster")
    address: str | None = key(None, "address of a running Ray cluster; null starts one here")
    ray_init: Options = key({}, "further arguments for ray.init")


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
