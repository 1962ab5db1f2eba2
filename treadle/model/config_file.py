"""Model config file: what `config.json` says of a model that a run must know before torch is loaded.

Owns two findings: weights that are stored quantized, which treadle neither trains nor computes with, and a balancing
loss that a mixture of experts was trained with, which it does not have. Reads the file alone: what a run overrides
(`model.override_config`) does not change how weights are stored.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.config.rollout import ModelConfig
from treadle.errors import ConfigError, Mistake

BALANCING_LOSSES = ("router_aux_loss_coef", "aux_loss_coef", "aux_loss_alpha")
"""Coefficients of the loss that keeps experts evenly used, as families name them."""

_DEQUANTIZERS = {
    "mxfp4": "Mxfp4Config",
    "fp8": "FineGrainedFP8Config",
    "compressed-tensors": "CompressedTensorsConfig",
}
"""Of transformers, with `dequantize=True`: methods whose weights it can turn back."""


def refuse_quantized(model: ModelConfig, directory: Path) -> None:
    """A ConfigError where the weights in a model's directory are quantized."""
    values = read_config_file(directory)
    found = values.get("quantization_config") or values.get("compression_config")
    if not found:
        return
    method = str(found.get("quant_method", "of an unknown method")) if isinstance(found, Mapping) else str(found)
    problem = f"the weights in {directory} are quantized ({method}); treadle trains and computes with plain ones alone"
    fix = "give the model that was quantized, in bf16 or fp32; rollout.name=vllm samples from this one without training"
    if (dequantizer := _DEQUANTIZERS.get(method)) is not None:
        fix = (
            f"give a copy with plain weights: AutoModelForCausalLM.from_pretrained({str(directory)!r}, "
            f"quantization_config=transformers.{dequantizer}(dequantize=True)).save_pretrained(DIRECTORY), with its "
            "tokenizer"
        )
    raise ConfigError([Mistake("model.path", problem, model.path, model.origin("path"), fix)])


def describe_balancing_loss(model: ModelConfig, directory: Path) -> str | None:
    """That a mixture of experts has a balancing loss which training leaves out; None where it has none."""
    values = {**read_config_file(directory), **model.override_config}
    for name in BALANCING_LOSSES:
        value = values.get(name)
        if isinstance(value, int | float) and value > 0:
            return (
                f"{name} {value:g} of the model is not used: the loss is the policy's alone, and nothing keeps the "
                f"router from favouring few experts; model.override_config={{{name}: 0}} says that this is known"
            )
    return None


def read_config_file(directory: Path) -> Mapping[str, Any]:
    """The values of `config.json`; none where there is no such file, which loading tells better."""
    try:
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
