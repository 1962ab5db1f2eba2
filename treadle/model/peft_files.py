"""PEFT adapter files: `adapter_config.json` and `adapter_model.safetensors`, as the peft package reads and writes them.

Owns the layout, and what is refused on the way in: only plain LoRA of linear modules, one rank for all. What a config
says beyond that (DoRA, patterns of ranks, trained biases, whole modules, inits that change the frozen weights) would
load and mean another model, so it is named. Knows no optimizer and no checkpoint of a run.
Invariant: what is written loads in peft, and gives the same merged weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from treadle.config.rollout import ModelConfig
from treadle.config.section import Origin
from treadle.errors import ConfigError, Mistake
from treadle.model.causal_lm import untie_output_layer
from treadle.model.lora import LoraSettings, linear_modules, merge_factors, shortest_names
from treadle.model.tokenizer import resolve_model_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
KEY = "model.adapter"
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"

_READ = ("peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights")
_HARMLESS = (
    *("task_type", "base_model_name_or_path", "target_modules", "exclude_modules", "lora_dropout", "inference_mode"),
    *("revision", "peft_version", "auto_mapping", "megatron_core", "layers_to_transform", "layers_pattern"),
    *("runtime_config", "qalora_group_size", "eva_config", "ensure_weight_tying"),
)
"""What changes nothing about the merged weights: the tensors say which modules there are."""
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Inits that leave the frozen weights as they are; others (PiSSA, OLoRA, LoftQ, CorDA) may have changed them."""


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter as its files have it: the factors of each module, by the module's name."""

    settings: LoraSettings
    factors: Mapping[str, tuple[Tensor, Tensor]]
    """down: [r, in], and up: [out, r]; fp32."""
    base: str | None
    """The model that it says it belongs to."""


def read_adapter(path: str, key: str = KEY, origin: Origin | None = None) -> StoredAdapter:
    """The adapter in a directory; a ConfigError that names what treadle cannot merge or train."""
    directory = resolve_model_path(path, key, origin)

    def refusal(problem: str, fix: str | None = None) -> ConfigError:
        return ConfigError([Mistake(key, problem, path, origin, fix)])

    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        assert isinstance(config, dict), "PEFT writes an object"
        tensors = load_file(directory / WEIGHTS_FILE)
    except (OSError, ValueError, AssertionError, SafetensorError) as error:
        problem = f"no PEFT adapter could be read from {directory}: {next(iter(str(error).splitlines()), 'empty')}"
        raise refusal(problem, f"give a directory with {CONFIG_FILE} and {WEIGHTS_FILE}") from error
    if unknown := _refuse_config(config):
        raise refusal(
            f"{directory / CONFIG_FILE} has {unknown}, which treadle does not do",
            "merge it with peft (merge_and_unload), and give the merged model as model.path",
        )
    settings = LoraSettings(int(config["r"]), float(config["lora_alpha"]), bool(config.get("use_rslora")))
    factors, strange = _pair_factors(tensors)
    if strange or not factors:
        raise refusal(f"{directory / WEIGHTS_FILE} has {strange or 'no factors'}, which is not part of a plain LoRA")
    return StoredAdapter(settings, factors, config.get("base_model_name_or_path"))


def _refuse_config(config: Mapping[str, Any]) -> str | None:
    """What a config has that is not plain LoRA; None where there is nothing."""
    if config.get("peft_type") != "LORA":
        return f"peft_type {config.get('peft_type')!r}"
    if config.get("bias", "none") != "none":
        return f"bias {config['bias']!r}"
    init = config.get("init_lora_weights", True)
    if not any(init == plain and type(init) is type(plain) for plain in _PLAIN_INITS):
        return f"init_lora_weights {init!r}"
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            return f"{name} {value!r}"
    for name, value in config.items():
        if value and name not in _READ and name not in _HARMLESS:
            return f"{name} {value!r}"
    return None


