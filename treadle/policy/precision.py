"""A network's weights twice: as they compute, and in full, as they train.

Owns the full copy where computation is in a narrower format, and the way of gradients and weights between the two. An
engine that samples from the module then computes in the same format as training does.
Invariant: gradients add up in full, over any number of micro batches; the module always holds the full weights,
rounded, once `publish` was called after a change.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from treadle.config.actor import Dtype
from treadle.errors import ConfigError, Mistake

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute_dtype(model_dtype: Dtype, dtype: Dtype, key: str) -> torch.dtype:
    """The number format of the computation; `key` is the section that chose both."""
    if model_dtype == "bf16" and dtype == "fp32":
        problem = f"fp32, but {key}.model_dtype is bf16: wider arithmetic cannot bring back what the weights lost"
        raise ConfigError(
            [Mistake(f"{key}.dtype", problem, dtype, fix=f"use bf16 for both, or {key}.model_dtype=fp32")]
        )
    return DTYPES[dtype]


class Weights:
    """Named weights. `full` is what an optimizer moves; where formats agree it is the module's own."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], compute: torch.dtype) -> None:
        self.full = {name: _fill(parameter, compute) for name, parameter in parameters.items()}
        self._computing = dict(parameters)

    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Weights that compute as they are."""
        self.full |= parameters
        self._computing |= parameters

    @torch.no_grad()
    def publish(self) -> None:
        """Round the full weights into the module, in place."""
        for name, parameter in self._computing.items():
            if parameter is not self.full[name]:
                parameter.copy_(self.full[name])


def _fill(parameter: nn.Parameter, compute: torch.dtype) -> nn.Parameter:
    """The full twin of a parameter, which is narrowed; itself where it computes as it is."""
    if parameter.dtype == compute:
        return parameter
    full = nn.Parameter(parameter.detach().clone())
    parameter.data = parameter.data.to(compute)

    def move_gradient(narrow: Tensor) -> None:
        assert narrow.grad is not None, "called when a gradient is there"
        if full.grad is None:
            full.grad = narrow.grad.to(full.dtype)
        else:
            full.grad += narrow.grad
        narrow.grad = None

    parameter.register_post_accumulate_grad_hook(move_gradient)  # type: ignore[no-untyped-call]
    return full
