"""Small models with seeded random weights, of the families that treadle runs."""

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 96

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2")


def tiny(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model that says something different after every prompt."""
    torch.manual_seed(seed)
    sizes = _SIZES | changes
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    capped = {"sliding_window": 12, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
    return Gemma2ForCausalLM(Gemma2Config(**sizes | capped | layers)).eval()
