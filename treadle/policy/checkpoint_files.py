"""Checkpoint files of a network: a Hugging Face model, and under `training/` what only training needs.

    config.json, generation_config.json, model.safetensors …    loadable by transformers and vLLM
    training/policy.json                                        version, Python's random state
    training/optimizer.safetensors                              moments by parameter; from several ranks, as `shards`
    training/rng.safetensors                                    torch's random states
    training/critic/                                            the critic's weights and moments, likewise
    training/reference/                                         the reference's weights, once it has followed the policy

Owns names and contents; the caller makes files appear all at once. The learning-rate schedule has no state but the
version. Engines read every safetensors file beside config.json as weights, so ours are in a folder of their own.
Invariant: what one number of ranks wrote, any other number reads.
"""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.config.rollout import ModelConfig
from treadle.errors import RunError
from treadle.model.load import load_causal_model, without_progress_bar
from treadle.policy.optimizer import MasterWeights, Optimizer
from treadle.policy.shard_files import WHOLE_FILE, ShardFile, ShardReader, local_row_range, local_rows, save_shards

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINING = "training"


def save_model(directory: Path, module: "PreTrainedModel", weights: MasterWeights) -> None:
    """The model alone, as transformers writes it, with its weights in full."""
    full = {id(parameter): weights.full.get(name, parameter).detach() for name, parameter in module.named_parameters()}
    state = {name: full.get(id(value), value) for name, value in module.state_dict(keep_vars=True).items()}
    with without_progress_bar():
        module.save_pretrained(directory, state_dict=state)


def load_model(directory: Path, model: ModelConfig, weights: MasterWeights) -> None:
    """Take the weights from a model in `directory`, in place."""
    dtype = next(iter(weights.full.values())).dtype
    here = ModelConfig(**{**model.values(), "path": str(directory), "adapter": None})
    stored = load_causal_model(here, dtype=dtype, device=torch.device("cpu"), longest=1)  # nothing is computed with it
    copy_weights(dict(stored.named_parameters()), weights, directory)


@torch.no_grad()
def copy_weights(stored: Mapping[str, Tensor], weights: MasterWeights, directory: Path) -> None:
    """Write stored weights over those in use, whose tensors stay the same objects: an engine may share them."""
    check_same_model(shapes_of(stored.items()), weights.full, directory)
    for name, parameter in weights.full.items():
        parameter.copy_(stored[name])
    weights.publish()


def save_training(
    directory: Path, optimizer: Optimizer, version: int, device: torch.device, part: ShardFile = WHOLE_FILE
) -> None:
    """What a policy needs beside its model to train on."""
    training = directory / TRAINING
    training.mkdir(parents=True, exist_ok=True)
    save_shards(training, "optimizer", optimizer.state(), part)
    if part.writes and part.index == 0:
        save_file(_torch_rng(device), training / "rng.safetensors")
        save_json(training / "policy.json", {"version": version, "random": random.getstate()})


def restore_training(directory: Path, optimizer: Optimizer, device: torch.device) -> int:
    """Take moments and random states from `directory`; returns the version."""
    training = directory / TRAINING
    optimizer.restore(ShardReader(training, "optimizer"))
    _restore_torch_rng(load_file(training / "rng.safetensors"), device)
    state = json.loads((training / "policy.json").read_text(encoding="utf-8"))
    version, words, gauss = state["random"]
    random.setstate((version, tuple(words), gauss))
    return int(state["version"])


def save_critic(directory: Path, optimizer: Optimizer, steps: int, part: ShardFile = WHOLE_FILE) -> None:
    """All of a critic: it is no model that others load."""
    folder = directory / TRAINING / "critic"
    folder.mkdir(parents=True, exist_ok=True)
    save_shards(folder, "model", optimizer.weights.full, part)
    save_shards(folder, "optimizer", optimizer.state(), part)
    if part.writes and part.index == 0:
        save_json(folder / "critic.json", {"steps": steps})


@torch.no_grad()
def restore_critic(directory: Path, optimizer: Optimizer) -> int:
    """Take a critic from `directory`, in place; returns its steps."""
    folder = directory / TRAINING / "critic"
    shards, weights = ShardReader(folder, "model"), optimizer.weights
    check_same_model({name: shards.shape(name) for name in shards.names()}, weights.full, folder)
    for name, parameter in weights.full.items():
        local_rows(parameter).copy_(shards.read(name, local_row_range(parameter)))
    weights.publish()
    optimizer.restore(ShardReader(folder, "optimizer"))
    return int(json.loads((folder / "critic.json").read_text(encoding="utf-8"))["steps"])


def save_reference(directory: Path, parameters: Mapping[str, Tensor], part: ShardFile = WHOLE_FILE) -> None:
    """The weights of a reference policy that is no longer the model it started from."""
    folder = directory / TRAINING / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    save_shards(folder, "model", parameters, part)


@torch.no_grad()
def restore_reference(directory: Path, parameters: Mapping[str, Tensor]) -> bool:
    """Take a reference policy's weights from `directory`, in place, if there are some; whether there were."""
    folder = directory / TRAINING / "reference"
    if not folder.is_dir():
        return False
    shards = ShardReader(folder, "model")
    check_same_model({name: shards.shape(name) for name in shards.names()}, parameters, folder)
    for name, parameter in parameters.items():
        local_rows(parameter).copy_(shards.read(name, local_row_range(parameter)))
    return True


def shapes_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def check_same_model(stored: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor], directory: Path) -> None:
    """Refuse weights of another model, by their names and shapes."""
    here = shapes_of(weights.items())
    if strange := stored.keys() ^ here.keys():
        raise RunError(f"{directory} is of another model: only one of the two has {min(strange)}")
    for name, shape in here.items():
        if stored[name] != shape:
            raise RunError(f"{directory} is of another model: {name} is {stored[name]} there, {shape} here")


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _torch_rng(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def _restore_torch_rng(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
