"""Migration rules of networks: `actor_rollout_ref.model`, `.actor` and `.ref`; sharding, optimizer, other backends.

Now `model`, `actor` and `ref`. Also `critic.model`, and the `model` section of verl's fine-tuning.
"""

from typing import Any

from treadle.migrate.rule import (
    Conversion,
    Convert,
    Converted,
    LookUp,
    NotNeeded,
    Refused,
    Rule,
    Rules,
    aggregation,
    asked,
    by_table,
    class_of_verl,
    classes,
    dtype,
    fixed,
    ignored,
    kl_in_loss,
    moved,
    none,
    nones,
    same,
    schedule,
    section_class,
    sequences_to_tokens,
    to,
    token_budget,
    under,
    unless_null,
    warmup_steps,
)

BACKENDS = {
    "megatron": "There is no Megatron backend: networks train on one device or with FSDP2 (fsdp_config).",
    "veomni": "There is no VeOmni backend: networks train on one device or with FSDP2 (fsdp_config).",
    "torchtitan": "There is no TorchTitan backend: networks train on one device or with FSDP2 (fsdp_config).",
}
PROFILER = "There is no profiler section: run the command under your profiler of choice; every run times its spans."
QUANTIZED = "There is no quantization-aware training."
PACKED = "sequences are always packed without padding"
COMPILED = "Which kernels are compiled is not a config choice here: leave it out."
WHOLE_ENTROPY = "Entropy is computed over the whole vocabulary at once: leave it out."
ULYSSES = "There is no sequence parallelism: give each GPU a larger token budget or shard with fsdp_config."
CONTENTS = "A checkpoint always holds the weights, optimizer, schedule, random state and data position."

_SHARDING = "fsdp_size reshard_after_forward forward_prefetch param_offload optimizer_offload offload_policy"
_ADAMW = "The optimizer is PyTorch's AdamW: leave it out, or give its lr, betas and weight_decay."
_MUON = "There is no Muon optimizer: the optimizer is AdamW."
_DECAY = (
    "After warm-up the learning rate is constant, linear, a cosine or wsd:"
    " use lr_scheduler_type, min_lr_ratio, num_cycles and wsd_decay_ratio."
)
_PRECISION = "Optimizer state has the dtype of the parameters (model_dtype)."


def sharding(old: str, section: str, name: str, model_dtype: Rule) -> Rules:
    """verl's FSDP engine options at `old`, for one of our sections; `name` is the section's class without FSDP."""
    new = f"{section}.fsdp_config"
    return (
        moved(old, new, _SHARDING)
        | classes(old)
        | under(
            old,
            {
                "model_dtype": model_dtype,
                "dtype": to(f"{section}.dtype", convert=dtype),
                "mixed_precision.param_dtype": to(f"{section}.dtype", convert=dtype),
                "mixed_precision.reduce_dtype": none("Gradients are reduced in fp32: leave it out."),
                "mixed_precision.buffer_dtype": none("Buffers keep the dtype of the model: leave it out."),
                "strategy": to(f"{section}._target_", convert=section_class(name)),
                "wrap_policy.min_num_params": fixed(0, note="each transformer layer is one shard"),
                "wrap_policy.**": none("Each transformer layer is one shard: leave it out."),
                "use_orig_params": fixed(
                    True, False, note="an option of FSDP1; FSDP2 always keeps the original parameters"
                ),
                "seed": none("The seeds are rollout.seed, data.seed and actor.data_loader_seed: leave it out."),
                "full_determinism": fixed(False, note="PyTorch's own determinism switches are left alone"),
                "ulysses_sequence_parallel_size": fixed(1, note="no sequence parallelism", otherwise=ULYSSES),
                "entropy_from_logits_with_chunking": fixed(False, note="no chunking", otherwise=WHOLE_ENTROPY),
                "entropy_from_logits_chunk_size": none(WHOLE_ENTROPY),
                "entropy_checkpointing": fixed(False, note="no recomputation of entropy", otherwise=WHOLE_ENTROPY),
                "use_torch_compile": none(COMPILED),
                "use_no_sync_for_gradient_accumulation": none(
                    "When gradients are reduced is not a config choice here."
                ),
                "pad_to_length": fixed(False, note=PACKED),
                "pad_to_length_bucket": none("Micro batches are never padded: leave it out."),
                "forward_only": fixed(True, False, note="which network trains follows from its section"),
                "qat.enable": fixed(False, note="no quantization-aware training", otherwise=QUANTIZED),
                "qat.**": none(QUANTIZED),
                "turbo_config.**": none("There is no fsdp_turbo backend: FSDP2 is PyTorch's own."),
            },
        )
    )


def _plain_adamw(value: Any, look: LookUp) -> Conversion:
    return NotNeeded("the optimizer is AdamW") if str(value).lower() in ("adamw", "adam") else Refused(_ADAMW)


