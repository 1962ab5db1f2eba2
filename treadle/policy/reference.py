"""Reference policy: the reference model as before training, or one that follows the policy.

Has its own copy of the weights, or is the frozen model beside a policy's adapters (LoRA). `ref.sync_freq` mixes the
policy's weights into a copy every so many steps (TR-DPO; TRL's `sync_ref_model`): reference = mix * policy + (1 - mix)
* reference. Without it, nothing changes them.
Invariant: a reference that has followed is saved and restored with the run; one that has not is the model itself.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from treadle.config.rollout import ModelConfig
from treadle.config.training import RefConfig
from treadle.model.load import load_causal_model, shares_prefixes
from treadle.policy.checkpoint_files import restore_reference, save_reference
from treadle.policy.lora_weights import LoraWeights
from treadle.policy.network import DecoderNetwork
from treadle.policy.optimizer import DTYPES
from treadle.policy.packed_inputs import RowsLike, Sequences
from treadle.policy.protocol import Policy
from treadle.policy.shard_files import local_row_range, local_rows
from treadle.policy.update import SINGLE_RANK, DataParallelGroup, MicroBatcher, TokenBudget, compute_per_token


class ReferencePolicy:
    """Reference policy, on one device or sharded. Its weights have the dtype of its computation."""

    def __init__(
        self, network: DecoderNetwork, ref: RefConfig, temperature: float, dp_group: DataParallelGroup = SINGLE_RANK
    ) -> None:
        self._network = network
        self._ref = ref
        budget = TokenBudget(ref.log_prob_max_token_len_per_gpu, "ref.log_prob_max_token_len_per_gpu")
        self._batcher = MicroBatcher(network, dp_group, budget)
        self._temperature = temperature
        self._followed = False

    def logprobs(self, rows: RowsLike) -> Tensor:
        network, temperature, sequences = self._network, self._temperature, Sequences(rows)
        values_M = compute_per_token(
            sequences, lambda packed: network.logprobs(packed, temperature).logprobs_T, self._batcher
        )
        return sequences.spread(values_M)

    @torch.no_grad()
    def mix_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Move by `ref.sync_mix` towards these weights, whole ones, computed in fp32."""
        parameters = self._parameters()
        for name, tensor in weights:
            parameter = parameters[name]
            here, rows = local_rows(parameter), local_row_range(parameter)
            part = tensor[rows.start : rows.stop] if tensor.dim() else tensor
            here.copy_(here.float().lerp(part.to(here.device, torch.float32), self._ref.sync_mix))
        self._followed = True

    def restore(self, directory: Path) -> None:
        self._followed = restore_reference(directory, self._parameters())

    def close(self) -> None:
        """Nothing to end: the weights go with the object."""

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._network.module.named_parameters())


class SingleReference(ReferencePolicy):
    """A `Reference` on one device."""

    @classmethod
    def create(
        cls,
        *,
        model: ModelConfig,
        ref: RefConfig,
        temperature: float,
        device: torch.device,
        longest: int | None = None,
    ) -> Self:
        """Load `model.path` once more, for sequences as long as the policy's."""
        module = load_causal_model(model, dtype=DTYPES[ref.dtype], device=device, longest=longest)
        network = DecoderNetwork(module.requires_grad_(False))
        network.shares_prefixes = shares_prefixes(model, module.config, longest)
        return cls(network, ref, temperature)

    def follow(self, policy: Policy, step: int) -> bool:
        if not self._ref.syncs_after(step):
            return False
        self.mix_weights(policy.tensors().items())
        return True

    def save(self, directory: Path) -> None:
        if self._followed:
            save_reference(directory, self._parameters())


class FrozenReference(ReferencePolicy):
    """A `Reference` without weights of its own: the policy's network, with its adapters as they were at the start."""

    def __init__(
        self,
        network: DecoderNetwork,
        weights: LoraWeights,
        ref: RefConfig,
        temperature: float,
        dp_group: DataParallelGroup = SINGLE_RANK,
    ) -> None:
        super().__init__(network, ref, temperature, dp_group)
        self._weights = weights

    def logprobs(self, rows: RowsLike) -> Tensor:
        with self._network.present(), self._weights.at_start():
            return super().logprobs(rows)

    def follow(self, policy: object, step: int) -> bool:
        """Never: a reference that follows has weights of its own."""
        return False

    def save(self, directory: Path) -> None:
        """Nothing: it never changes."""

    def restore(self, directory: Path) -> None:
        """Nothing: it never changes."""
