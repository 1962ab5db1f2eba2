"""Fused decoder layers: fewer kernels for training on a GPU, where that is provably the same.

Owns the forward of a layer whose parts `layer_parts` found: norms with the residual, rope and gated product are one
kernel each, forward and backward; matrix products and attention stay. A fused layer must give what the layer's own
forward gives on the model's own weights; a layer that does not is left as it is.
Invariant: a module whose layers were fused has the same parameters, and computes the same up to rounding.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from treadle.model.attention import AttentionMetadata, AttentionOptions
from treadle.model.layer_parts import ACTIVATIONS, LayerParts, LayerTrace, NormParts, find_parts, trace_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""How far a fused layer may be from the layer itself, relative to the change that the layer makes."""


class FusedForward:
    """Takes the place of a layer's forward: packed tokens in, the same out. Differentiable.

    `plain`: the same steps in plain torch, where there are no kernels: shows whether the steps are the layer's.
    """

    def __init__(self, parts: LayerParts, options: AttentionOptions, *, plain: bool = False) -> None:
        self.parts = parts
        self.options = options
        """What the layer tells its attention."""
        self._plain = plain

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        treadle_metadata: AttentionMetadata,
        **others: Any,
    ) -> Tensor:
        assert others.get("attention_mask") is None and hidden_states.shape[0] == 1, "tokens are packed"
        parts = self.parts
        norm = _plain_norm if self._plain else _norm
        mixed = self._attend(norm(parts.before_attention, hidden_states), position_embeddings, treadle_metadata)
        if parts.after_attention is not None:
            mixed = norm(parts.after_attention, mixed)
        if self._plain:
            hidden = hidden_states + mixed
            normed = norm(parts.before_mlp, hidden)
        else:
            hidden, normed = _add_norm(parts.before_mlp, hidden_states, mixed)
        out = self._feed(normed)
        if parts.after_mlp is not None:
            out = norm(parts.after_mlp, out)
        return hidden + out

    def _attend(self, hidden: Tensor, angles: tuple[Tensor, Tensor], metadata: AttentionMetadata) -> Tensor:
        parts, attention = self.parts, self.parts.attention
        cosines, sines = (angle[0].contiguous() for angle in angles)
        projected = (project(hidden) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
        query, key, value = (heads.view(hidden.shape[1], -1, parts.head_size) for heads in projected)
        norm, rotate = (_plain_norm, _plain_rotate) if self._plain else (_norm, _rotate)
        if parts.query is not None and parts.key is not None:
            query, key = norm(parts.query, query), norm(parts.key, key)
        turned = (rotate(heads, cosines, sines) for heads in (query, key))
        query, key, value = (tensor.unsqueeze(0).transpose(1, 2) for tensor in (*turned, value))
        out = metadata.attend(attention, query, key, value, self.options)
        return cast(Tensor, attention.o_proj(out.reshape(1, hidden.shape[1], -1)))

    def _feed(self, hidden: Tensor) -> Tensor:
        mlp = self.parts.mlp
        gate, up = mlp.gate_proj(hidden), mlp.up_proj(hidden)
        if self._plain:
            return cast(Tensor, mlp.down_proj(ACTIVATIONS[self.parts.activation](gate) * up))
        return cast(Tensor, mlp.down_proj(_Gate.apply(gate, up, self.parts.activation)))  # type: ignore[no-untyped-call]


def fuse_layers(module: "PreTrainedModel") -> bool:
    """Give every layer of a decoder its fused forward, if all of them pass; else nothing changes."""
    found = find_fused(module)
    for fused in found:
        fused.parts.layer.forward = fused
    return bool(found)


def find_fused(module: "PreTrainedModel", *, plain: bool = False) -> list[FusedForward]:
    """The fused forward of every layer, proven; none where any layer is of another kind."""
    layers = list(getattr(cast(Any, module).get_decoder(), "layers", ()))
    known = [layer.forward for layer in layers if isinstance(layer.forward, FusedForward)]
    if layers and len(known) == len(layers):
        return known
    parts = [find_parts(layer) for layer in layers]
    if not parts or not all(parts):
        return []
    seen = trace_layers(module, layers)
    fused = [
        FusedForward(part, note.options, plain=plain)
        for part, note in zip(parts, seen, strict=True)
        if part and note.options
    ]
    proven = len(fused) == len(seen) and all(_agrees(forward, note) for forward, note in zip(fused, seen, strict=True))
    return fused if proven else []


@torch.no_grad()
def _agrees(fused: FusedForward, seen: LayerTrace) -> bool:
    """Whether it gives what the layer gave."""
    if seen.hidden is None or seen.out is None or not isinstance(seen.keywords.get("position_embeddings"), tuple):
        return False
    keywords = {name: value for name, value in seen.keywords.items() if name != "hidden_states"}
    return close(fused(seen.hidden, **keywords), seen.out, seen.hidden)


def close(found: Tensor, expected: Tensor, before: Tensor) -> bool:
    """Whether two ways through a layer change `before` alike."""
    change = (expected.float() - before.float()).norm()
    return bool((found.float() - expected.float()).norm() <= TOLERANCE[expected.dtype] * change)


class _AddNorm(torch.autograd.Function):
    """The sum of two, and its norm."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: bool
    ) -> tuple[Tensor, Tensor]:
        from treadle.model.kernels import Norm, norm_rows

        hidden, delta, total = hidden.contiguous(), delta.contiguous(), torch.empty_like(hidden)
        out = norm_rows(hidden, Norm(weight, eps, offset), delta=delta, total=total)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.offset = eps, offset
        return total, out

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        from treadle.model.kernels import Norm, norm_rows_backward

        total, weight = ctx.saved_tensors
        norm = Norm(weight, ctx.eps, ctx.offset)
        grad, grad_weight = norm_rows_backward(total, norm, grad_out.contiguous(), grad_total.contiguous())
        return grad, grad, grad_weight, None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        from treadle.model.kernels import Norm, norm_rows

        hidden = hidden.contiguous()
        ctx.save_for_backward(hidden, weight)
        ctx.eps, ctx.offset = eps, offset
        return norm_rows(hidden, Norm(weight, eps, offset))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        from treadle.model.kernels import Norm, norm_rows_backward

        hidden, weight = ctx.saved_tensors
        norm = Norm(weight, ctx.eps, ctx.offset)
        return *norm_rows_backward(hidden, norm, grad_out.contiguous(), None), None, None


class _Gate(torch.autograd.Function):
    """activation(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: int) -> Tensor:
        from treadle.model.kernels import gate_rows

        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return gate_rows(gate.flatten(0, -2), up.flatten(0, -2), activation).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from treadle.model.kernels import gate_rows_backward

        gate, up = ctx.saved_tensors
        return *gate_rows_backward(gate, up, grad.contiguous(), ctx.activation), None


class _Rotate(torch.autograd.Function):
    """Heads, turned by their positions."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        from treadle.model.kernels import rotate_heads

        ctx.save_for_backward(cosines, sines)
        return rotate_heads(heads, cosines, sines)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        from treadle.model.kernels import rotate_heads

        return rotate_heads(grad.contiguous(), *ctx.saved_tensors, back=True), None, None


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return cast(Tensor, _Rotate.apply(heads, cosines, sines))  # type: ignore[no-untyped-call]


def _plain_norm(norm: NormParts, hidden: Tensor) -> Tensor:
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.offset:
        return (normed * (1.0 + norm.weight.float())).to(hidden.dtype)
    return normed.to(hidden.dtype) * norm.weight


def _plain_rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sines.unsqueeze(1)


def _norm(norm: NormParts, hidden: Tensor) -> Tensor:
    return cast(Tensor, _Norm.apply(hidden, norm.weight, norm.eps, norm.offset))  # type: ignore[no-untyped-call]


def _add_norm(norm: NormParts, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    total, out = _AddNorm.apply(hidden, delta, norm.weight, norm.eps, norm.offset)  # type: ignore[no-untyped-call]
    return total, out
