"""The `actor`, `ref` and `critic` sections: the networks that train or are compared with, and their optimizer."""

from typing import Literal

from treadle.config.section import Section, key

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
    model_dtype: Dtype = key("fp32", "number format of the trained parameters")
    dtype: Dtype = key("bf16", "number format of the computation")
    optim: OptimConfig = key(OptimConfig(), "optimizer")


class FSDPActorConfig(ActorConfig):
    """The policy, sharded over several devices with FSDP2."""

    fsdp_config: FSDPConfig = key(FSDPConfig(), "sharding")


class RefConfig(Section):
    """The reference policy: the model as it was before training, or one that follows the policy."""

    log_prob_max_token_len_per_gpu: int = key(16384, "tokens packed into one forward pass", ge=1)
    dtype: Dtype = key("bf16", "number format of the computation")
    sync_freq: int = key(-1, "mix the policy's weights in every this many steps; -1 for never", ge=-1)
    sync_mix: float = key(0.6, "the policy's part of that mix", gt=0, le=1)

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
    model_dtype: Dtype = key("fp32", "number format of the trained parameters")
    dtype: Dtype = key("bf16", "number format of the computation")
    optim: OptimConfig = key(OptimConfig(lr=1.0e-5), "optimizer")


class FSDPCriticConfig(CriticConfig):
    """The value model, sharded with FSDP2."""

    fsdp_config: FSDPConfig = key(FSDPConfig(), "sharding")
