"""A model that is cut over ranks as a Hugging Face directory, written by the first rank as the weights come in.

Owns the files: a few GB each, so that the writer holds one file's weights at a time. Where a family's files have other
names or shapes than its parameters, transformers must see all weights at once, and the writer holds them.
Every rank goes through all weights, whoever writes.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from treadle.model.load import without_progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE_BYTES = 2**32
"""Weights of one file; a single one may be larger."""


def write_model(
    directory: Path, module: "PreTrainedModel", weights: Iterator[tuple[str, Tensor]], *, is_writer: bool
) -> None:
    """Write `weights`, whole and by name, as a model of `module`'s kind. `module` itself may be cut."""
    if not is_writer:
        for _ in weights:
            pass
    elif _names_are_kept(module):
        _write_config(directory, module)
        _write_weights(directory, chain(weights, _persistent_buffers(module)))
    else:
        state = {name: tensor.cpu() for name, tensor in weights}
        with without_progress_bar():
            module.save_pretrained(directory, state_dict=state)


def _names_are_kept(module: "PreTrainedModel") -> bool:
    """Whether files of this family hold the parameters as they are."""
    from transformers.core_model_loading import revert_weight_conversion

    blank = {name: torch.empty(tensor.shape, device="meta") for name, tensor in module.named_parameters()}
    found = revert_weight_conversion(module, dict(blank))
    return {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in blank.items()
    }


def _write_config(directory: Path, module: "PreTrainedModel") -> None:
    """What transformers writes beside the weights."""
    from transformers.dynamic_module_utils import custom_object_save

    directory.mkdir(parents=True, exist_ok=True)
    config: Any = module.config
    config.dtype = str(module.dtype).removeprefix("torch.")
    config.architectures = [type(module).__name__]
    if module.is_remote_code():
        custom_object_save(module, directory, config=config)
    config.save_pretrained(directory)
    if module.can_generate():
        module.generation_config.save_pretrained(directory)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What else a model's files hold; every rank has it whole."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.removeprefix(f"{prefix}.") not in part._non_persistent_buffers_set:
                yield name, buffer


def _write_weights(directory: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """One file, or numbered ones with an index; their number is known when all are there."""
    files: list[tuple[Path, list[str]]] = []
    held: dict[str, Tensor] = {}
    total = 0
    for name, tensor in weights:
        total += _size(tensor)
        if held and sum(map(_size, held.values())) + _size(tensor) > FILE_BYTES:
            files.append(_write_file(directory, held, len(files)))
            held = {}
        held[name] = tensor.cpu().contiguous()
    files.append(_write_file(directory, held, len(files)))
    _name_files(directory, files, total)


def _write_file(directory: Path, tensors: dict[str, Tensor], number: int) -> tuple[Path, list[str]]:
    path = directory / f"model-{number}.partial"
    save_file(tensors, path, {"format": "pt"})
    return path, list(tensors)


def _name_files(directory: Path, files: list[tuple[Path, list[str]]], total: int) -> None:
    if len(files) == 1:
        files[0][0].rename(directory / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, (path, names) in enumerate(files, start=1):
        target = directory / f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(target)
        places |= dict.fromkeys(names, target.name)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