def _pair_factors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, tuple[Tensor, Tensor]], str | None]:
    """The two factors of each module, and the first tensor that is neither."""
    factors = {}
    for name, tensor in tensors.items():
        if name.endswith(_DOWN):
            up = tensors.get(name.removesuffix(_DOWN) + _UP)
            if up is None:
                return {}, f"{name} without {_UP.removeprefix('.')}"
            factors[name.removesuffix(_DOWN).removeprefix(_PREFIX)] = (tensor.float(), up.float())
        elif not name.endswith(_UP) or name.removesuffix(_UP) + _DOWN not in tensors:
            return {}, name
    return factors, None


def check_adapter(
    module: "PreTrainedModel",
    stored: StoredAdapter,
    path: str,
    origin: Origin | None = None,
    linears: Mapping[str, nn.Linear] | None = None,
) -> None:
    """Refuse an adapter whose modules or shapes are not those of a model: of `linears`, or of those that can train."""
    linears, r = linears or linear_modules(module), stored.settings.r
    of = f"; it says that it belongs to {stored.base}" if stored.base else ""
    for name, (down, up) in stored.factors.items():
        found = linears.get(name)
        problem = None
        if found is None:
            problem = f"{type(module).__name__} has no linear module {name}{of}"
        elif tuple(down.shape) != (r, found.in_features) or tuple(up.shape) != (found.out_features, r):
            wanted = f"[{r}, {found.in_features}] and [{found.out_features}, {r}]"
            problem = f"{name} has factors of {list(down.shape)} and {list(up.shape)}, but the model needs {wanted}{of}"
        if problem is not None:
            raise ConfigError([Mistake(KEY, problem, path, origin, "give the model that the adapter was trained on")])


@torch.no_grad()
def merge_adapter(module: "PreTrainedModel", model: ModelConfig) -> None:
    """Merge `model.adapter` into the weights of a loaded model, in place."""
    stored, linears = prepare_merge(module, model)
    for name, (down, up) in stored.factors.items():
        weight = linears[name].weight
        weight.copy_(merge_factors(weight, down, up, stored.settings.scale))


def prepare_merge(module: "PreTrainedModel", model: ModelConfig) -> tuple[StoredAdapter, dict[str, nn.Linear]]:
    """`model.adapter` and the modules that it may change. An output layer that it changes has its own weight then.

    A module without memory gets the parameters of the merged one so.
    """
    assert model.adapter is not None, "there is one"
    origin = model.origin("adapter")
    stored = read_adapter(model.adapter, KEY, origin)
    linears = linear_modules(module)
    output = {name for name in stored.factors.keys() - linears.keys() if _is_output_layer(module, name)}
    if output and (layer := untie_output_layer(module)) is not None:
        linears |= dict.fromkeys(output, layer)
    check_adapter(module, stored, model.adapter, origin, linears)
    return stored, linears


def _is_output_layer(module: "PreTrainedModel", name: str) -> bool:
    return dict(module.named_modules()).get(name) is cast(Any, module).get_output_embeddings()


def write_adapter(directory: Path, module: "PreTrainedModel", stored: StoredAdapter) -> None:
    """Write an adapter of `module` as peft does."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = stored.settings
    alpha = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": stored.base,
        "r": settings.r,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": settings.use_rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": shortest_names(list(stored.factors), list(linear_modules(module))),
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {}
    for name, (down, up) in stored.factors.items():
        tensors[f"{_PREFIX}{name}{_DOWN}"] = down.detach().cpu().contiguous()
        tensors[f"{_PREFIX}{name}{_UP}"] = up.detach().cpu().contiguous()
    save_file(tensors, directory / WEIGHTS_FILE, {"format": "pt"})


def names_adapter(directory: Path) -> str | None:
    """The base model of a directory that holds an adapter and no model; None where it is no such directory."""
    if not (directory / CONFIG_FILE).exists() or (directory / "config.json").exists():
        return None
    try:
        base = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    return cast(str, base) or "a base model that it does not name"
