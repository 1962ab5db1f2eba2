"""`actor_rollout_ref.actor` and `actor_rollout_ref.ref`: now `actor` and `ref`."""

from treadle.config.legacy.conversion import (
    aggregation,
    kl_in_loss,
    number_format,
    section_class,
    sequences_to_tokens,
    token_budget,
    words,
)
from treadle.config.legacy.rule import Rules, Said, classes, fixed, ignored, moved, none, to, under
from treadle.config.legacy.rules.network import (
    COMPILED,
    ENTROPY,
    PACKED,
    PROFILER,
    QUANTIZED,
    ULYSSES,
    backends,
    contents,
    optimizer,
    sharding,
)

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
DYNAMIC = f"{ACTOR}.use_dynamic_bsz"

GLOBAL_MICRO_BATCH = (
    "A micro batch is a number of tokens per GPU: give actor.ppo_max_token_len_per_gpu"
    " (or ref.log_prob_max_token_len_per_gpu, critic.ppo_max_token_len_per_gpu)."
)
TOKENS = "micro batches are always packed up to a number of tokens"
LOSSES = "vanilla gspo sapo dppo_tv dppo_kl cispo gpg geo_mean kl_cov clip_cov"

_losses = words(
    {name: name for name in LOSSES.split()}
    | {
        "clip-cov": Said("clip_cov", "clip-cov is written clip_cov"),
        "kl-cov": Said("kl_cov", "kl-cov is written kl_cov"),
    },
    f"There is {LOSSES.replace(' ', ', ')}; any other loss is named by import path, as package.module:function.",
)


def _parallel(*networks: str) -> list[str]:
    """The keys that say over how many GPUs verl splits a sequence."""
    sizes = (
        "ulysses_sequence_parallel_size",
        "fsdp_config.ulysses_sequence_parallel_size",
        "veomni.ulysses_parallel_size",
        "megatron.context_parallel_size",
    )
    return [f"{network}.{size}" for network in networks for size in sizes]


_MEMORY_OF_ENTROPY: Rules = {
    "entropy_from_logits_with_chunking": fixed(False, note="no chunking", otherwise=ENTROPY),
    "entropy_from_logits_chunk_size": none(ENTROPY),
    "entropy_checkpointing": fixed(False, note="no recomputation of entropy", otherwise=ENTROPY),
    "pad_to_length": fixed(False, note=PACKED),
    "ulysses_sequence_parallel_size": fixed(1, note="no sequence parallelism", otherwise=ULYSSES),
    "use_torch_compile": none(COMPILED),
    "profiler.**": none(PROFILER),
}

RULES: Rules = (
    moved(
        ACTOR,
        "actor",
        "ppo_mini_batch_size ppo_epochs shuffle data_loader_seed clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c"
        " loss_scale_factor entropy_coeff use_kl_loss kl_loss_coef grad_clip",
    )
    | moved(
        f"{ACTOR}.policy_loss", "actor.policy_loss", "clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef"
    )
    | classes(ACTOR, "policy_loss")
    | contents(f"{ACTOR}.checkpoint")
    | optimizer(f"{ACTOR}.optim", "actor")
    | sharding(f"{ACTOR}.fsdp_config", "actor", "Actor", to("actor.model_dtype", convert=number_format))
    | backends(ACTOR)
    | under(ACTOR, _MEMORY_OF_ENTROPY)
    | under(
        ACTOR,
        {
            "_target_": to("actor._target_", convert=section_class("Actor")),
            "strategy": to("actor._target_", convert=section_class("Actor")),
            "rollout_n": to("rollout.n"),
            "kl_loss_type": to("actor.kl_loss_type", convert=kl_in_loss),
            "loss_agg_mode": to("actor.loss_agg_mode", convert=aggregation),
            "policy_loss.loss_mode": to("actor.policy_loss.loss_mode", convert=_losses),
            "policy_loss.dro_beta": fixed(None, note="no DRO loss", otherwise="There is no DRO loss."),
            "ppo_max_token_len_per_gpu": to(
                "actor.ppo_max_token_len_per_gpu",
                convert=token_budget(DYNAMIC, f"{ACTOR}.ppo_micro_batch_size_per_gpu", _parallel(ACTOR)),
            ),
            "ppo_micro_batch_size_per_gpu": to("actor.ppo_max_token_len_per_gpu", convert=sequences_to_tokens(DYNAMIC)),
            "ppo_micro_batch_size": fixed(None, note="not given", otherwise=GLOBAL_MICRO_BATCH),
            "use_dynamic_bsz": fixed(True, False, note=TOKENS),
            "use_remove_padding": fixed(True, False, note=PACKED),
            "use_rollout_log_probs": fixed(
                True, False, note="algorithm.rollout_correction.bypass_mode says whose logprobs are the old policy's"
            ),
            "use_fused_kernels": fixed(False, note="no fused kernels", otherwise="There are no fused loss kernels."),
            "use_prefix_grouper": fixed(
                False, note="no prefix grouping", otherwise="Prompts are packed with each sample."
            ),
            "calculate_entropy": fixed(
                False,
                note="entropy is computed when actor.entropy_coeff asks for it",
                otherwise="Set actor.entropy_coeff.",
            ),
            "calculate_sum_pi_squared": ignored("it is computed where algorithm.adv_estimator reads it"),
            "freeze_vision_tower": fixed(
                False, note="text only", otherwise="Models are text only; there is no vision tower."
            ),
            "tau_pos": to("actor.policy_loss.tau_pos"),
            "tau_neg": to("actor.policy_loss.tau_neg"),
            "qat.enable": fixed(False, note="no quantization-aware training", otherwise=QUANTIZED),
            "qat.**": none(QUANTIZED),
        },
    )
    | sharding(f"{REF}.fsdp_config", "ref", "Ref", none("The reference policy has one number format: give ref.dtype."))
    | backends(REF)
    | under(REF, _MEMORY_OF_ENTROPY)
    | under(
        REF,
        {
            "_target_": to("ref._target_", convert=section_class("Ref")),
            "strategy": to("ref._target_", convert=section_class("Ref")),
            "rollout_n": to("rollout.n"),
            "log_prob_max_token_len_per_gpu": to(
                "ref.log_prob_max_token_len_per_gpu",
                convert=token_budget(
                    f"{REF}.log_prob_use_dynamic_bsz", f"{REF}.log_prob_micro_batch_size_per_gpu", _parallel(REF, ACTOR)
                ),
            ),
            "log_prob_micro_batch_size_per_gpu": to(
                "ref.log_prob_max_token_len_per_gpu", convert=sequences_to_tokens(f"{REF}.log_prob_use_dynamic_bsz")
            ),
            "log_prob_micro_batch_size": fixed(None, note="not given", otherwise=GLOBAL_MICRO_BATCH),
            "log_prob_use_dynamic_bsz": fixed(True, False, note=TOKENS),
            "optim.**": none("The reference policy does not train: leave its optimizer out."),
        },
    )
)
