"""AdamW with clipped gradients and a schedule.

Owns the moments and their names in a file. Knows no network beyond its named parameters, and no loss. Parameters may be
cut over ranks: then so are gradients and moments, and every rank steps at once.
Invariant: a gradient that is not finite never reaches the weights or the moments. Such an update is skipped, on every
rank alike, as all of them see the same norm; too many in a row end the run.
"""

import logging
from math import isfinite

import torch
from torch import Tensor, nn

from treadle.config.actor import OptimConfig
from treadle.errors import NotFiniteError
from treadle.policy.cut import like, rows_here, whole
from treadle.policy.pieces import Pieces
from treadle.policy.precision import Weights
from treadle.policy.schedule import learning_rate

log = logging.getLogger(__name__)


class Optimizer:
    """One network's optimizer. `name` is its section, for errors and metrics."""

    def __init__(self, name: str, weights: Weights, optim: OptimConfig, grad_clip: float, total_steps: int) -> None:
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
        return learning_rate(self._optim, step, self._total_steps)

    def step(self, step: int) -> float:
        """Move the weights by the gradients that have come together, then forget those. Returns their norm.

        A norm that is not finite means that nothing was moved.
        """
        norm = self._clip()
        if not isfinite(norm):
            self._skip(step, norm)
            return norm
        self._skipped = 0
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate(step)
        self._adamw.step()
        self._adamw.zero_grad()
        self.weights.publish()
        return norm

    def _skip(self, step: int, norm: float) -> None:
        """Forget a gradient that is not finite, and end the run if it was one too many."""
        worst = next((name for name, grad in self._gradients() if not whole(grad).isfinite().all()), "their sum")
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
        norm = whole(nn.utils.get_total_norm([grad for _, grad in self._gradients()]))
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

    def restore(self, pieces: Pieces) -> None:
        """Take the moments from an earlier `state`, however many ranks wrote it."""
        self._adamw.state.clear()
        for joined in pieces.names():
            name, _, kind = joined.rpartition(".")
            parameter = self._parameters[name]
            found = pieces.read(joined, rows_here(parameter))
            # The step count lives where the fused kernel reads it: beside the parameter.
            value = like(found, parameter) if found.dim() else found.to(parameter.device, copy=True)
            self._adamw.state[parameter][kind] = value

    def move(self, device: torch.device) -> None:
        """Bring the moments to `device`. Steps are taken where the parameters are."""
        for state in self._adamw.state.values():
            for kind, value in state.items():
                state[kind] = value.to(device)

    def clear(self) -> None:
        """Free moments and gradients."""
        self._adamw.zero_grad()
        self._adamw.state.clear()
