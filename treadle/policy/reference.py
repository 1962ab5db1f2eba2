"""The reference policy: the model as it was before training. Has its own copy, and never changes it."""

from typing import Self

import torch
from torch import Tensor

from treadle.config.actor import RefConfig
from treadle.config.model import ModelConfig
from treadle.model.causal import load_causal_model
from treadle.policy.learning import Budget, Desk, compute
from treadle.policy.network import Network
from treadle.policy.precision import DTYPES
from treadle.policy.sequence import Rows, Sequences
from treadle.policy.team import ALONE, Team


class FrozenPolicy:
    """All of a `Reference` but where it lives. Its weights are in the number format of its computation."""

    def __init__(self, network: Network, ref: RefConfig, temperature: float, team: Team = ALONE) -> None:
        self._network = network
        budget = Budget(ref.log_prob_max_token_len_per_gpu, "ref.log_prob_max_token_len_per_gpu")
        self._desk = Desk(network, team, budget)
        self._temperature = temperature

    def logprobs(self, rows: Rows) -> Tensor:
        network, temperature, sequences = self._network, self._temperature, Sequences(rows)
        values_M = compute(sequences, lambda packed: network.logprobs(packed, temperature).logprobs_T, self._desk)
        return sequences.spread(values_M)

    def close(self) -> None:
        """Nothing to end: the weights go with the object."""


class SingleReference(FrozenPolicy):
    """A `Reference` on one device."""

    @classmethod
    def create(cls, *, model: ModelConfig, ref: RefConfig, temperature: float, device: torch.device) -> Self:
        """Load `model.path` once more."""
        module = load_causal_model(model, dtype=DTYPES[ref.dtype], device=device).requires_grad_(False)
        return cls(Network(module), ref, temperature)
