"""Optimizer: AdamW on fp32 master weights, gradient clipping, learning-rate schedule.

Owns the moments and their names in a file, the master copy where the model computes in a narrower dtype, and the way of
gradients and weights between the two. Knows no network beyond its named parameters, and no loss. Parameters may be
sharded over ranks: then so are gradients and moments, and every rank steps at once.

The learning rate is pure arithmetic on the number of the training step, counted from 1. Warm-up rises in equal parts
and reaches the peak at its last step; decay starts after it (`wsd`: so that the given fraction of all steps is left),
and would touch its lowest point one step after the last.
Invariant: a gradient that is not finite never reaches the weights or the moments. Such an update is skipped, on every
rank alike, as all of them see the same norm; too many in a row end the run. Gradients add up in full precision over any
number of micro batches; after `publish` the module holds the master weights, rounded.
"""

import logging
from collections.abc import Mapping
from math import cos, isfinite, pi

import torch
from torch import Tensor, nn

from treadle.config.training import Dtype, OptimConfig
from treadle.errors import ConfigError, Mistake, NotFiniteError
from treadle.policy.shard_files import ShardReader, full_tensor, local_row_range, shard_like


def learning_rate_at(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The learning rate of training step `step`, from 1 to `total_steps`."""
    assert step >= 1, "training steps are counted from 1"
    warmup = warmup_steps(optim, total_steps)
    if step <= warmup:
        return optim.lr * step / warmup
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    start = warmup
    if optim.lr_scheduler_type == "wsd":
        start = max(warmup, total_steps - round(optim.wsd_decay_ratio * total_steps))
    done = min(1.0, max(0, step - 1 - start) / max(1, total_steps - start))
    height = (1 + cos(pi * 2 * optim.num_cycles * done)) / 2 if optim.lr_scheduler_type == "cosine" else 1 - done
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * height)


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """How many steps warm up: as many as are given, or else the given fraction of all."""
    return optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total_steps)


DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute_dtype(model_dtype: Dtype, dtype: Dtype, key: str) -> torch.dtype:
    """The dtype of the computation; `key` is the section that chose both."""
    if model_dtype == "bf16" and dtype == "fp32":
        problem = f"fp32, but {key}.model_dtype is bf16: wider arithmetic cannot bring back what the weights lost"
        raise ConfigError(
            [Mistake(f"{key}.dtype", problem, dtype, fix=f"use bf16 for both, or {key}.model_dtype=fp32")]
        )
    return DTYPES[dtype]


class MasterWeights:
    """Named weights. `full` is what an optimizer moves; where formats agree it is the module's own."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], compute: torch.dtype) -> None:
        self.full = {name: _master_copy(parameter, compute) for name, parameter in parameters.items()}
        self._computing = dict(parameters)

    def add(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Weights that compute as they are."""
        self.full |= parameters
        self._computing |= parameters

    def reduce_gradients(self) -> None:
        """Average gradients over ranks before a step, where FSDP has not done it."""

    @torch.no_grad()
    def publish(self) -> None:
        """Round the full weights into the module, in place."""
        for name, parameter in self._computing.items():
            if parameter is not self.full[name]:
                parameter.copy_(self.full[name])


def _master_copy(parameter: nn.Parameter, compute: torch.dtype) -> nn.Parameter:
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


log = logging.getLogger(__name__)


class Optimizer:
    """One network's optimizer. `name` is its section, for errors and metrics."""

    def __init__(
        self, name: str, weights: MasterWeights, optim: OptimConfig, grad_clip: float, total_steps: int
    ) -> None:
        self.name = name
        self.weights = weights
        self._parameters = weights.full
        self._optim = optim
        self._grad_clip = grad_clip
        self._total_steps = total_steps
        self._skipped = 0
        self._adamw = torch.optim.AdamW(
            self._parameters.values(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )

    def learning_rate(self, step: int) -> float:
        """The learning rate of training step `step`, counted from 1."""
        return learning_rate_at(self._optim, step, self._total_steps)

    def step(self, step: int, lr: float | None = None) -> float:
        """Move the weights by the gradients that have come together, then forget those. Returns their norm.

        `lr` replaces the schedule's learning rate.
        A norm that is not finite means that nothing was moved.
        """
        self.weights.reduce_gradients()
        norm = self._clip()
        if not isfinite(norm):
            self._skip(step, norm)
            return norm
        self._skipped = 0
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate(step) if lr is None else lr
        self._adamw.step()
        self._adamw.zero_grad()
        self.weights.publish()
        return norm

    def _skip(self, step: int, norm: float) -> None:
        """Forget a gradient that is not finite, and end the run if it was one too many."""
        worst = next((name for name, grad in self._gradients() if not full_tensor(grad).isfinite().all()), "their sum")
        self._adamw.zero_grad()
        self._skipped += 1
        limit = self._optim.max_nonfinite_steps
        found = f"{self.name}: the gradient of training step {step} is {norm} (first in {worst})"
        if self._skipped >= limit:
            raise NotFiniteError(
                f"{found}, and {self._skipped} updates in a row were skipped for that: {self.name}.optim."
                f"max_nonfinite_steps is {limit}. The weights are as before them; lower {self.name}.optim.lr, or look "
                "for extreme rewards in these steps' trajectories"
            )
        log.warning("%s: the update is skipped (%d in a row; %d end the run)", found, self._skipped, limit)

    def _clip(self) -> float:
        """Scale gradients down to the norm that is allowed. Returns the norm they had, over all ranks."""
        norm = full_tensor(nn.utils.get_total_norm([grad for _, grad in self._gradients()]))
        nn.utils.clip_grads_with_norm_(self._parameters.values(), self._grad_clip, norm)
        return float(norm)

    def _gradients(self) -> list[tuple[str, Tensor]]:
        pairs = ((name, parameter.grad) for name, parameter in self._parameters.items())
        return [(name, grad) for name, grad in pairs if grad is not None]

    def state(self) -> dict[str, Tensor]:
        """The moments and step counts, by parameter and kind. Not copied."""
        return {
            f"{name}.{kind}": value
            for name, parameter in self._parameters.items()
            for kind, value in self._adamw.state[parameter].items()
        }

    def restore(self, shards: ShardReader) -> None:
        """Take the moments from an earlier `state`, however many ranks wrote it."""
        self._adamw.state.clear()
        for joined in shards.names():
            name, _, kind = joined.rpartition(".")
            parameter = self._parameters[name]
            found = shards.read(joined, local_row_range(parameter))
            # The step count lives where the fused kernel reads it: beside the parameter.
            value = shard_like(found, parameter) if found.dim() else found.to(parameter.device, copy=True)
            self._adamw.state[parameter][kind] = value

    def move(self, device: torch.device) -> None:
        """Bring the moments to `device`. Steps are taken where the parameters are."""
        for state in self._adamw.state.values():
            for kind, value in state.items():
                state[kind] = value.to(device)

    def clear_gradients(self) -> None:
        """Forget gradients that no step has followed."""
        self._adamw.zero_grad()

    def clear(self) -> None:
        """Free moments and gradients."""
        self._adamw.zero_grad()
        self._adamw.state.clear()
