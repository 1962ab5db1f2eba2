"""AdamW with clipped gradients and a schedule.

Owns the moments and their names in a file. Knows no network beyond its named parameters, and no loss.
Invariant: a gradient that is not finite never reaches the weights.
"""

from collections.abc import Mapping
from math import isfinite

import torch
from torch import Tensor, nn

from treadle.config.actor import OptimConfig
from treadle.errors import RunError
from treadle.policy.precision import Weights
from treadle.policy.schedule import learning_rate


class Optimizer:
    """One network's optimizer. `name` is its section, for errors and metrics."""

    def __init__(self, name: str, weights: Weights, optim: OptimConfig, grad_clip: float, total_steps: int) -> None:
        self.name = name
        self.weights = weights
        self._parameters = weights.full
        self._optim = optim
        self._grad_clip = grad_clip
        self._total_steps = total_steps
        self._adamw = torch.optim.AdamW(
            self._parameters.values(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )

    def learning_rate(self, step: int) -> float:
        """The learning rate of training step `step`, counted from 1."""
        return learning_rate(self._optim, step, self._total_steps)

    def step(self, step: int) -> float:
        """Move the weights by the gradients that have come together, then forget those. Returns their norm."""
        norm = float(nn.utils.clip_grad_norm_(self._parameters.values(), self._grad_clip))
        if not isfinite(norm):
            worst = next((name for name, grad in self._gradients() if not grad.isfinite().all()), "their sum")
            self._adamw.zero_grad()
            raise RunError(
                f"{self.name}: the gradient of training step {step} is {norm} (first in {worst}). The weights are as "
                f"before it; lower {self.name}.optim.lr, or look for extreme rewards in this step's trajectories"
            )
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate(step)
        self._adamw.step()
        self._adamw.zero_grad()
        self.weights.publish()
        return norm

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

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take the moments from an earlier `state`."""
        self._adamw.state.clear()
        for joined, value in state.items():
            name, _, kind = joined.rpartition(".")
            parameter = self._parameters[name]
            # The step count lives where the fused kernel reads it: beside the parameter.
            self._adamw.state[parameter][kind] = value.to(parameter.device, copy=True)

    def clear(self) -> None:
        """Free moments and gradients."""
        self._adamw.zero_grad()
        self._adamw.state.clear()
