"""`actor_rollout_ref.model`: now `model`. Also `critic.model`, and the `model` section of verl's fine-tuning."""

from treadle.config.legacy.conversion import unless_null
from treadle.config.legacy.rule import Rules, class_of_verl, fixed, ignored, moved, none, nones, same, to, under
from treadle.config.legacy.rules.network import PACKED

MODEL = "actor_rollout_ref.model"
LORA = "There is no LoRA: all parameters train."
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
        "lora.rank": fixed(0, None, note="all parameters train", otherwise=LORA),
        "lora_alpha": none(LORA),
        "target_modules": none(LORA),
        "exclude_modules": none(LORA),
        "lora.**": none(LORA),
        "mtp.enable": fixed(False, note="no multi-token prediction", otherwise=MTP),
        "mtp.**": none(MTP),
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


RULES: Rules = (
    moved(MODEL, "model", "path trust_remote_code enable_gradient_checkpointing override_config.**")
    | moved(MODEL, "model", "tokenizer_path custom_chat_template", convert=unless_null("not given"))
    | under(MODEL, _unsupported())
    | under("model", _unsupported())
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
