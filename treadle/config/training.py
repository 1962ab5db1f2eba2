"""The `actor`, `ref`, `critic`, `algorithm`, `trainer` and `checkpoint` sections: what learns, how, how long."""

from typing import Literal

from treadle.config.rollout import ModelConfig, OnWeightUpdate
from treadle.config.section import Section, Strings, key

POLICY_LOSSES = (
    "vanilla",
    "gspo",
    "cispo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "gpg",
    "geo_mean",
    "kl_cov",
    "clip_cov",
)
"""The policy losses that come with treadle."""

SEQUENCE_MEAN_LOSSES = ("gspo", "geo_mean", "sapo")
"""Those that are a mean over sequences by definition, whatever `loss_agg_mode` says of other terms."""

Dtype = Literal["fp32", "bf16"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLLossType = Literal["k1", "k1+", "k2", "k3", "k3+"]


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = key(1.0e-6, "peak learning rate", gt=0)
    betas: tuple[float, float] = key((0.9, 0.999), "decay of the two moment estimates", ge=0, lt=1)
    weight_decay: float = key(0.01, "decoupled weight decay", ge=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = key(
        "constant", "shape after warm-up; wsd is constant, then falls in a line over the last steps"
    )
    lr_warmup_steps: int = key(-1, "steps of linear warm-up; -1 to use the ratio", ge=-1)
    lr_warmup_steps_ratio: float = key(0.0, "warm-up as a fraction of all steps", ge=0, le=1)
    min_lr_ratio: float = key(0.0, "lowest learning rate over the peak, where it falls", ge=0, le=1)
    wsd_decay_ratio: float = key(0.1, "last fraction of all steps, in which wsd falls", ge=0, le=1)
    num_cycles: float = key(0.5, "cosine waves over the run; 0.5 falls once", gt=0)
    max_nonfinite_steps: int = key(
        3, "updates in a row with a gradient that is not finite that end the run; each one is skipped", ge=1
    )


class FSDPConfig(Section):
    """How PyTorch FSDP2 shards a network."""

    fsdp_size: int = key(-1, "ranks that share one copy; -1 for all", ge=-1)
    reshard_after_forward: bool = key(True, "free gathered parameters between forward and backward")
    forward_prefetch: bool = key(False, "gather the next layer while this one computes")
    param_offload: bool = key(False, "keep parameters in CPU memory while they are not in use")
    optimizer_offload: bool = key(False, "keep optimizer state in CPU memory while it is not in use")
    offload_policy: bool = key(False, "FSDP2's own CPU offload: parameters, gradients and optimizer step on the CPU")


class PolicyLossConfig(Section):
    """The policy loss and the parameters that only some losses read."""

    loss_mode: str = key("vanilla", "which loss", names=POLICY_LOSSES)
    clip_cov_ratio: float = key(0.0002, "fraction of tokens clip_cov leaves out", ge=0, le=1)
    clip_cov_lb: float = key(1.0, "lower covariance bound of clip_cov")
    clip_cov_ub: float = key(5.0, "upper covariance bound of clip_cov")
    kl_cov_ratio: float = key(0.0002, "fraction of tokens kl_cov penalises", ge=0, le=1)
    ppo_kl_coef: float = key(0.1, "weight of that penalty", ge=0)
    cispo_max_ratio: float | None = key(
        None, "largest weight of cispo, with no smallest (ScaleRL: 5); null to clip on both sides by clip_ratio", gt=0
    )
    tau_pos: float = key(1.0, "how fast sapo's gate closes where the advantage is positive", gt=0)
    tau_neg: float = key(1.05, "how fast it closes elsewhere", gt=0)


ALL_LINEAR = "all-linear"
"""Every linear module of the decoder: attention and MLP, and not the output layer."""


class LoraConfig(Section):
    """Low-rank adapters: they alone train, beside the model's frozen weights."""

    r: int | None = key(None, "rank of the adapters; null: no adapters, all parameters train", ge=1)
    alpha: float | None = key(None, "numerator of the scale alpha / r; null for 2 r", gt=0)
    target_modules: Strings = key(
        (ALL_LINEAR,), "linear modules with an adapter: ends of their names such as q_proj, or all-linear"
    )
    exclude_modules: Strings = key((), "modules without one after all, likewise")
    use_rslora: bool = key(False, "scale alpha / sqrt(r) instead of alpha / r (rank-stabilized LoRA)")
    seed: int = key(42, "seed of the first factor at the start; the second one starts at 0", ge=0)


class ActorConfig(Section):
    """The policy, trained on one device per process."""

    ppo_mini_batch_size: int = key(64, "tasks per optimizer step; times rollout.n trajectories", ge=1)
    ppo_epochs: int = key(1, "passes over each batch", ge=1)
    ppo_max_token_len_per_gpu: int = key(16384, "tokens packed into one micro batch", ge=1)
    shuffle: bool = key(False, "shuffle trajectories between mini batches of a step")
    data_loader_seed: int = key(42, "seed of that shuffle", ge=0)
    clip_ratio: float = key(0.2, "how far a probability ratio (dppo: a divergence) may move before it is clipped", ge=0)
    clip_ratio_low: float | None = key(None, "clip below 1; null for clip_ratio", ge=0)
    clip_ratio_high: float | None = key(None, "clip above 1; null for clip_ratio", ge=0)
    clip_ratio_c: float | None = key(
        3.0, "largest ratio that counts: vanilla, for negative advantages (TRL's delta), and dppo; null for none", gt=1
    )
    policy_loss: PolicyLossConfig = key(PolicyLossConfig(), "which loss")
    loss_agg_mode: Aggregation = key("token-mean", "how token losses become one number")
    loss_scale_factor: float | None = key(None, "divisor of seq-mean-token-sum-norm; null for response_length", gt=0)
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    use_kl_loss: bool = key(False, "add the KL divergence from the reference policy to the loss")
    kl_loss_coef: float = key(0.001, "weight of that divergence", ge=0)
    kl_loss_type: KLLossType = key("k3+", "its estimator; with a plus, that value and the gradient of k2")
    grad_clip: float = key(1.0, "gradient norm above which gradients are scaled down", gt=0)
    model_dtype: Dtype = key("fp32", "dtype of the trained parameters")
    dtype: Dtype = key("bf16", "dtype of the computation")
    lora: LoraConfig = key(LoraConfig(), "low-rank adapters (LoRA)")
    optim: OptimConfig = key(OptimConfig(), "optimizer")

    def lends_reference(self, ref: "RefConfig") -> bool:
        """Whether the frozen weights beside the adapters are the reference policy, so that it needs no copy."""
        return ref.path is None and self.lora.r is not None and self.dtype == ref.dtype and ref.sync_freq <= 0


class FSDPActorConfig(ActorConfig):
    """The policy, sharded over several devices with FSDP2."""

    fsdp_config: FSDPConfig = key(FSDPConfig(), "sharding")


class RefConfig(Section):
    """The reference policy: the model as it was before training, one that follows the policy, or a teacher."""

    path: str | None = key(
        None, "another model as reference, such as a teacher (algorithm.distill_coef); same tokenizer"
    )
    prompt_template: str | None = key(
        None,
        "Jinja template of the last user's message as the reference alone reads it, over prompt, answer and the task's "
        "other fields: a teacher that knows more; null for what the student reads",
    )
    log_prob_max_token_len_per_gpu: int = key(16384, "tokens packed into one forward pass", ge=1)
    dtype: Dtype = key("bf16", "dtype of the computation")
    sync_freq: int = key(-1, "mix the policy's weights in every this many steps; -1 for never", ge=-1)
    sync_mix: float = key(0.6, "the policy's part of that mix", gt=0, le=1)

    def model_of(self, model: ModelConfig) -> ModelConfig:
        """The model of the reference, where `model` is the policy's."""
        if self.path is None:
            return model
        return ModelConfig(path=self.path, trust_remote_code=model.trust_remote_code, parity_check=model.parity_check)

    def syncs_after(self, step: int) -> bool:
        """Whether the policy's weights are mixed in after this training step."""
        return self.sync_freq > 0 and step % self.sync_freq == 0


class FSDPRefConfig(RefConfig):
    """The reference policy, sharded with FSDP2."""

    fsdp_config: FSDPConfig = key(FSDPConfig(), "sharding")


class CriticConfig(Section):
    """The value model of PPO; built only when the advantage estimator needs one."""

    path: str | None = key(None, "model to start from; null for model.path")
    ppo_mini_batch_size: int | None = key(None, "tasks per optimizer step; null for the actor's", ge=1)
    ppo_epochs: int | None = key(None, "passes over each batch; null for the actor's", ge=1)
    ppo_max_token_len_per_gpu: int = key(32768, "tokens packed into one micro batch", ge=1)
    cliprange_value: float = key(0.5, "how far a value may move in one step before it is clipped", gt=0)
    loss_agg_mode: Aggregation = key("token-mean", "how token losses become one number")
    grad_clip: float = key(1.0, "gradient norm above which gradients are scaled down", gt=0)
    model_dtype: Dtype = key("fp32", "dtype of the trained parameters")
    dtype: Dtype = key("bf16", "dtype of the computation")
    optim: OptimConfig = key(OptimConfig(lr=1.0e-5), "optimizer")


class FSDPCriticConfig(CriticConfig):
    """The value model, sharded with FSDP2."""

    fsdp_config: FSDPConfig = key(FSDPConfig(), "sharding")


GROUP_ESTIMATORS = (
    "grpo",
    "gdpo",
    "dr_grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus_baseline",
    "dpo",
    "ipo",
)
"""Advantages that compare the samples of one task, so that one sample alone has none."""

TURN_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Those of them that can compare turn by turn."""

PREFERENCE_ESTIMATORS = ("dpo", "ipo")
"""Those of them that prefer the best sample of a task to its worst, by how far each is from a reference policy."""

OTHER_ESTIMATORS = ("reinforce_plus_plus", "remax", "gae", "on_policy_distill")
"""The other advantages that come with treadle."""


class KLControlConfig(Section):
    """The weight of KL in the reward, fixed or steered towards a target."""

    type: Literal["fixed", "adaptive"] = key("fixed", "keep the weight, or steer it")
    kl_coef: float = key(0.001, "weight, or where it starts", ge=0)
    horizon: int = key(10000, "trajectories over which adaptive control reacts", ge=1)
    target_kl: float = key(0.1, "divergence that adaptive control aims at", gt=0)


class FilterGroupsConfig(Section):
    """Dynamic sampling: groups whose samples all score the same teach nothing and are replaced."""

    enable: bool = key(False, "replace groups with no signal")
    metric: str = key("reward", "what must differ within a group: reward, or a reward function's name")
    max_num_gen_batches: int = key(10, "batches generated for one step before the run gives up", ge=1)


class RolloutCorrectionConfig(Section):
    """How training accounts for samples that came from other weights, or from another engine's arithmetic."""

    rollout_is: Literal["none", "token", "sequence"] | None = key(
        None, "truncated importance weights; asynchronous modes require a choice, and none is one"
    )
    rollout_is_threshold: float = key(2.0, "upper bound of those weights", gt=0)
    rollout_rs: Literal["none", "token", "sequence", "geometric"] = key(
        "none", "reject tokens or sequences whose ratio leaves the bounds"
    )
    rollout_rs_threshold: float | None = key(
        None, "upper bound of an accepted ratio; null for 2, and for 1.001 with geometric", gt=1
    )
    rollout_rs_threshold_lower: float | None = key(None, "lower bound; null for one over the upper", gt=0, lt=1)
    off_policy_mask_threshold: float | None = key(
        None,
        "leave sequences of negative advantage out of the policy term where the mean log(sampler / policy) is larger",
        gt=0,
    )
    bypass_mode: bool = key(False, "use the sampler's logprobs as the old policy instead of computing them again")

    def rejection_bounds(self) -> tuple[float, float]:
        """Between which ratios nothing is rejected."""
        upper = self.rollout_rs_threshold or (1.001 if self.rollout_rs == "geometric" else 2.0)
        return self.rollout_rs_threshold_lower or 1 / upper, upper


class AlgorithmConfig(Section):
    """From rewards to advantages."""

    adv_estimator: str = key("grpo", "advantage estimator", names=(*GROUP_ESTIMATORS, *OTHER_ESTIMATORS))
    gamma: float = key(1.0, "discount", ge=0, le=1)
    lam: float = key(1.0, "bias and variance of gae", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(True, "divide by the group's standard deviation")
    norm_adv_scope: Literal["group", "batch"] = key(
        "group", "whose deviation that is, for grpo: the group's or the batch's"
    )
    advantage_level: Literal["trajectory", "turn"] = key(
        "trajectory",
        "what group estimators compare: whole trajectories, or what each still got from a turn on; gae and "
        "reinforce_plus_plus follow the rewards of turns in any case",
    )
    mask_truncated: bool = key(
        False, "keep answers that were cut off at the token limit out of the loss; they still count in baselines"
    )
    use_kl_in_reward: bool = key(False, "subtract the KL divergence from the reference policy from the reward")
    kl_penalty: Literal["k1", "k2", "k3"] = key("k1", "its estimator")
    distill_coef: float = key(
        0.0,
        "weight of on-policy distillation: each token's advantage gets this times log(teacher / policy), with ref.path "
        "as the teacher; adv_estimator on_policy_distill leaves rewards out",
        ge=0,
    )
    preference_beta: float = key(
        0.1, "how much dpo and ipo weigh the distance from the reference policy: the larger, the nearer they stay", gt=0
    )
    kl_ctrl: KLControlConfig = key(KLControlConfig(), "its weight")
    filter_groups: FilterGroupsConfig = key(FilterGroupsConfig(), "dynamic sampling")
    rollout_correction: RolloutCorrectionConfig = key(RolloutCorrectionConfig(), "off-policy correction")

    def needs_gradient_norms(self) -> bool:
        """Whether the estimator reads how far each token's gradient goes."""
        return self.adv_estimator == "optimal_token_baseline"

    def needs_reference(self) -> bool:
        """Whether a step reads the logprobs of a reference, beside the loss."""
        return self.use_kl_in_reward or self.distill_coef > 0 or self.adv_estimator in PREFERENCE_ESTIMATORS

    def needs_critic(self) -> bool:
        """Whether the estimator reads a value model."""
        return self.adv_estimator == "gae"


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


class SFTConfig(Section):
    """Supervised fine-tuning: which conversations train, from data files or from the journals of earlier runs."""

    messages_key: str = key("messages", "field of a row that holds a whole conversation as chat messages")
    response_key: str = key(
        "response", "field of a row that holds the answer to data.prompt_key, as text or as chat messages"
    )
    min_reward: float | None = key(
        None, "least reward of the trajectories of a run directory that train; needed where data names one"
    )
    max_length: int | None = key(None, "tokens a conversation may have; null for actor.ppo_max_token_len_per_gpu", ge=2)
    overlong: Literal["error", "drop"] = key("error", "what happens to a longer one; those dropped are counted")


class CheckpointConfig(Section):
    """What is saved, how often, and where a run picks up."""

    save_freq: int = key(-1, "save every this many steps; -1 for by time, at the end and on interruption only", ge=-1)
    save_every_s: float | None = key(
        600.0,
        "save after the first step that ends this many seconds after the last save, also beside save_freq; "
        "null for never by time",
        gt=0,
    )
    keep_last: int | None = key(2, "steps whose checkpoints are kept, beside the best one; null for all", ge=1)
    grace_s: float = key(
        25.0,
        "after SIGTERM or SIGHUP: seconds in which the step under way must end and be saved, else the run ends without",
        gt=0,
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = key(
        "auto", "continue the newest checkpoint of the run directory, start afresh, or continue resume_from_path"
    )
    resume_from_path: str | None = key(None, "checkpoint to continue from")
