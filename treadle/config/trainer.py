"""The `trainer` and `checkpoint` sections: the schedule, its length, and what survives a crash."""

from typing import Literal

from treadle.config.section import Section, key

OnWeightUpdate = Literal["continue", "recompute", "wait", "drop"]


class WeightsConfig(Section):
    """How new weights reach engines in other processes."""

    transport: Literal["auto", "shared", "store", "collective", "disk"] = key(
        "auto",
        "memory shared on one machine, Ray's object store, one broadcast to all engines, or files; auto chooses shared "
        "without Ray and store with it",
    )
    bucket_mb: int | None = key(
        None, "megabytes that travel at a time; null for 256 on GPUs, else 4 (shared), 16 or 32", ge=1
    )
    directory: str | None = key(
        None, "for disk: a directory of this run alone that all nodes see; null for weights/ in the run directory"
    )

    def bucket_bytes(self) -> int | None:
        """The size of a bucket, where one is given."""
        return None if self.bucket_mb is None else self.bucket_mb << 20


class TrainerConfig(Section):
    """How rollout and training overlap, and for how long."""

    mode: Literal["sync", "one_step_off", "fully_async"] = key("sync", "schedule")
    nnodes: int = key(1, "nodes that train", ge=1)
    n_gpus_per_node: int = key(0, "GPUs on each of those nodes; 0 for CPU", ge=0)
    processes_per_node: int = key(1, "training processes on each of those nodes, where they use no GPU", ge=1)
    total_training_steps: int | None = key(None, "steps; null to derive them from total_epochs", ge=1)
    total_epochs: int = key(1, "passes over the training tasks, where total_training_steps is null", ge=1)
    val_before_train: bool = key(True, "validate the model as it starts")
    val_only: bool = key(False, "validate and stop")
    test_freq: int = key(-1, "validate every this many steps; -1 for at the end only", ge=-1)
    critic_warmup: int = key(0, "steps that train the critic alone", ge=0)
    max_staleness: int = key(1, "policy versions a sample may be behind in fully_async", ge=0)
    stale_samples: Literal["wait", "drop"] = key(
        "wait", "samples that would become too old: training waits for them, or goes on and they start again"
    )
    on_weight_update: OnWeightUpdate = key(
        "continue",
        "running sessions at a weight update: go on at once, go on with their KV cache computed anew, finish first, "
        "or start again",
    )
    parameter_sync_steps: int = key(1, "training steps between weight updates in fully_async", ge=1)
    weights: WeightsConfig = key(WeightsConfig(), "how new weights reach the engines")

    rank_timeout_s: float = key(
        7200.0,
        "how long a call of the training processes may take, such as a step or a checkpoint; one that dies is noticed "
        "at once",
        gt=0,
    )

    def num_ranks(self) -> int:
        """Processes that train together: one for each GPU, or as many as asked for on CPUs."""
        return self.nnodes * (self.n_gpus_per_node or self.processes_per_node)


class CheckpointConfig(Section):
    """What is saved, how often, and where a run picks up."""

    save_freq: int = key(-1, "save every this many steps; -1 for by time, at the end and on interruption only", ge=-1)
    save_every_s: float | None = key(
        600.0,
        "save after the first step that ends this many seconds after the last save, also beside save_freq; "
        "null for never by time",
        gt=0,
    )
    keep_last: int | None = key(2, "steps whose checkpoints are kept; null for all", ge=1)
    grace_s: float = key(
        25.0,
        "after SIGTERM or SIGHUP: seconds in which the step under way must end and be saved, else the run ends without",
        gt=0,
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = key(
        "auto", "continue the newest checkpoint of the run directory, start afresh, or continue resume_from_path"
    )
    resume_from_path: str | None = key(None, "checkpoint to continue from")
