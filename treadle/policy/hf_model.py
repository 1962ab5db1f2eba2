"""Hugging Face model directories of a sharded model: loaded over all ranks, exported by the first.

Loading: the first rank reads the model into its CPU memory and broadcasts it parameter by parameter; other ranks hold
no more than their own rows and one parameter in flight. Every rank ends with its rows as in the files, bit for bit.
Export: files of a few GB each, so that the writer holds one file's weights at a time. Where a model family's files have
other names or shapes than its parameters, transformers must see all weights at once, and the writer holds them. Every
rank goes through all weights, also those that write nothing.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import broadcast, broadcast_object_list, get_rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from treadle.config.rollout import ModelConfig
from treadle.errors import RunError, TreadleError
from treadle.model.causal_lm import prepare_module
from treadle.model.config_file import refuse_quantized
from treadle.model.load import load_causal_model, load_model_config, without_progress_bar
from treadle.model.peft_files import prepare_merge
from treadle.model.tokenizer import resolve_model_path
from treadle.policy.shard_files import local_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_meta_model(
    model: ModelConfig, dtype: torch.dtype, longest: int | None = None, *, merge: bool = True
) -> PreTrainedModel:
    """The module of a model, with no memory behind its weights. `merge`: as in `load_causal_model`."""
    directory = resolve_model_path(model.path, origin=model.origin("path"))
    config = load_model_config(model, directory)
    refuse_quantized(model, directory)
    builder: Any = AutoModelForCausalLM
    with torch.device("meta"):
        module = builder.from_config(config, dtype=dtype, trust_remote_code=model.trust_remote_code)
    if merge and model.adapter is not None:
        prepare_merge(module, model)
    return prepare_module(module, longest)


def load_on_first_rank(
    model: ModelConfig,
    dtype: torch.dtype,
    longest: int | None = None,
    *,
    merge: bool = True,
    check: Callable[[PreTrainedModel], None] | None = None,
) -> PreTrainedModel | None:
    """The whole model on the first rank's CPU, once it passed `check`; None on the others. Fails on all or on none.

    `merge`: as in `load_causal_model`.
    """
    source: PreTrainedModel | None = None
    trouble: list[TreadleError | None] = [None]
    if get_rank() == 0:
        try:
            device = torch.device("cpu")
            source = load_causal_model(model, dtype=dtype, device=device, longest=longest, merge=merge)
            if check is not None:
                check(source)
        except TreadleError as error:
            trouble = [error]
    broadcast_object_list(trouble, 0)
    if trouble[0] is not None:
        raise trouble[0]
    return source


@torch.no_grad()
def scatter_weights(source: nn.Module | None, target: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Bring the weights and buffers of `source`, which the first rank holds, into the sharded `target`.

    A RunError on every rank where the two have other weights: what is not asked for would be lost.
    """
    weights = dict(source.named_parameters()) if source is not None else {}
    strange = [sorted(weights.keys() ^ dict(target.named_parameters()).keys())] if source is not None else [[]]
    broadcast_object_list(strange, 0)
    if strange[0]:
        raise RunError(
            f"a sharded model and the one it is loaded from differ: only one of the two models has {strange[0][0]} "
            f"({len(strange[0])} such weights)"
        )
    for name, parameter in target.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        whole = _broadcast_buffer(weights, name, parameter, device)
        local_rows(parameter).copy_(distribute_tensor(whole, mesh, parameter.placements).to_local())
    buffers = dict(source.named_buffers()) if source is not None else {}
    for name, buffer in target.named_buffers():
        if source is not None:
            buffer.copy_(buffers[name])
        broadcast(buffer, 0)


def _broadcast_buffer(weights: Mapping[str, Tensor], name: str, parameter: Tensor, device: torch.device) -> Tensor:
    """What is sent on the first rank, and room for it on the others."""
    if weights:
        return weights[name].detach().to(device)
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=device)


FILE_BYTES = 2**32
"""Weights of one file; a single one may be larger."""


def write_model(
    directory: Path, module: "PreTrainedModel", weights: Iterator[tuple[str, Tensor]], *, is_writer: bool
) -> None:
    """Write `weights`, whole and by name, as a model of `module`'s kind. `module` itself may be sharded."""
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
        total += _num_bytes(tensor)
        if held and sum(map(_num_bytes, held.values())) + _num_bytes(tensor) > FILE_BYTES:
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


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
