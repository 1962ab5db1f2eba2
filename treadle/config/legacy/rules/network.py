"""What actor, reference and critic have in common in verl: sharding, optimizer, checkpoint contents, other backends."""

from typing import Any

from treadle.config.legacy.conversion import number_format, schedule, section_class, unless_null, warmup_steps
from treadle.config.legacy.rule import (
    Answer,
    Look,
    Nothing,
    Refused,
    Rule,
    Rules,
    asked,
    classes,
    fixed,
    moved,
    none,
    nones,
    same,
    to,
    under,
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
ENTROPY = "Entropy is computed over the whole vocabulary at once: leave it out."
ULYSSES = "There is no sequence parallelism: give each GPU a larger token budget or shard with fsdp_config."
CONTENTS = "A checkpoint always holds the weights, optimizer, schedule, random state and data position."

_SHARDING = "fsdp_size reshard_after_forward forward_prefetch param_offload optimizer_offload offload_policy"
_ADAMW = "The optimizer is PyTorch's AdamW: leave it out, or give its lr, betas and weight_decay."
_MUON = "There is no Muon optimizer: the optimizer is AdamW."
_DECAY = (
    "After warm-up the learning rate is constant, linear, a cosine or wsd:"
    " use lr_scheduler_type, min_lr_ratio, num_cycles and wsd_decay_ratio."
)
_PRECISION = "Optimizer state has the number format of the parameters (model_dtype)."


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
                "dtype": to(f"{section}.dtype", convert=number_format),
                "mixed_precision.param_dtype": to(f"{section}.dtype", convert=number_format),
                "mixed_precision.reduce_dtype": none("Gradients are reduced in fp32: leave it out."),
                "mixed_precision.buffer_dtype": none("Buffers keep the number format of the model: leave it out."),
                "strategy": to(f"{section}._target_", convert=section_class(name)),
                "wrap_policy.min_num_params": fixed(0, note="each transformer layer is one shard"),
                "wrap_policy.**": none("Each transformer layer is one shard: leave it out."),
                "use_orig_params": fixed(
                    True, False, note="an option of FSDP1; FSDP2 always keeps the original parameters"
                ),
                "seed": none("The seeds are rollout.seed, data.seed and actor.data_loader_seed: leave it out."),
                "full_determinism": fixed(False, note="PyTorch's own determinism switches are left alone"),
                "ulysses_sequence_parallel_size": fixed(1, note="no sequence parallelism", otherwise=ULYSSES),
                "entropy_from_logits_with_chunking": fixed(False, note="no chunking", otherwise=ENTROPY),
                "entropy_from_logits_chunk_size": none(ENTROPY),
                "entropy_checkpointing": fixed(False, note="no recomputation of entropy", otherwise=ENTROPY),
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


def _plain_adamw(value: Any, look: Look) -> Answer:
    return Nothing("the optimizer is AdamW") if str(value).lower() in ("adamw", "adam") else Refused(_ADAMW)


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


def _whole_checkpoint(value: Any, look: Look) -> Answer:
    whole = isinstance(value, list | tuple) and {"model", "optimizer", "extra"} <= set(map(str, value))
    return Nothing("a checkpoint always holds everything") if whole else Refused(CONTENTS)


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
