"""The files of a network in a checkpoint: a Hugging Face model, and under `training/` what only training needs.

    config.json, generation_config.json, model.safetensors …    loadable by transformers and vLLM
    training/policy.json                                        version, Python's random state
    training/optimizer.safetensors                              moments by parameter
    training/rng.safetensors                                    torch's random states

Owns names and contents; that files appear all at once is the caller's care. The schedule has no state but the version.
Engines read every safetensors file beside config.json as weights, so ours are in a folder of their own.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.config.model import ModelConfig
from treadle.errors import RunError
from treadle.model.causal import load_causal_model, without_progress_bar
from treadle.policy.optimizer import Optimizer
from treadle.policy.precision import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINING = "training"


def save_model(directory: Path, module: "PreTrainedModel", weights: Weights) -> None:
    """The model alone, as transformers writes it, with its weights in full."""
    full = {id(parameter): weights.full[name].detach() for name, parameter in module.named_parameters()}
    state = {name: full.get(id(value), value) for name, value in module.state_dict(keep_vars=True).items()}
    with without_progress_bar():
        module.save_pretrained(directory, state_dict=state)


def save_policy(directory: Path, module: "PreTrainedModel", optimizer: Optimizer, version: int) -> None:
    """The model, and everything that training on needs."""
    save_model(directory, module, optimizer.weights)
    training = directory / TRAINING
    training.mkdir(parents=True, exist_ok=True)
    save_tensors(training / "optimizer.safetensors", optimizer.state())
    save_tensors(training / "rng.safetensors", _torch_rng(module.device))
    save_json(training / "policy.json", {"version": version, "random": random.getstate()})


def restore_policy(directory: Path, module: "PreTrainedModel", optimizer: Optimizer, model: ModelConfig) -> int:
    """Take weights, moments and random states from `directory`, in place; returns the version."""
    dtype = next(iter(optimizer.weights.full.values())).dtype
    stored = load_causal_model(
        ModelConfig(**{**model.values(), "path": str(directory)}), dtype=dtype, device=torch.device("cpu")
    )
    copy_weights(dict(stored.named_parameters()), optimizer.weights, directory)
    training = directory / TRAINING
    optimizer.restore(load_file(training / "optimizer.safetensors"))
    _restore_torch_rng(load_file(training / "rng.safetensors"), module.device)
    state = json.loads((training / "policy.json").read_text(encoding="utf-8"))
    version, words, gauss = state["random"]
    random.setstate((version, tuple(words), gauss))
    return int(state["version"])


@torch.no_grad()
def copy_weights(stored: Mapping[str, Tensor], weights: Weights, directory: Path) -> None:
    """Write stored weights over those in use, whose tensors stay the same objects for whoever shares them."""
    parameters = weights.full
    if strange := stored.keys() ^ parameters.keys():
        raise RunError(f"{directory} is of another model: only one of the two has {min(strange)}")
    for name, parameter in parameters.items():
        if parameter.shape != stored[name].shape:
            shapes = f"{tuple(stored[name].shape)} there, {tuple(parameter.shape)} here"
            raise RunError(f"{directory} is of another model: {name} is {shapes}")
        parameter.copy_(stored[name])
    weights.publish()


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _torch_rng(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def _restore_torch_rng(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
