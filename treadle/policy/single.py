"""The policy on one device: CPU or one GPU.

Owns the module and its files; how it learns is `learner`'s. An engine may hold the same module, as long as nobody
samples while `train` runs.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from treadle.config.actor import ActorConfig
from treadle.config.algorithm import RolloutCorrectionConfig
from treadle.config.model import ModelConfig
from treadle.model.load import load_causal_model
from treadle.policy.learner import PolicyLearner
from treadle.policy.learner import Sampling as Sampling
from treadle.policy.network import Network
from treadle.policy.optimizer import Optimizer
from treadle.policy.precision import DTYPES, Weights, compute_dtype
from treadle.policy.storage import load_model, restore_training, save_model, save_training

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SinglePolicy(PolicyLearner):
    """A `Policy`. Built whole by `create`."""

    @classmethod
    def create(
        cls,
        *,
        model: ModelConfig,
        actor: ActorConfig,
        rollout_correction: RolloutCorrectionConfig,
        sampling: Sampling,
        total_steps: int,
        device: torch.device,
    ) -> Self:
        """Load `model.path` and make it ready to train for `total_steps` steps."""
        compute = compute_dtype(actor.model_dtype, actor.dtype, "actor")
        module = load_causal_model(model, dtype=DTYPES[actor.model_dtype], device=device, longest=sampling.longest)
        weights = Weights(dict(module.named_parameters()), compute)
        optimizer = Optimizer("actor", weights, actor.optim, actor.grad_clip, total_steps)
        return cls(
            Network(module),
            optimizer,
            model=model,
            actor=actor,
            rollout_correction=rollout_correction,
            sampling=sampling,
        )

    @property
    def module(self) -> "PreTrainedModel":
        """The module that trains, for an engine that samples from the very same weights."""
        return self._network.module

    def tensors(self) -> Mapping[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._network.module.named_parameters()}

    def full_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The weights one by one, as they are or in `dtype`: as a rank of a sharded policy hands them out."""
        for name, tensor in self.tensors().items():
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def save(self, directory: Path) -> None:
        save_model(directory, self._network.module, self._optimizer.weights)
        save_training(directory, self._optimizer, self._version, self._network.device)

    def restore(self, directory: Path) -> None:
        load_model(directory, self._model, self._optimizer.weights)
        self._version = restore_training(directory, self._optimizer, self._network.device)

    def export(self, directory: Path) -> None:
        save_model(directory, self._network.module, self._optimizer.weights)
