"""Fused model: all decoder layers with few kernels, on the modules' own weights. CUDA only.

Owns how prefill and decode steps go through layers whose parts `model.layer_parts` found and `model.fused_layers`
proved: eight kernels a layer, with qkv and gate-up projections merged (`merged_linear`). Knows nothing of requests and
sampling. The caller compares the result with the modules.
"""

from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from treadle.engine.native.attention_metadata import PrefillMetadata
from treadle.engine.native.cache_kernels import norm_rope_and_cache
from treadle.engine.native.input_batch import InputBatch
from treadle.engine.native.kv_cache import PagedKVCache
from treadle.engine.native.merged_linear import MergedLinear
from treadle.engine.native.paged_attention import HeadShape, PagedRows, attend_paged
from treadle.model.attention import AttentionOptions
from treadle.model.fused_layers import FusedForward, find_fused
from treadle.model.kernels import Norm, gate_rows, norm_rows
from treadle.model.layer_parts import NormParts, find_norm

if TYPE_CHECKING:
    from transformers import PreTrainedModel


RopeTable = tuple[Tensor, Tensor]
"""Cosines and sines of every position: [length, head size] each."""


@dataclass(frozen=True, slots=True)
class _FusedLayer:
    number: int
    qkv: MergedLinear
    out: MergedLinear
    gate_up: MergedLinear
    down: MergedLinear
    activation: int
    before_attention: NormParts
    after_attention: NormParts | None
    before_mlp: NormParts
    after_mlp: NormParts | None
    shape: HeadShape
    angles: RopeTable


class FusedModel:
    """A decoder from token ids to its last hidden states. Built by `create`."""

    def __init__(
        self, module: "PreTrainedModel", cache: PagedKVCache, layers: list[_FusedLayer], norm: NormParts
    ) -> None:
        self._embed = cast(Any, module).get_input_embeddings()
        self._cache = cache
        self._layers = layers
        self._norm = norm

    @classmethod
    def create(cls, module: "PreTrainedModel", cache: PagedKVCache) -> "FusedModel | None":
        """None where the decoder has parts that we do not know. What it computes is for the caller to compare."""
        decoder = cast(Any, module).get_decoder()
        fused, norm = find_fused(module), find_norm(getattr(decoder, "norm", None))
        angles = _rope_tables(module, cache.length + 1, cache.kv.shape[-1])
        if not fused or norm is None or angles is None or not all(_biases_agree(one) for one in fused):
            return None
        kv_heads = cache.kv.shape[3]
        layers = [_fuse_layer(at, one, angles[one.parts.attention], kv_heads) for at, one in enumerate(fused)]
        return cls(module, cache, layers, norm)

    def merge(self) -> bool:
        """Merge weights that were replaced since; whether there were any."""
        return any(
            [part.merge() for layer in self._layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        )

    def prefill(self, metadata: PrefillMetadata) -> None:
        """Compute keys and values of the chunks' tokens into the cache."""
        hidden = self._embed(metadata.ids_T)
        normed = norm_rows(hidden, _kernel_norm(self._layers[0].before_attention))
        for layer in self._layers:
            held = self._cache.layer(layer.number)
            heads = norm_rope_and_cache(
                layer.qkv(normed),
                held,
                metadata.pages_T,
                metadata.offsets_T,
                metadata.positions_T,
                layer.angles,
                layer.shape,
            )
            if layer is self._layers[-1]:
                return
            shape = layer.shape
            options = AttentionOptions(shape.scaling, shape.window, shape.softcap)
            mixed = metadata.attend_heads(layer.number, *heads, options)
            normed = self._finish(layer, hidden, mixed.flatten(1))

    def decode(self, rows: InputBatch, count: int) -> Tensor:
        """The last hidden states after the next token of the first `count` rows: [count, hidden]."""
        hidden = self._embed(rows.last_id[:count])
        cache = self._cache
        paged_rows = PagedRows(cache.table, rows.active.view(torch.uint8), rows.length, cache.null_page)
        normed = norm_rows(hidden, _kernel_norm(self._layers[0].before_attention))
        for layer in self._layers:
            held = cache.layer(layer.number)
            mixed = attend_paged(layer.qkv(normed), held, paged_rows, layer.angles, layer.shape)
            normed = self._finish(layer, hidden, mixed)
        return normed

    def _finish(self, layer: _FusedLayer, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The rest of a layer after attention. Adds to `hidden`, and returns what the next one reads."""
        delta = layer.out(mixed)
        normed = norm_rows(
            hidden,
            _kernel_norm(layer.before_mlp),
            delta=delta,
            post=_optional_norm(layer.after_attention),
            total=hidden,
        )
        gate, up = layer.gate_up(normed).chunk(2, dim=1)
        delta = layer.down(gate_rows(gate, up, layer.activation))
        last = layer is self._layers[-1]
        following = self._norm if last else self._layers[layer.number + 1].before_attention
        return norm_rows(
            hidden, _kernel_norm(following), delta=delta, post=_optional_norm(layer.after_mlp), total=hidden
        )


def _fuse_layer(number: int, fused: FusedForward, angles: RopeTable, kv_heads: int) -> _FusedLayer:
    parts, options = fused.parts, fused.options
    attention, mlp = parts.attention, parts.mlp
    shape = HeadShape(
        attention.q_proj.out_features // parts.head_size,
        kv_heads,
        parts.head_size,
        parts.head_size**-0.5 if options.scaling is None else options.scaling,
        options.window,
        options.softcap,
        _optional_norm(parts.query),
        _optional_norm(parts.key),
    )
    return _FusedLayer(
        number,
        MergedLinear(attention.q_proj, attention.k_proj, attention.v_proj),
        MergedLinear(attention.o_proj),
        MergedLinear(mlp.gate_proj, mlp.up_proj),
        MergedLinear(mlp.down_proj),
        parts.activation,
        parts.before_attention,
        parts.after_attention,
        parts.before_mlp,
        parts.after_mlp,
        shape,
        angles,
    )


def _biases_agree(fused: FusedForward) -> bool:
    """Whether projections that become one agree about having a bias."""
    attention, mlp = fused.parts.attention, fused.parts.mlp
    groups = ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj))
    return all(len({module.bias is None for module in group}) == 1 for group in groups)


@torch.no_grad()
def _rope_tables(module: "PreTrainedModel", length: int, size: int) -> dict[nn.Module, RopeTable] | None:
    """The rotation in each layer, as the model's own module computes it; one table for each kind of layer."""
    decoder = cast(Any, module).get_decoder()
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        return None
    positions = torch.arange(length, device=module.device).unsqueeze(0)
    like = torch.empty((1, length, 1), dtype=module.dtype, device=module.device)
    kinds = (
        getattr(module.config, "layer_types", None) if "layer_type" in signature(rotary.forward).parameters else None
    )
    tables: dict[str | None, RopeTable] = {}
    for kind in set(kinds or [None]):
        cosines, sines = rotary(like, positions) if kind is None else rotary(like, positions, kind)
        tables[kind] = (cosines[0].contiguous(), sines[0].contiguous())
    if any(cosines.shape != (length, size) for cosines, _ in tables.values()):
        return None
    return {layer.self_attn: tables[kinds[at] if kinds else None] for at, layer in enumerate(decoder.layers)}


def _kernel_norm(norm: NormParts) -> Norm:
    return Norm(norm.weight, norm.eps, norm.offset)


def _optional_norm(norm: NormParts | None) -> Norm | None:
    return None if norm is None else _kernel_norm(norm)
