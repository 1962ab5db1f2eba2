"""Decoder layer inspection: what a layer is made of, found by looking and by trying.

Owns what a layer must look like before it may be computed in another way: norm, attention and gated MLP as in Llama,
Qwen and Gemma. Nothing is assumed from a name: norms and activations are tried on numbers, and what a layer tells its
attention is recorded while it runs. Computes nothing itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from treadle.model.attention import AttentionOptions, PackedMetadata
from treadle.model.causal_lm import hidden_states
from treadle.model.rope import position_thresholds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    functional.silu,
    lambda x: functional.gelu(x, approximate="tanh"),
    functional.gelu,
)
"""What may stand in a gated product; parts name it by number."""

_NORM_TOLERANCE = 1e-2
"""How far a norm may be from one that we know: rounding in half precision, and far less than another formula."""

_PROBED = (33, 14)
"""Lengths of the sequences that layers are watched on."""

_AROUND = 4
"""Tokens before and after each position at which a config says that something changes."""


@dataclass(frozen=True, slots=True)
class NormParts:
    """A root-mean-square norm. `offset`: the weight counts from 1, and is applied before rounding (Gemma)."""

    module: nn.Module
    eps: float
    offset: bool

    @property
    def weight(self) -> Tensor:
        """The weight as it is now."""
        return cast(Tensor, self.module.weight)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A decoder layer. `attention` and `mlp` have their projections under the usual names."""

    layer: nn.Module
    attention: Any
    mlp: Any
    head_size: int
    activation: int
    before_attention: NormParts
    after_attention: NormParts | None
    """Applied to what attention gives, before it is added (Gemma 2 and 3)."""
    before_mlp: NormParts
    after_mlp: NormParts | None
    query: NormParts | None
    """Of each head (Qwen 3)."""
    key: NormParts | None


def find_parts(layer: nn.Module) -> LayerParts | None:
    """The parts of a layer, if it has exactly those that we know."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if not _projects(attention, "q_proj", "k_proj", "v_proj", "o_proj"):
        return None
    if not _projects(mlp, "gate_proj", "up_proj", "down_proj"):
        return None
    assert isinstance(attention, nn.Module) and isinstance(mlp, nn.Module), "they have projections"
    sandwiched = hasattr(layer, "pre_feedforward_layernorm")
    names = ["input_layernorm", "post_attention_layernorm"]
    names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if sandwiched else []
    norms = {name: find_norm(getattr(layer, name, None)) for name in names}
    heads = {name: find_norm(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)}
    activation, found = _find_activation(mlp), [*norms.values(), *heads.values()]
    if activation is None or None in found or len({norm.offset for norm in found if norm}) > 1 or len(heads) == 1:
        return None
    return LayerParts(
        layer,
        attention,
        mlp,
        cast(int, attention.head_dim),
        activation,
        cast(NormParts, norms["input_layernorm"]),
        norms["post_attention_layernorm"] if sandwiched else None,
        cast(NormParts, norms["pre_feedforward_layernorm" if sandwiched else "post_attention_layernorm"]),
        norms["post_feedforward_layernorm"] if sandwiched else None,
        heads.get("q_norm"),
        heads.get("k_norm"),
    )


def _projects(part: object, *names: str) -> bool:
    """Whether a part has these plain projections, and no others."""
    if not isinstance(part, nn.Module):
        return False
    linear = {name for name, child in part.named_modules() if isinstance(child, nn.Linear)}
    return linear == set(names) and all(type(getattr(part, name)) is nn.Linear for name in names)


@torch.no_grad()
def find_norm(module: object) -> NormParts | None:
    """Which formula a norm computes, found by trying it."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(module, nn.Module) or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    x = torch.linspace(-3, 3, 2 * len(weight), device=weight.device).view(2, -1).to(weight.dtype)
    plain = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    given = module(x).float()
    for offset in (False, True):
        expected = plain * (weight.float() + offset)
        if (given - expected).norm() <= _NORM_TOLERANCE * expected.norm():
            return NormParts(module, eps, offset)
    return None


@torch.no_grad()
def _find_activation(mlp: nn.Module) -> int | None:
    function = getattr(mlp, "act_fn", None)
    if not callable(function):
        return None
    x = torch.linspace(-4, 4, 101)
    return next((at for at, other in enumerate(ACTIVATIONS) if torch.allclose(function(x), other(x), atol=1e-6)), None)


@dataclass(slots=True)
class LayerTrace:
    """What a layer was given, gave, and told its attention, in one forward."""

    options: AttentionOptions | None = None
    hidden: Tensor | None = None
    keywords: dict[str, Any] = field(default_factory=dict)
    out: Tensor | None = None


class _TracingMetadata(PackedMetadata):
    """Packed metadata that notes what each layer asks of its attention. Further sequences are around thresholds."""

    def __init__(self, device: torch.device, thresholds: Sequence[int]) -> None:
        super().__init__((*_PROBED, *(2 * _AROUND for _ in thresholds)), device)
        self._starts = [0] * len(_PROBED) + [max(0, threshold - _AROUND) for threshold in thresholds]
        self.options: dict[nn.Module, AttentionOptions] = {}

    def positions(self) -> Tensor:
        starts = torch.tensor(self._starts).repeat_interleave(torch.tensor(self.lengths))
        return super().positions() + starts.to(self._device)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.options[module] = options
        return super().attend(module, query, key, value, options)


@torch.no_grad()
def trace_layers(module: "PreTrainedModel", layers: list[nn.Module]) -> list[LayerTrace]:
    """Run a decoder once on arbitrary tokens, and note what happens at each layer."""
    seen = [LayerTrace() for _ in layers]
    hooks = [hook for layer, note in zip(layers, seen, strict=True) for hook in _note(layer, note)]
    metadata = _TracingMetadata(module.device, position_thresholds(module.config))
    ids = torch.arange(sum(metadata.lengths), device=module.device) * 7 % module.config.vocab_size
    try:
        hidden_states(module, ids, metadata.positions(), metadata)
    finally:
        for hook in hooks:
            hook.remove()
    for layer, note in zip(layers, seen, strict=True):
        note.options = metadata.options.get(getattr(layer, "self_attn", layer))
    return seen


def _note(layer: nn.Module, note: LayerTrace) -> tuple[Any, Any]:
    def before(_: nn.Module, given: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        note.hidden, note.keywords = given[0] if given else keywords["hidden_states"], keywords

    def after(_: nn.Module, given: Any, out: Any) -> None:
        note.out = out[0] if isinstance(out, tuple) else out

    return layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)
