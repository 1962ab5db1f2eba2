"""Critic: the value model, a decoder with a value head: the return before each token.

Owns its training, on one device or on many, as `policy` owns the policy's, and its files on one device. Mini batches
follow the order of the groups.
Invariant: the head starts at zero and draws no noise: an untrained critic predicts 0.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from treadle.algorithm.loss import ValueBatch, compute_value_loss
from treadle.algorithm.micro_batch import Denominator, LossOutput
from treadle.config.rollout import ModelConfig
from treadle.config.training import ActorConfig, CriticConfig
from treadle.errors import MisuseError
from treadle.model.load import load_causal_model, shares_prefixes
from treadle.policy.checkpoint_files import restore_critic, save_critic
from treadle.policy.network import DecoderNetwork
from treadle.policy.optimizer import DTYPES, MasterWeights, Optimizer, compute_dtype
from treadle.policy.packed_inputs import PackedRows, RowsLike, Sequences, split_mini_batches
from treadle.policy.protocol import Metrics, TrainBatch
from treadle.policy.update import (
    SINGLE_RANK,
    DataParallelGroup,
    MicroBatcher,
    TokenBudget,
    compute_per_token,
    run_optimizer_step,
    summarize_updates,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueNetwork(DecoderNetwork):
    """A decoder with a head. The head computes in fp32, whatever the decoder does."""

    def __init__(self, module: "PreTrainedModel", device: torch.device | None = None) -> None:
        super().__init__(module)
        self.device = device or self.device
        self.head = nn.Linear(self.hidden_size, 1, device=self.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, packed: PackedRows) -> Tensor:
        """What to expect before each sampled token: [M]."""
        values_M: Tensor = self.head(self.hidden(packed).float()).squeeze(1)
        return values_M


class CriticLearner:
    """All of a `Critic` but where it lives."""

    def __init__(
        self,
        network: ValueNetwork,
        optimizer: Optimizer,
        *,
        model: ModelConfig,
        critic: CriticConfig,
        actor: ActorConfig,
        response_length: int,
        dp_group: DataParallelGroup = SINGLE_RANK,
    ) -> None:
        self._network = network
        self._optimizer = optimizer
        self._model = model
        self._critic = critic
        self._groups_per_batch = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
        self._epochs = critic.ppo_epochs or actor.ppo_epochs
        self._response_length = response_length
        budget = TokenBudget(critic.ppo_max_token_len_per_gpu, "critic.ppo_max_token_len_per_gpu")
        self._batcher = MicroBatcher(network, dp_group, budget)
        self._steps = 0

    def values(self, rows: RowsLike) -> Tensor:
        sequences = Sequences(rows)
        return sequences.spread(compute_per_token(sequences, self._network.values, self._batcher))

    def train(self, batch: TrainBatch) -> Metrics:
        began = time.perf_counter()
        if batch.values_T is None or batch.returns_T is None:
            raise MisuseError("a critic learns from values_T and returns_T: the advantage estimator gave no returns")
        sequences = Sequences(batch.rows)
        old_M, returns_M = sequences.sampled(batch.values_T), sequences.sampled(batch.returns_T)
        mini_batches = split_mini_batches(batch.group_S, self._groups_per_batch)
        with self._network.recomputing(self._model.enable_gradient_checkpointing):
            updates = [
                run_optimizer_step(
                    sequences,
                    members,
                    lambda packed, denominator: self._loss(packed, denominator, old_M, returns_M),
                    self._optimizer,
                    batcher=self._batcher,
                    scale=self._response_length,
                    step=self._steps + 1,
                )
                for _ in range(self._epochs)
                for members in mini_batches
            ]
        self._steps += 1
        rate = self._optimizer.learning_rate(self._steps)
        return {
            **summarize_updates(updates, "critic", self._batcher.dp_group),
            "critic/lr": rate,
            "critic/update_s": time.perf_counter() - began,
        }

    def close(self) -> None:
        self._optimizer.clear()

    def _loss(self, packed: PackedRows, denominator: Denominator, old_M: Tensor, returns_M: Tensor) -> LossOutput:
        device = self._network.device
        batch = ValueBatch(
            values_T=self._network.values(packed),
            old_values_T=old_M[packed.places_M].to(device),
            returns_T=returns_M[packed.places_M].to(device),
            mask_T=packed.mask(),
            sequence_T=packed.sequence_M,
            num_sequences=packed.num_sequences,
        )
        return compute_value_loss(batch, denominator, self._critic)


class SingleCritic(CriticLearner):
    """A `Critic` on one device. Built whole by `create`."""

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
        longest: int | None = None,
    ) -> Self:
        """Load `critic.path`, or else `model.path`, and give it a head."""
        compute = compute_dtype(critic.model_dtype, critic.dtype, "critic")
        model = critic_model(model, critic)
        dtype = DTYPES[critic.model_dtype]
        network = ValueNetwork(load_causal_model(model, dtype=dtype, device=device, longest=longest))
        network.shares_prefixes = shares_prefixes(model, network.module.config, longest)
        decoder, head = network.decoder.named_parameters(), network.head.named_parameters()
        weights = MasterWeights({f"decoder.{name}": value for name, value in decoder}, compute)
        weights.add({f"head.{name}": value for name, value in head})
        optimizer = Optimizer("critic", weights, critic.optim, critic.grad_clip, total_steps)
        return cls(network, optimizer, model=model, critic=critic, actor=actor, response_length=response_length)

    def save(self, directory: Path) -> None:
        save_critic(directory, self._optimizer, self._steps)

    def restore(self, directory: Path) -> None:
        self._steps = restore_critic(directory, self._optimizer)


def critic_model(model: ModelConfig, critic: CriticConfig) -> ModelConfig:
    """The model that a critic starts from: `critic.path`, or else the policy's."""
    return model if critic.path is None else ModelConfig(**{**model.values(), "path": critic.path, "adapter": None})
