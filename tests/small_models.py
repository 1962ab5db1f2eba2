"""Small configs of families that treadle runs or refuses, with the features that make them special switched on."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * at for at in range(48)],
    "long_factor": [2.0 + 0.5 * at for at in range(48)],
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-longrope": (
        "phi3",
        {
            "rope_parameters": _LONG | {"original_max_position_embeddings": 4096},
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 131072,
        },
    ),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    "qwen2_moe-window": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 12}),
    "phimoe-window": ("phimoe", {"sliding_window": 2047}),
    "phimoe-longrope": (
        "phimoe",
        {
            "rope_parameters": {
                **_LONG,
                "short_factor": [1.0] * 64,
                "long_factor": [2.0] * 64,
                "original_max_position_embeddings": 4096,
                "short_mscale": 1.2,
                "long_mscale": 1.3,
            },
            "max_position_embeddings": 131072,
        },
    ),
    "deepseek_v2": ("deepseek_v2", {"num_experts_per_tok": 6, "n_routed_experts": 64, "n_group": 1, "topk_group": 1}),
    "lfm2": ("lfm2", {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 128}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"head_dim": 128}),
    "ministral": ("ministral", {"head_dim": 128}),
    "dots1": ("dots1", {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6}),
    "bert-decoder": ("bert", {"is_decoder": True}),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 2048,
            },
            "max_position_embeddings": 8192,
        },
    ),
    "nemotron": ("nemotron", {"head_dim": 128, "num_key_value_heads": 8}),
}


def make_config(name: str) -> PreTrainedConfig:
    """By a name from above, or of transformers' own defaults for a family."""
    family, changes = CONFIGS.get(name, (name, {}))
    config: PreTrainedConfig = AutoConfig.for_model(family, **changes)
    return config
