"""FSDP2 policy, reference and critic, as one rank of many holds them.

They train as on one device (`policy`, `critic`, `reference`); here is where their weights are and how they are saved.
Every method is collective: all ranks call it with the same arguments, and each returns the same, files aside.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.distributed import broadcast_object_list
from transformers import PreTrainedModel

from treadle.config.rollout import ModelConfig
from treadle.config.training import (
    FSDPActorConfig,
    FSDPConfig,
    FSDPCriticConfig,
    FSDPRefConfig,
    RolloutCorrectionConfig,
)
from treadle.model.checksum import checksum
from treadle.model.load import shares_prefixes
from treadle.policy.checkpoint_files import (
    check_same_model,
    restore_critic,
    restore_training,
    save_critic,
    save_reference,
    save_training,
    shapes_of,
)
from treadle.policy.critic import CriticLearner, critic_model
from treadle.policy.fsdp_wrap import CPU, ShardedNetwork, ShardedValueNetwork, Sharding, make_mesh
from treadle.policy.hf_model import build_meta_model, load_on_first_rank, scatter_weights, write_model
from treadle.policy.lora_weights import LoraWeights, create_lora
from treadle.policy.network import DecoderNetwork
from treadle.policy.optimizer import DTYPES, MasterWeights, Optimizer, compute_dtype
from treadle.policy.packed_inputs import RowsLike
from treadle.policy.policy import PolicyLearner, Sampling
from treadle.policy.protocol import Metrics, TrainBatch
from treadle.policy.reference import ReferencePolicy
from treadle.policy.shard_files import ShardFile, gather_full, local_rows
from treadle.policy.update import DataParallelGroup, TorchDataParallelGroup


class FSDPPolicy(PolicyLearner):
    """A rank's part of a `Policy`. Built whole by `create`, on all ranks at once."""

    _network: ShardedNetwork
    _actor: FSDPActorConfig

    @classmethod
    def create(
        cls,
        *,
        model: ModelConfig,
        actor: FSDPActorConfig,
        rollout_correction: RolloutCorrectionConfig,
        sampling: Sampling,
        total_steps: int,
        device: torch.device,
    ) -> Self:
        """Load `model.path` over all ranks and make it ready to train for `total_steps` steps."""
        compute, full = compute_dtype(actor.model_dtype, actor.dtype, "actor"), actor.lora.r is None
        dtype, dp_group = DTYPES[actor.model_dtype] if full else compute, TorchDataParallelGroup()
        network = ShardedNetwork(
            build_meta_model(model, dtype, sampling.longest, merge=full).requires_grad_(full),
            mesh=make_mesh(device, actor.fsdp_config, "actor"),
            device=device,
            fsdp_config=actor.fsdp_config,
            dtype=compute,
        )
        with network.sharding.present():
            source = load_on_first_rank(model, dtype, sampling.longest, merge=full)
            scatter_weights(source, network.module, network.sharding.mesh, device)
            if full:
                weights = MasterWeights(dict(network.module.named_parameters()), dtype)
            else:
                weights = _create_lora(network, source, model, actor, dp_group)
            optimizer = Optimizer("actor", weights, actor.optim, actor.grad_clip, total_steps)
        network.shares_prefixes = shares_prefixes(model, network.module.config, sampling.longest)
        return cls(
            network,
            optimizer,
            model=model,
            actor=actor,
            rollout_correction=rollout_correction,
            sampling=sampling,
            dp_group=dp_group,
        )

    def train(self, batch: TrainBatch) -> Metrics:
        with _on_device(self._network.sharding, self._optimizer, self._actor.fsdp_config, self._network.device):
            return super().train(batch)

    def logprobs(self, rows: RowsLike) -> Tensor:
        with self._network.sharding.present():
            return super().logprobs(rows)

    def gradient_norms(self, rows: RowsLike) -> Tensor:
        with self._network.sharding.present():
            return super().gradient_norms(rows)

    def full_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The whole weights on the device, one parameter at a time; as the network computes with them, or in `dtype`.

        Every rank must go through all of them. None is kept: memory is bounded by the largest parameter.
        """
        wanted = dtype or DTYPES[self._actor.dtype]
        for name, parameter in self._network.module.named_parameters():
            yield name, gather_full(parameter, self._network.device, wanted)

    def save(self, directory: Path) -> None:
        weights, part = self._optimizer.weights, self._network.sharding.part()
        if isinstance(weights, LoraWeights):  # whole on every rank
            part = ShardFile(writes=self._batcher.dp_group.rank == 0)
            if part.writes:
                weights.save(directory, self._model.path)
        else:
            self.export(directory)
        save_training(directory, self._optimizer, self._version, self._network.device, part)

    def restore(self, directory: Path) -> None:
        stored = ModelConfig(**{**self._model.values(), "path": str(directory), "adapter": None})
        network, weights = self._network, self._optimizer.weights
        with network.sharding.present():
            if isinstance(weights, LoraWeights):
                weights.restore(directory)
                self._version = restore_training(directory, self._optimizer, network.device)
                return
            source = load_on_first_rank(
                stored,
                DTYPES[self._actor.model_dtype],
                self._sampling.longest,
                check=lambda found: check_same_model(shapes_of(found.named_parameters()), weights.full, directory),
            )
            scatter_weights(source, network.module, network.sharding.mesh, network.device)
            self._version = restore_training(directory, self._optimizer, network.device)

    def export(self, directory: Path) -> None:
        weights = self.full_tensors(DTYPES[self._actor.model_dtype])  # as they train, not as they compute
        write_model(directory, self._network.module, weights, is_writer=self._batcher.dp_group.rank == 0)


def _create_lora(
    network: ShardedNetwork,
    source: PreTrainedModel | None,
    model: ModelConfig,
    actor: FSDPActorConfig,
    dp_group: DataParallelGroup,
) -> LoraWeights:
    """Adapters beside a sharded module. `source` is the whole frozen model, on the first rank."""
    found = [None if source is None else checksum(dict(source.named_parameters()))]
    broadcast_object_list(found, 0)
    fsdp, device = actor.fsdp_config, network.device
    return create_lora(
        network.module,
        model,
        actor.lora,
        device,
        frozen_checksum=str(found[0]),
        keep_on_cpu=device.type != "cpu" and (fsdp.param_offload or fsdp.offload_policy),
        dp_group=dp_group,
    )


class FSDPReference(ReferencePolicy):
    """A rank's part of a `Reference`."""

    _network: ShardedNetwork

    @classmethod
    def create(
        cls,
        *,
        model: ModelConfig,
        ref: FSDPRefConfig,
        temperature: float,
        device: torch.device,
        longest: int | None = None,
    ) -> Self:
        """Load `model.path` once more, over all ranks."""
        dtype = DTYPES[ref.dtype]
        network = ShardedNetwork(
            build_meta_model(model, dtype, longest).requires_grad_(False),
            mesh=make_mesh(device, ref.fsdp_config, "ref"),
            device=device,
            fsdp_config=ref.fsdp_config,
            dtype=dtype,
        )
        with network.sharding.present():
            scatter_weights(load_on_first_rank(model, dtype, longest), network.module, network.sharding.mesh, device)
        network.shares_prefixes = shares_prefixes(model, network.module.config, longest)
        return cls(network, ref, temperature, TorchDataParallelGroup())

    def logprobs(self, rows: RowsLike) -> Tensor:
        with self._network.sharding.present():
            return super().logprobs(rows)

    def follow(self, policy: FSDPPolicy, step: int) -> bool:
        if not self._ref.syncs_after(step):
            return False
        with self._network.sharding.present():
            self.mix_weights(policy.full_tensors())
        return True

    def save(self, directory: Path) -> None:
        if self._followed:
            save_reference(directory, self._parameters(), self._network.sharding.part())

    def restore(self, directory: Path) -> None:
        with self._network.sharding.present():
            super().restore(directory)


