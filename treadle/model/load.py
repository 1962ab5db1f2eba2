"""Model loading: a Hugging Face decoder from `model.path`, if treadle computes such a model as its authors wrote it.

Owns the way from a directory to a prepared module, and what is refused on it, by the key and with the reason. Knows
nothing of engines, policies and losses.
Invariant: a loaded module has every weight from the checkpoint, and its kind was checked, unless
`model.parity_check` is off.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from treadle.config.rollout import ModelConfig
from treadle.errors import ConfigError, Mistake, nearest
from treadle.model.attention import NAME, register
from treadle.model.causal_lm import prepare_module
from treadle.model.config_file import refuse_quantized
from treadle.model.parity import LOGPROB_TOLERANCE, check_policy_parity, refuse_by_config
from treadle.model.peft_files import merge_adapter, names_adapter
from treadle.model.rope import longest_sequence
from treadle.model.tokenizer import resolve_model_path

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)


def load_causal_model(
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    longest: int | None = None,
    merge: bool = True,
) -> "PreTrainedModel":
    """The decoder in `model.path`, whole, on `device`; a ConfigError that names the key where that cannot be.

    `merge`: with `model.adapter`, where there is one, merged into its weights.
    `longest`: tokens of the longest sequence that it will read. None: as many as there are, of a kind that was checked
    elsewhere; models whose rope depends on the length are refused then.
    """
    directory = resolve_model_path(model.path, origin=model.origin("path"))
    config = load_model_config(model, directory)
    refuse_quantized(model, directory)
    if longest is not None:
        check_length(config, longest)
        _require_parity(model, config, longest)
    module: Any = _load_weights(model, directory, config, dtype)
    if merge and model.adapter is not None:
        merge_adapter(module, model)
    return prepare_module(module.to(device), longest)


def check_length(config: "PreTrainedConfig", longest: int) -> None:
    """Refuse sequences that are longer than a model is made for."""
    limit = longest_sequence(config)
    if limit is not None and longest > limit:
        problem = f"sequences of {longest:,} tokens, but {type(config).__name__} is made for {limit:,}"
        fix = (
            f"lower rollout.max_model_len, or rollout.prompt_length + response_length, to {limit}; a model that takes "
            "more says so by model.override_config={max_position_embeddings: ...}"
        )
        raise ConfigError([Mistake("rollout.max_model_len", problem, longest, fix=fix)])


def _require_parity(model: ModelConfig, config: "PreTrainedConfig", longest: int) -> None:
    """Refuse a model of a kind that treadle does not compute as its authors wrote it."""
    problem = check_policy_parity(config, longest).problem if model.parity_check else None
    if problem is not None:
        fix = "give another model; model.parity_check=false runs this one unchecked"
        raise ConfigError([Mistake("model.path", problem, model.path, model.origin("path"), fix)])


def shares_prefixes(model: ModelConfig, config: "PreTrainedConfig", longest: int | None) -> bool:
    """Whether networks of this model compute a prefix that several rows share once.

    The parity check tries it, so a model without that check computes every row by itself. `longest` as for loading:
    None for a kind that was checked elsewhere.
    """
    if model.shared_prefix == "off" or not model.parity_check:
        return False
    if longest is None:
        return True
    differs = check_policy_parity(config, longest).shared
    if differs is None or differs > LOGPROB_TOLERANCE:
        found = "it fails" if differs is None else f"logprobs differ by {differs:.2g} nats"
        log.warning("%s: rows do not share prefixes, as model.shared_prefix=auto: %s", type(config).__name__, found)
        return False
    return True


def load_model_config(model: ModelConfig, directory: Path | None = None) -> "PreTrainedConfig":
    """The config of the model, with `model.override_config` on top, if treadle can run such a model."""
    from transformers import AutoConfig

    directory = directory or resolve_model_path(model.path, origin=model.origin("path"))
    _refuse_adapter(model, directory)
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
    refused = refuse_by_config(config)
    if refused:
        raise _refusal(model, refused)
    return config


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
    return cast("PreTrainedModel", module)


def _refuse_adapter(model: ModelConfig, directory: Path) -> None:
    """A LoRA adapter is no model: say which one it belongs to."""
    base = names_adapter(directory)
    if base is None:
        return
    problem = f"{directory} is a PEFT adapter of {base}, not a model"
    fix = "give the base model as model.path, and this directory as model.adapter"
    raise ConfigError([Mistake("model.path", problem, model.path, model.origin("path"), fix)])


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
