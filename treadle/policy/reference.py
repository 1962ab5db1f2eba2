"""The reference policy: the model as it was before training. Loads its own copy, and never changes it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.config.actor import RefConfig
from treadle.config.model import ModelConfig
from treadle.model.causal import load_causal_model
from treadle.policy.learning import Budget, compute
from treadle.policy.network import Network
from treadle.policy.precision import DTYPES
from treadle.policy.sequence import Sequences
from treadle.types import Row


class SingleReference:
    """A `Reference` on one device. Its weights are in the number format of its computation."""

    def __init__(self, network: Network, ref: RefConfig, temperature: float) -> None:
        self._network = network
        self._budget = Budget(ref.log_prob_max_token_len_per_gpu, "ref.log_prob_max_token_len_per_gpu")
        self._temperature = temperature

    @classmethod
    def create(
        cls, *, model: ModelConfig, ref: RefConfig, temperature: float, device: torch.device
    ) -> "SingleReference":
        """Load `model.path` once more."""
        module = load_causal_model(model, dtype=DTYPES[ref.dtype], device=device).requires_grad_(False)
        return cls(Network(module), ref, temperature)

    def logprobs(self, rows: Sequence[Row]) -> Tensor:
        network, temperature, sequences = self._network, self._temperature, Sequences(rows)
        values_M = compute(
            sequences,
            lambda packed: network.logprobs(packed, temperature).logprobs_T,
            budget=self._budget,
            device=network.device,
        )
        return sequences.spread(values_M)

    def close(self) -> None:
        """Nothing to end: the weights go with the object."""
