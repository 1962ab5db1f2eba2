"""Loading a Hugging Face decoder, and running it without its output layer.

Owns the way from `model.path` to a module with treadle's attention, and the two halves of a forward: hidden states for
packed tokens, then logits only where somebody asks. Refuses to know about sampling and losses.
Invariant: a loaded module has every weight from the checkpoint and no dropout, so training and sampling compute alike.

Shapes: T packed tokens, V vocabulary.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from treadle.config.model import ModelConfig
from treadle.errors import ConfigError, Mistake, nearest
from treadle.model.attention import NAME, Plan, register
from treadle.model.tokenizer import resolve_model_path

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Kinds of layers that treadle's attention can serve; the rest keep states that are no keys and values."""


def load_causal_model(model: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> "PreTrainedModel":
    """The decoder in `model.path`, whole, on `device`; a ConfigError that names the key where that cannot be."""
    directory = resolve_model_path(model.path, origin=model.origin("path"))
    config = load_model_config(model, directory)
    module: Any = _load_weights(model, directory, config, dtype)
    return prepare_module(module.to(device))


def load_model_config(model: ModelConfig, directory: Path | None = None) -> "PreTrainedConfig":
    """The config of the model, with `model.override_config` on top, if treadle can run such a model."""
    from transformers import AutoConfig

    directory = directory or resolve_model_path(model.path, origin=model.origin("path"))
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(directory), trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise _refusal(model, f"no model config could be loaded from {directory}: {_first_line(error)}") from error
    for name, value in model.override_config.items():
        if not hasattr(config, name):
            problem = f"{type(config).__name__} has no {name!r}"
            fix = nearest(name, vars(config))
            raise ConfigError([Mistake(f"model.override_config.{name}", problem, value, fix=fix)])
        setattr(config, name, value)
    refused = _why_not(config)
    if refused:
        raise _refusal(model, refused)
    return config


def prepare_module(module: "PreTrainedModel") -> "PreTrainedModel":
    """Give a model that was made elsewhere treadle's attention, and take its dropout away."""
    register()
    module.set_attn_implementation(NAME)
    for name in [name for name in vars(module.config) if name.endswith(("dropout", "_pdrop"))]:
        setattr(module.config, name, 0.0)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0  # type: ignore[assignment]
    module.train(False)
    return module


def hidden_states(module: "PreTrainedModel", ids_T: Tensor, positions_T: Tensor, plan: Plan) -> Tensor:
    """The decoder's last hidden state of each token: [T, hidden]."""
    decoder = cast(Any, module).get_decoder()
    out = decoder(
        input_ids=ids_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), use_cache=False, treadle_plan=plan
    )
    return cast(Tensor, out.last_hidden_state[0])


def output_weight(module: "PreTrainedModel") -> Tensor:
    """The matrix from hidden states to logits: [V, hidden]. See `finish_logits` for what follows it."""
    return cast(Tensor, cast(Any, module).get_output_embeddings().weight)


def output_bias(module: "PreTrainedModel") -> Tensor | None:
    """What is added to hidden @ weight.T, in the families that add something: [V]."""
    return cast("Tensor | None", getattr(cast(Any, module).get_output_embeddings(), "bias", None))


def finish_logits(module: "PreTrainedModel", logits: Tensor) -> Tensor:
    """What some families do to hidden @ weight.T + bias: a scale (Granite, Cohere), a soft cap (Gemma 2)."""
    config = module.config
    divisor, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    if divisor:
        logits = logits / divisor
    if factor:
        logits = logits * factor
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def compute_logits(module: "PreTrainedModel", hidden: Tensor, *, wide: bool = False) -> Tensor:
    """Logits of hidden states: [..., V]. `wide`: in float32 where a GPU can, as training has them; no gradients."""
    weight, bias = output_weight(module), output_bias(module)
    if not wide or hidden.dtype == torch.float32 or not hidden.is_cuda:
        return finish_logits(module, nn.functional.linear(hidden, weight, bias))
    logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return finish_logits(module, logits if bias is None else logits.add_(bias))


def _load_weights(
    model: ModelConfig, directory: Path, config: "PreTrainedConfig", dtype: torch.dtype
) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    register()
    loader: Any = AutoModelForCausalLM
    try:
        with warnings.catch_warnings(), without_progress_bar():
            warnings.simplefilter("ignore")
            module, report = loader.from_pretrained(
                str(directory),
                config=config,
                dtype=dtype,
                attn_implementation=NAME,
                trust_remote_code=model.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise _refusal(model, f"no weights could be loaded from {directory}: {_first_line(error)}") from error
    absent = sorted(report["missing_keys"]) + sorted(str(item) for item in report.get("mismatched_keys", ()))
    if absent:
        raise _refusal(model, f"{directory} lacks {len(absent)} weights of the model, such as {absent[0]}")
    if not module._supports_attention_backend:
        raise _refusal(model, f"{type(module).__name__} does not let its attention be replaced")
    if any(name.endswith("sinks") for name, _ in module.named_parameters()):
        raise _refusal(model, f"{type(module).__name__} has attention sinks, which treadle's attention does not know")
    return cast("PreTrainedModel", module)


def _why_not(config: "PreTrainedConfig") -> str | None:
    """Why treadle cannot run such a model, if it cannot."""
    kind = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        return f"{kind} is an encoder and decoder; treadle runs decoders only"
    if getattr(config, "text_config", None) is not None:
        return f"{kind} is a model of several modalities; treadle runs text decoders only"
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        return f"{kind} has layers of kind {', '.join(sorted(others))}; treadle runs attention layers only"
    return None


def _refusal(model: ModelConfig, problem: str) -> ConfigError:
    fix = "give a directory with config.json and the safetensors of a Llama, Qwen, SmolLM or Gemma class decoder"
    return ConfigError([Mistake("model.path", problem, model.path, model.origin("path"), fix)])


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Transformers draws one for every load and save, over whatever is on the terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
