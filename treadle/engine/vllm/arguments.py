"""Arguments of vLLM: what the keys of a `rollout` section come to. Imports no vLLM.

Owns the memory of the KV cache on a CPU, and which arguments are ours alone.
"""

import os
from collections.abc import Collection, Mapping
from typing import Any

from treadle.config.rollout import ModelConfig, RolloutConfig
from treadle.errors import ConfigError, Mistake, nearest

_OURS = (
    "model",
    "weight_transfer_config",
    "worker_extension_cls",
    "logits_processors",
    "logprobs_mode",
    "max_logprobs",
)
_EXTENSION = "treadle.engine.vllm.weight_transfer.WorkerExtension"
_CPU_SHARE = 0.25
"""The most of a machine's memory that the KV cache takes on a CPU, where the processes beside it need some too."""

_GRAPHED = 512
"""The largest batch that vLLM captures by itself; larger ones would be launched kernel by kernel."""


def engine_arguments(
    rollout: RolloutConfig, model: ModelConfig, directory: str, *, on_cpu: bool, known: Collection[str]
) -> dict[str, Any]:
    """vLLM's arguments: from the section's keys, then `rollout.engine_kwargs.vllm` as it is.

    `known`: the names of all that this vLLM has.
    """
    extra = rollout.engine_kwargs.get("vllm") or {}
    _refuse_unknown(extra, known)
    dtype = rollout.dtype if rollout.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    arguments: dict[str, Any] = {
        "model": directory,
        "dtype": dtype,
        "seed": rollout.seed,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": dict(model.override_config),
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_model_len": rollout.sequence_length(),
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, rollout.max_num_seqs),
        "enforce_eager": rollout.enforce_eager or on_cpu,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_sleep_mode": rollout.free_cache_engine and not on_cpu,
        "disable_log_stats": True,
        "logprobs_mode": "raw_logprobs" if rollout.temperature in (0.0, 1.0) else "processed_logprobs",
        "weight_transfer_config": {"backend": "treadle"},
        "worker_extension_cls": _EXTENSION,
    }
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(rollout, directory, dtype)
    elif rollout.max_num_seqs > _GRAPHED and "compilation_config" not in extra:
        arguments["max_cudagraph_capture_size"] = rollout.max_num_seqs
    return arguments | dict(extra)


def _refuse_unknown(extra: Mapping[str, Any], known: Collection[str]) -> None:
    mistakes: list[Mistake] = []
    for name, value in extra.items():
        key = f"rollout.engine_kwargs.vllm.{name}"
        if name in _OURS:
            mistakes.append(Mistake(key, "treadle sets this one itself", value, fix="leave it out"))
        elif name not in known:
            problem = f"the vLLM installed has no argument {name!r}"
            mistakes.append(Mistake(key, problem, value, fix=nearest(name, known)))
    if mistakes:
        raise ConfigError(mistakes)


def _cpu_cache_bytes(rollout: RolloutConfig, directory: str, dtype: str) -> int:
    """Room for every sequence at full length, within a share of the machine's memory."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    per_token: int = 2 * config.num_hidden_layers * heads * head * (4 if dtype == "float32" else 2)
    block = 128
    tokens = -(-rollout.sequence_length() // block) * block * (rollout.max_num_seqs + 1)
    limit = int(_CPU_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(tokens * per_token, limit)
