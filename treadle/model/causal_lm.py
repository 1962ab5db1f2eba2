"""Causal LM forward: a Hugging Face decoder without its output layer, with treadle's attention in it.

Owns what is changed in a module before it is used, activation recomputation (gradient checkpointing), and the two
halves of a forward: hidden states for packed tokens, then logits only where they are needed. Refuses to know about
files, sampling and losses.
Invariant: a prepared module has no dropout and no frequency that changes with length, so training and sampling compute
alike.

Shapes: T packed tokens, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from treadle.errors import ConfigError, Mistake
from treadle.model.attention import NAME, AttentionMetadata, register
from treadle.model.rope import fix_rope

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer


def prepare_module(module: "PreTrainedModel", longest: int | None = None) -> "PreTrainedModel":
    """Give a model that was made elsewhere treadle's attention, fix its rope, and take its dropout away.

    `longest`: tokens of the longest sequence that it will read; needed where its rope depends on it.
    """
    register()
    fix_rope(module, longest)
    module.set_attn_implementation(NAME)
    for owner in (module.config, *module.modules()):
        for name in [name for name, value in vars(owner).items() if isinstance(value, float) and _drops(name)]:
            setattr(owner, name, 0.0)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    module.train(False)
    return module


def _drops(name: str) -> bool:
    """Whether an attribute is the rate of some dropout."""
    return "dropout" in name or name.endswith(("_pdrop", "layerdrop"))


@contextmanager
def recomputing(module: "PreTrainedModel", wanted: bool) -> Iterator[None]:
    """Inside, layers keep no activations for backward but compute them again; where `wanted`."""
    layers = _layers(module) if wanted else ()
    recompute: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for layer in layers:
        layer._gradient_checkpointing_func = recompute
        layer.gradient_checkpointing = layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = layer.training = False


def _layers(module: "PreTrainedModel") -> tuple["GradientCheckpointingLayer", ...]:
    """The layers that can compute again. Only the layer itself counts as training, not what is in it."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = tuple(part for part in module.modules() if isinstance(part, GradientCheckpointingLayer))
    if not layers:
        problem = f"{type(module).__name__} cannot recompute its activations"
        raise ConfigError([Mistake("model.enable_gradient_checkpointing", problem, True, fix="set it to false")])
    return layers


def hidden_states(module: "PreTrainedModel", ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata) -> Tensor:
    """The decoder's last hidden state of each token: [T, hidden]."""
    decoder = cast(Any, module).get_decoder()
    out = decoder(
        input_ids=ids_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), use_cache=False, treadle_metadata=metadata
    )
    return cast(Tensor, out.last_hidden_state[0])


def output_weight(module: "PreTrainedModel") -> Tensor:
    """The matrix from hidden states to logits: [V, hidden]. See `finish_logits` for what follows it."""
    return cast(Tensor, cast(Any, module).get_output_embeddings().weight)


def untie_output_layer(module: "PreTrainedModel") -> nn.Linear | None:
    """The output layer, with a weight of its own where the embedding shared it; None where it is no linear module."""
    layer = cast(Any, module).get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        return None
    if cast(Any, module).get_input_embeddings().weight is layer.weight:
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
        cast(Any, module.config).tie_word_embeddings = False
    return layer


def output_bias(module: "PreTrainedModel") -> Tensor | None:
    """What is added to hidden @ weight.T, in the families that add something: [V]."""
    return cast("Tensor | None", getattr(cast(Any, module).get_output_embeddings(), "bias", None))


def logits_scale(module: "PreTrainedModel") -> float:
    """The factor on hidden @ weight.T + bias of some families: Granite and Cohere."""
    config = module.config
    return (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)


def logits_cap(module: "PreTrainedModel") -> float | None:
    """The soft cap on logits of some families: Gemma 2."""
    return getattr(module.config, "final_logit_softcapping", None)


def finish_logits(module: "PreTrainedModel", logits: Tensor) -> Tensor:
    """What some families do to hidden @ weight.T + bias: a scale (Granite, Cohere), a soft cap (Gemma 2)."""
    scale, cap = logits_scale(module), logits_cap(module)
    if scale != 1:
        logits = logits * scale
    return cap * torch.tanh(logits / cap) if cap else logits


def compute_logits(module: "PreTrainedModel", hidden: Tensor, *, wide: bool = False) -> Tensor:
    """Logits of hidden states: [..., V]. `wide`: in float32 where a GPU can, as training has them; no gradients."""
    weight, bias = output_weight(module), output_bias(module)
    if not wide or hidden.dtype == torch.float32 or not hidden.is_cuda:
        return finish_logits(module, nn.functional.linear(hidden, weight, bias))
    logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return finish_logits(module, logits if bias is None else logits.add_(bias))