class FSDPCritic(CriticLearner):
    """A rank's part of a `Critic`."""

    _network: ShardedValueNetwork
    _critic: FSDPCriticConfig

    @classmethod
    def create(
        cls,
        *,
        model: ModelConfig,
        critic: FSDPCriticConfig,
        actor: FSDPActorConfig,
        response_length: int,
        total_steps: int,
        device: torch.device,
        longest: int | None = None,
    ) -> Self:
        """Load `critic.path`, or else `model.path`, over all ranks, and give it a head."""
        compute, dtype = compute_dtype(critic.model_dtype, critic.dtype, "critic"), DTYPES[critic.model_dtype]
        model = critic_model(model, critic)
        network = ShardedValueNetwork(
            build_meta_model(model, dtype, longest),
            mesh=make_mesh(device, critic.fsdp_config, "critic"),
            device=device,
            fsdp_config=critic.fsdp_config,
            dtype=compute,
        )
        with network.sharding.present():
            source = load_on_first_rank(model, dtype, longest)
            scatter_weights(
                None if source is None else DecoderNetwork(source).decoder,
                network.decoder,
                network.sharding.mesh,
                device,
            )
            for parameter in network.head.parameters():
                local_rows(parameter.detach()).zero_()
            decoder, head = network.decoder.named_parameters(), network.head.named_parameters()
            weights = MasterWeights({f"decoder.{name}": value for name, value in decoder}, dtype)
            weights.add({f"head.{name}": value for name, value in head})
            optimizer = Optimizer("critic", weights, critic.optim, critic.grad_clip, total_steps)
        network.shares_prefixes = shares_prefixes(model, network.module.config, longest)
        return cls(
            network,
            optimizer,
            model=model,
            critic=critic,
            actor=actor,
            response_length=response_length,
            dp_group=TorchDataParallelGroup(),
        )

    def values(self, rows: RowsLike) -> Tensor:
        with self._network.sharding.present():
            return super().values(rows)

    def train(self, batch: TrainBatch) -> Metrics:
        with _on_device(self._network.sharding, self._optimizer, self._critic.fsdp_config, self._network.device):
            return super().train(batch)

    def save(self, directory: Path) -> None:
        save_critic(directory, self._optimizer, self._steps, self._network.sharding.part())

    def restore(self, directory: Path) -> None:
        self._steps = restore_critic(directory, self._optimizer)


@contextmanager
def _on_device(
    sharding: Sharding, optimizer: Optimizer, fsdp_config: FSDPConfig, device: torch.device
) -> Iterator[None]:
    """Inside, parameters and moments are where steps are taken; outside, where the config keeps them."""
    moves = fsdp_config.optimizer_offload and not fsdp_config.offload_policy and device.type != "cpu"
    with sharding.present():
        if moves:
            optimizer.move(device)
        try:
            yield
        finally:
            if moves:
                optimizer.move(CPU)