def optimizer(old: str, section: str) -> Rules:
    """verl's optimizer options at `old`. Where old and new section are the same, so are the keys."""

    def place(name: str, **options: Any) -> Rule:
        return same(**options) if old == f"{section}.optim" else to(f"{section}.optim.{name}", **options)

    return (
        classes(old)
        | under(
            old,
            {
                "lr": place("lr"),
                "betas": place("betas"),
                "weight_decay": place("weight_decay"),
                "num_cycles": place("num_cycles"),
                "min_lr_ratio": place("min_lr_ratio", convert=unless_null("null is 0, as by default")),
                "lr_scheduler_type": place("lr_scheduler_type", convert=schedule),
                "warmup_style": to(f"{section}.optim.lr_scheduler_type", convert=schedule),
                "lr_warmup_steps": place("lr_warmup_steps", convert=warmup_steps),
                "lr_warmup_steps_ratio": place("lr_warmup_steps_ratio"),
                "clip_grad": to(f"{section}.grad_clip"),
                "grad_clip": to(f"{section}.grad_clip", convert=unless_null("not given")),
                "total_training_steps": fixed(
                    -1, None, note="the run knows its length", otherwise="The run knows its length: leave it out."
                ),
                "optimizer": asked(_plain_adamw),
                "optimizer_impl": fixed("torch.optim", note="the optimizer is PyTorch's", otherwise=_ADAMW),
                "override_optimizer_config": fixed(None, {}, note="no further arguments", otherwise=_ADAMW),
                "zero_indexed_step": fixed(True, note="steps count from zero in the schedule"),
                "eps": fixed(1e-8, note="PyTorch's own eps", otherwise="AdamW keeps PyTorch's eps of 1e-8."),
                "name": asked(_plain_adamw),
            },
        )
        | nones(
            old,
            "decay_type init_lr_ratio lr_decay_ratio lr_decay_steps lr_decay_style lr_min lr_start lr_warmup_init"
            " lr_wsd_decay_steps lr_wsd_decay_style min_lr min_lr_factor wd_incr_style weight_decay_incr_style"
            " use_checkpoint_opt_param_scheduler",
            _DECAY,
        )
        | nones(
            old,
            "muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec muon_match_adamw_update_rms"
            " muon_momentum muon_nesterov muon_num_ns_steps muon_scalar_optimizer muon_scale_mode muon_split_qkv"
            " muon_tp_mode use_layer_wise_distributed_optimizer",
            _MUON,
        )
        | nones(
            old,
            "exp_avg_dtype exp_avg_sq_dtype main_grads_dtype master_weight_dtype master_weights store_param_remainders"
            " use_precision_aware_optimizer",
            _PRECISION,
        )
    )


def _whole_checkpoint(value: Any, look: LookUp) -> Conversion:
    whole = isinstance(value, list | tuple) and {"model", "optimizer", "extra"} <= set(map(str, value))
    return NotNeeded("a checkpoint always holds everything") if whole else Refused(CONTENTS)


def contents(old: str) -> Rules:
    """What goes into a checkpoint."""
    everything = asked(_whole_checkpoint)
    return classes(old) | under(
        old,
        {
            "save_contents": everything,
            "load_contents": everything,
            "contents": everything,
            "async_save": fixed(False, note="checkpoints are written before training goes on"),
            "strict": fixed(True, note="an export is always checked"),
            "mbridge_config": none(BACKENDS["megatron"]),
        },
    )


def backends(old: str) -> Rules:
    """The training backends verl has and we do not."""
    return {f"{old}.{name}.**": none(reason) for name, reason in BACKENDS.items()}


MODEL = "actor_rollout_ref.model"
LORA = "Only the policy has adapters (actor.lora); the critic trains all its parameters."
MEGATRON_LORA = "These are Megatron's adapters: use lora_rank, lora_alpha and target_modules, or actor.lora."
VERL_ALPHA = 16
"""verl's lora_alpha, where it is not given."""
MTP = "There is no multi-token prediction."
FUSED = "There are no fused kernels to choose from: leave it out."


def _unsupported() -> Rules:
    """What a model section of verl may ask for and a model here cannot."""
    return {
        "_target_": class_of_verl,
        "hf_config_path": fixed(None, note="the model's own config", otherwise="Use model.override_config."),
        "use_shm": fixed(False, note="models are read from where they are"),
        "external_lib": fixed(None, note="no library to import", otherwise="Import it in a module of yours."),
        "enable_activation_offload": fixed(
            False, note="no activation offload", otherwise="Use model.enable_gradient_checkpointing."
        ),
        "use_remove_padding": fixed(True, False, note=PACKED),
        "use_liger": fixed(False, note="no Liger kernels", otherwise="There are no Liger kernels: leave it out."),
        "use_fused_kernels": fixed(False, note="no fused kernels", otherwise=FUSED),
        "fused_kernel_options.**": none(FUSED),
        "tiled_mlp.enabled": fixed(False, note="no tiling", otherwise="There is no tiled MLP."),
        "tiled_mlp.num_shards": none("There is no tiled MLP."),
        "lora_rank": fixed(0, None, note="all parameters train", otherwise=LORA),
        "lora_adapter_path": fixed(None, note="no adapter", otherwise=LORA),
        "lora.rank": fixed(0, None, note="all parameters train", otherwise=MEGATRON_LORA),
        "lora_alpha": none(LORA),
        "target_modules": none(LORA),
        "exclude_modules": none(LORA),
        "lora.**": none(MEGATRON_LORA),
        "mtp.enable": fixed(False, note="no multi-token prediction", otherwise=MTP),
        "mtp.**": none(MTP),
    }


