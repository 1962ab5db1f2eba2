"""Decoder forward over packed rows: hidden states where a token is predicted, and logprobs from them.

Owns activation checkpointing and the output layer's shape. Knows no loss and no optimizer.
Invariant: outside `recomputing` the module is as it was loaded, so that an engine may run the very same module.

L, M, D and V as in `packed_inputs` and `logprobs`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from treadle.algorithm.logprobs import TokenLogprobs, gradient_norms, logprobs_and_entropy
from treadle.algorithm.micro_batch import take_rows
from treadle.model.attention import PackedMetadata
from treadle.model.causal_lm import (
    hidden_states,
    logits_cap,
    logits_scale,
    output_bias,
    output_weight,
    recomputing,
)
from treadle.model.prefix_attention import PrefixTreeMetadata
from treadle.policy.packed_inputs import PackedRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_BYTES = {"cpu": 2**23, "cuda": 2**30}
"""How large one buffer of logits may be: what stays in a CPU's cache, or what a GPU hardly notices."""


class DecoderNetwork:
    """A decoder. `module` may be shared with an engine."""

    shares_prefixes = False
    """Whether a prefix that rows of a micro batch have in common is computed once (`load.shares_prefixes`)."""

    def __init__(self, module: "PreTrainedModel") -> None:
        self.module = module
        self.device: torch.device = module.device
        if self.device.type == "cuda" and all(type(weight.data) is Tensor for weight in module.parameters()):
            from treadle.model.fused_layers import fuse_layers  # triton comes with it, which CPU machines do not have

            fuse_layers(module)

    @property
    def decoder(self) -> nn.Module:
        """The module without its output layer."""
        return cast(nn.Module, cast(Any, self.module).get_decoder())

    @property
    def hidden_size(self) -> int:
        return output_weight(self.module).shape[1]

    def hidden(self, packed: PackedRows) -> Tensor:
        """The hidden state that predicts each sampled token: [M, D]."""
        metadata: PackedMetadata | PrefixTreeMetadata
        if packed.prefix_tree is None:
            metadata = PackedMetadata(packed.lengths, self.device)
        else:
            metadata = PrefixTreeMetadata(packed.prefix_tree, self.device)
        hidden_LD = hidden_states(self.module, packed.ids_L, metadata.positions(), metadata)
        return take_rows(hidden_LD, packed.predicts_M)

    def logprobs(self, packed: PackedRows, temperature: float) -> TokenLogprobs:
        """The logprob of each sampled token, and the entropy where it was drawn."""
        head, options = self._head(packed, temperature)
        return logprobs_and_entropy(*head, **options)

    def gradient_norms(self, packed: PackedRows, temperature: float) -> Tensor:
        """The squared norm of the gradient of each sampled token's logprob by its logits, without gradients."""
        head, options = self._head(packed, temperature)
        return gradient_norms(*head, **options)

    def _head(self, packed: PackedRows, temperature: float) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """Hidden states, output layer and targets, and how they become probabilities."""
        weight_VD, bias_V = output_weight(self.module), output_bias(self.module)
        scale, softcap = logits_scale(self.module), logits_cap(self.module)
        hidden_MD = self.hidden(packed)
        options = {
            "chunk": max(16, CHUNK_BYTES[self.device.type] // (4 * len(weight_VD))),
            "temperature": temperature,
            "bias_V": bias_V if bias_V is None or scale == 1 else bias_V * scale,
            "softcap": softcap,
        }
        return (hidden_MD if scale == 1 else hidden_MD * scale, weight_VD, packed.targets_M), options

    def begin(self, *, last: bool) -> None:
        """Called before each micro batch's forward; `last` of those that one optimizer step, or one result, is for."""

    def settle(self) -> None:
        """Called after forwards that no backward follows."""

    @contextmanager
    def present(self) -> Iterator[None]:
        """Inside, parameters are where they compute."""
        yield

    @contextmanager
    def recomputing(self, wanted: bool) -> Iterator[None]:
        """Inside, layers keep no activations for backward but compute them again; where `wanted`."""
        with recomputing(self.module, wanted):
            yield
