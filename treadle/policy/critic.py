"""The value model on one device: a decoder with a head that says what reward to expect before each token.

Owns its training, as `single` owns the policy's. Mini batches follow the order of the groups.
Invariant: the head starts at zero, drawing no noise: a critic that knows nothing expects nothing.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from treadle.algorithm.aggregation import Denominator
from treadle.algorithm.packed import LossOutput
from treadle.algorithm.value import ValueBatch, compute_value_loss
from treadle.config.actor import ActorConfig, CriticConfig
from treadle.config.model import ModelConfig
from treadle.errors import MisuseError
from treadle.model.causal import load_causal_model
from treadle.policy.batch import TrainBatch
from treadle.policy.learning import Budget, compute, learn, summarize
from treadle.policy.network import Network
from treadle.policy.optimizer import Optimizer
from treadle.policy.packing import split_in_order
from treadle.policy.precision import DTYPES, Weights, compute_dtype
from treadle.policy.protocol import Metrics
from treadle.policy.sequence import Packed, Sequences
from treadle.policy.storage import TRAINING, copy_weights, save_json, save_tensors
from treadle.types import Row


class SingleCritic:
    """A `Critic`. Built whole by `create`."""

    def __init__(
        self,
        network: Network,
        compute: torch.dtype,
        *,
        model: ModelConfig,
        critic: CriticConfig,
        actor: ActorConfig,
        response_length: int,
        total_steps: int,
    ) -> None:
        self._network = network
        self._model = model
        self._critic = critic
        self._groups_per_batch = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
        self._epochs = critic.ppo_epochs or actor.ppo_epochs
        self._response_length = response_length
        self._budget = Budget(critic.ppo_max_token_len_per_gpu, "critic.ppo_max_token_len_per_gpu")
        self._head = nn.Linear(network.hidden_size, 1, device=network.device, dtype=torch.float32)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        weights = Weights({f"decoder.{name}": value for name, value in network.decoder.named_parameters()}, compute)
        weights.add({f"head.{name}": value for name, value in self._head.named_parameters()})
        self._optimizer = Optimizer("critic", weights, critic.optim, critic.grad_clip, total_steps)
        self._steps = 0

    @classmethod
    def create(
        cls,
        *,
        model: ModelConfig,
        critic: CriticConfig,
        actor: ActorConfig,
        response_length: int,
        total_steps: int,
        device: torch.device,
    ) -> "SingleCritic":
        """Load `critic.path`, or else `model.path`, and give it a head."""
        compute = compute_dtype(critic.model_dtype, critic.dtype, "critic")
        model = model if critic.path is None else ModelConfig(**{**model.values(), "path": critic.path})
        module = load_causal_model(model, dtype=DTYPES[critic.model_dtype], device=device)
        return cls(
            Network(module),
            compute,
            model=model,
            critic=critic,
            actor=actor,
            response_length=response_length,
            total_steps=total_steps,
        )

    def values(self, rows: Sequence[Row]) -> Tensor:
        sequences = Sequences(rows)
        values_M = compute(sequences, self._values, budget=self._budget, device=self._network.device)
        return sequences.spread(values_M)

    def train(self, batch: TrainBatch) -> Metrics:
        began = time.perf_counter()
        if batch.values_T is None or batch.returns_T is None:
            raise MisuseError("a critic learns from values_T and returns_T: the advantage estimator gave no returns")
        sequences = Sequences(batch.rows)
        old_M, returns_M = sequences.sampled(batch.values_T), sequences.sampled(batch.returns_T)
        mini_batches = split_in_order(batch.group_S, self._groups_per_batch)
        with self._network.recomputing(self._model.enable_gradient_checkpointing):
            lessons = [
                learn(
                    sequences,
                    members,
                    lambda packed, denominator: self._share(packed, denominator, old_M, returns_M),
                    self._optimizer,
                    budget=self._budget,
                    device=self._network.device,
                    scale=self._response_length,
                    step=self._steps + 1,
                )
                for _ in range(self._epochs)
                for members in mini_batches
            ]
        self._steps += 1
        rate = self._optimizer.learning_rate(self._steps)
        return {
            **summarize(lessons, "critic"),
            "critic/lr": rate,
            "critic/update_s": time.perf_counter() - began,
        }

    def save(self, directory: Path) -> None:
        folder = directory / TRAINING / "critic"
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / "model.safetensors", self._optimizer.weights.full)
        save_tensors(folder / "optimizer.safetensors", self._optimizer.state())
        save_json(folder / "critic.json", {"steps": self._steps})

    def restore(self, directory: Path) -> None:
        folder = directory / TRAINING / "critic"
        copy_weights(load_file(folder / "model.safetensors"), self._optimizer.weights, folder)
        self._optimizer.restore(load_file(folder / "optimizer.safetensors"))
        self._steps = int(json.loads((folder / "critic.json").read_text(encoding="utf-8"))["steps"])

    def close(self) -> None:
        self._optimizer.clear()

    def _values(self, packed: Packed) -> Tensor:
        values_M: Tensor = self._head(self._network.hidden(packed).float()).squeeze(1)
        return values_M

    def _share(self, packed: Packed, denominator: Denominator, old_M: Tensor, returns_M: Tensor) -> LossOutput:
        device = self._network.device
        batch = ValueBatch(
            values_T=self._values(packed),
            old_values_T=old_M[packed.places_M].to(device),
            returns_T=returns_M[packed.places_M].to(device),
            mask_T=torch.ones_like(packed.targets_M, dtype=torch.bool),
            sequence_T=packed.sequence_M,
            num_sequences=packed.num_sequences,
        )
        return compute_value_loss(batch, denominator, self._critic)