def _lora(section: str) -> Rules:
    """The policy's adapters: keys of its model section in verl, and of `actor.lora` here."""

    def rank(value: Any, look: LookUp) -> Conversion:
        if not value:
            return NotNeeded("all parameters train")
        alpha = look(f"{section}.lora_alpha")
        return Converted(value, also={} if alpha else {"actor.lora.alpha": VERL_ALPHA})

    def with_rank(convert: Convert) -> Convert:
        def convert_if_used(value: Any, look: LookUp) -> Conversion:
            if not look(f"{section}.lora_rank", 0):
                return NotNeeded("no adapters: lora_rank is not given")
            return NotNeeded("not given") if value in (None, [], "") else convert(value, look)

        return convert_if_used

    names = with_rank(lambda value, look: Converted([value] if isinstance(value, str) else value))
    return {
        "lora_rank": to("actor.lora.r", convert=rank),
        "lora_alpha": to("actor.lora.alpha", convert=with_rank(lambda value, look: Converted(value))),
        "target_modules": to("actor.lora.target_modules", convert=names),
        "exclude_modules": to("actor.lora.exclude_modules", convert=names),
        "lora_adapter_path": to("model.adapter", convert=unless_null("no adapter")),
    }


def critic_model() -> Rules:
    """The critic's own model section: a path; the rest is the policy's."""
    return under(
        "critic.model",
        _unsupported()
        | {
            "path": to("critic.path"),
            "tokenizer_path": ignored("the critic reads the policy's token ids"),
            "custom_chat_template": ignored("the critic reads the policy's token ids"),
            "trust_remote_code": to("model.trust_remote_code"),
            "override_config": fixed(
                {}, None, note="nothing to override", otherwise="Only model.override_config exists."
            ),
            "override_config.**": none("Only the policy's model can be overridden: model.override_config."),
            "enable_gradient_checkpointing": to("model.enable_gradient_checkpointing"),
        },
    )


MODEL_RULES: Rules = (
    moved(MODEL, "model", "path trust_remote_code enable_gradient_checkpointing override_config.**")
    | moved(MODEL, "model", "tokenizer_path custom_chat_template", convert=unless_null("not given"))
    | under(MODEL, _unsupported() | _lora(MODEL))
    | under("model", _unsupported() | _lora("model"))
    | under(
        "model",
        dict.fromkeys(
            ("path", "tokenizer_path", "trust_remote_code", "custom_chat_template", "enable_gradient_checkpointing"),
            same(),
        ),
    )
    | {"model.override_config.**": same()}
    | nones("actor_rollout_ref", "nccl_timeout", "Collectives may take as long as trainer.rank_timeout_s.")
    | {
        "actor_rollout_ref.hybrid_engine": fixed(
            True, False, note="rollout.nnodes says whether rollout and trainer share devices"
        )
    }
)


ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
DYNAMIC = f"{ACTOR}.use_dynamic_bsz"

GLOBAL_MICRO_BATCH = (
    "A micro batch is a number of tokens per GPU: give actor.ppo_max_token_len_per_gpu"
    " (or ref.log_prob_max_token_len_per_gpu, critic.ppo_max_token_len_per_gpu)."
)
TOKENS = "micro batches are always packed up to a number of tokens"
LOSSES = "vanilla gspo sapo dppo_tv dppo_kl cispo gpg geo_mean kl_cov clip_cov"

_losses = by_table(
    {name: name for name in LOSSES.split()}
    | {
        "clip-cov": Converted("clip_cov", "clip-cov is written clip_cov"),
        "kl-cov": Converted("kl_cov", "kl-cov is written kl_cov"),
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
    "entropy_from_logits_with_chunking": fixed(False, note="no chunking", otherwise=WHOLE_ENTROPY),
    "entropy_from_logits_chunk_size": none(WHOLE_ENTROPY),
    "entropy_checkpointing": fixed(False, note="no recomputation of entropy", otherwise=WHOLE_ENTROPY),
    "pad_to_length": fixed(False, note=PACKED),
    "ulysses_sequence_parallel_size": fixed(1, note="no sequence parallelism", otherwise=ULYSSES),
    "use_torch_compile": none(COMPILED),
    "profiler.**": none(PROFILER),
}

ACTOR_RULES: Rules = (
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
    | sharding(f"{ACTOR}.fsdp_config", "actor", "Actor", to("actor.model_dtype", convert=dtype))
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
    | sharding(f"{REF}.fsdp_config", "ref", "Ref", none("The reference policy has one dtype: give ref.dtype."))
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
