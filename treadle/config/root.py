"""The whole config, of a stand-alone rollout or of a training run; and the `data`, `logging` and `cluster` sections."""

from math import ceil
from typing import Literal

from treadle.config.reward import RewardConfig
from treadle.config.rollout import ModelConfig, RolloutConfig
from treadle.config.section import REQUIRED, Options, Section, Strings, key
from treadle.config.training import (
    ActorConfig,
    AlgorithmConfig,
    CheckpointConfig,
    CriticConfig,
    OptimConfig,
    RefConfig,
    SFTConfig,
    TrainerConfig,
)


class SuccessBandConfig(Section):
    """The sampler `success_band`: tasks that the policy solves sometimes, after those it has not met yet."""

    low: float = key(0.1, "lowest share of solved samples at which a task is preferred", ge=0, le=1)
    high: float = key(0.9, "highest such share", ge=0, le=1)
    explore: float = key(
        0.1,
        "share of draws for the task drawn longest ago, whatever its success: none is shut out",
        gt=0,
        le=1,
    )


class HardReplayConfig(Section):
    """The sampler `hard_replay`: every task in turn, and between them those again that were too hard."""

    share: float = key(0.25, "share of draws for tasks that come again, while there are any", gt=0, lt=1)
    below: float = key(0.5, "share of solved samples below which a task comes again", gt=0, le=1)


SAMPLERS = ("success_band", "hard_replay")
"""Task samplers that come with treadle."""


class DataConfig(Section):
    """Tasks for training and validation: files, data sets on disk, generators, environments or functions."""

    train_files: Strings = key((), "task files, generators or functions to train on or roll out, read in this order")
    train_weights: tuple[float, ...] = key(
        (), "shares of train_files in training, one number for each; empty to draw every task once an epoch", gt=0
    )
    val_files: Strings = key((), "task files, generators or functions to validate on")
    train_max_samples: int = key(-1, "use at most this many training tasks; -1 for all", ge=-1)
    val_max_samples: int = key(-1, "use at most this many validation tasks; -1 for all", ge=-1)
    train_batch_size: int = key(64, "tasks per training step", ge=1)
    prompt_key: str = key("prompt", "field of a row that holds the prompt, as text or as chat messages")
    prompt_template: str | None = key(
        None,
        "Jinja template of the user's message over the fields of a row, such as {{ question }}; null for prompt_key",
    )
    system_prompt: str | None = key(None, "system message before every prompt; null for none")
    answer_key: str = key("answer", "field of a row that holds the ground truth")
    reward_fn_key: str = key("data_source", "field of a row that says which data set it belongs to")
    shuffle: bool = key(True, "draw training tasks in a random order, fixed by the seed")
    max_n: int = key(1024, "most samples that a row may ask for by its own `n`", ge=1)
    seed: int = key(42, "seed of that order", ge=0)
    sampler: str | None = key(
        None, "curriculum: the class that chooses training tasks by their results; null for the order", names=SAMPLERS
    )
    sampler_kwargs: Options = key({}, "arguments for a sampler of one's own")
    success_band: SuccessBandConfig = key(SuccessBandConfig(), "settings of that sampler")
    hard_replay: HardReplayConfig = key(HardReplayConfig(), "settings of that sampler")
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
    annotations: float = key(
        0.1,
        "share of trained groups whose tokens are kept with the trainer's logprobs, advantages, entropy and weights; "
        "groups with failures and the most extreme are kept beside them; 0 for none",
        ge=0.0,
        le=1.0,
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

    def without_training(self) -> "Config":
        """The sections that a stand-alone rollout reads, with their origins; rules of training do not apply to them."""
        return Config.with_traces(self.values(), self._traces)


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
        ref = self.ref if self.actor.use_kl_loss or self.algorithm.needs_reference() else None
        return self.actor, ref, self.critic if self.algorithm.needs_critic() else None

    def total_steps(self, num_tasks: int) -> int:
        """How many steps a run takes: `trainer.total_training_steps`, or what its epochs need of so many tasks."""
        needed = ceil(self.trainer.total_epochs * num_tasks / self.data.train_batch_size)
        return self.trainer.total_training_steps or needed


class SFTRunConfig(TrainConfig):
    """Supervised fine-tuning: the policy learns from conversations; nothing is sampled, no reward is computed."""

    actor: ActorConfig = key(ActorConfig(optim=OptimConfig(lr=1.0e-5)), "the policy and its optimizer")
    sft: SFTConfig = key(SFTConfig(), "which conversations train, for treadle sft")

    def used_networks(self) -> tuple[ActorConfig, RefConfig | None, CriticConfig | None]:
        return self.actor, None, None

    def without_sampling(self) -> "SFTRunConfig":
        """This config without the engines and rewards that a file shared with a training run may ask for."""
        rollout = RolloutConfig(multi_turn=self.rollout.multi_turn)
        return SFTRunConfig(**{**self.values(), "rollout": rollout, "reward": RewardConfig()})

    def longest_row(self) -> int:
        """Tokens that a conversation may have."""
        return self.sft.max_length or self.actor.ppo_max_token_len_per_gpu
