"""Weights from a model directory to all ranks, parameter by parameter.

The first rank reads the model into its CPU memory; nobody else ever holds more than its own rows and one parameter in
flight. Ends with every rank's rows as in the files, bit for bit.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import broadcast, broadcast_object_list, get_rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from treadle.config.model import ModelConfig
from treadle.errors import TreadleError
from treadle.model.causal import prepare_module
from treadle.model.load import load_causal_model, load_model_config
from treadle.policy.cut import local


def build_blank(model: ModelConfig, dtype: torch.dtype, longest: int | None = None) -> PreTrainedModel:
    """The module of a model, with no memory behind its weights."""
    config = load_model_config(model)
    builder: Any = AutoModelForCausalLM
    with torch.device("meta"):
        module = builder.from_config(config, dtype=dtype, trust_remote_code=model.trust_remote_code)
    return prepare_module(module, longest)


def load_source(
    model: ModelConfig,
    dtype: torch.dtype,
    longest: int | None = None,
    check: Callable[[PreTrainedModel], None] | None = None,
) -> PreTrainedModel | None:
    """The whole model on the first rank's CPU, once it passed `check`; None on the others. Fails on all or on none."""
    source: PreTrainedModel | None = None
    trouble: list[TreadleError | None] = [None]
    if get_rank() == 0:
        try:
            source = load_causal_model(model, dtype=dtype, device=torch.device("cpu"), longest=longest)
            if check is not None:
                check(source)
        except TreadleError as error:
            trouble = [error]
    broadcast_object_list(trouble, 0)
    if trouble[0] is not None:
        raise trouble[0]
    return source


@torch.no_grad()
def scatter(source: nn.Module | None, target: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Bring the weights and buffers of `source`, which the first rank holds, into the cut `target`."""
    weights = dict(source.named_parameters()) if source is not None else {}
    for name, parameter in target.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not cut"
        whole = _sent(weights, name, parameter, device)
        local(parameter).copy_(distribute_tensor(whole, mesh, parameter.placements).to_local())
    buffers = dict(source.named_buffers()) if source is not None else {}
    for name, buffer in target.named_buffers():
        if source is not None:
            buffer.copy_(buffers[name])
        broadcast(buffer, 0)


def _sent(weights: Mapping[str, Tensor], name: str, parameter: Tensor, device: torch.device) -> Tensor:
    """What is sent on the first rank, and room for it on the others."""
    if weights:
        return weights[name].detach().to(device)
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
