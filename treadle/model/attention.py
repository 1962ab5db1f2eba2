"""Attention of every model that treadle runs, for training and for sampling.

Owns the name "treadle" in transformers' attention interface: the caller of a model's forward passes attention metadata,
which says which tokens attend to which. Packed (varlen) sequences use flash attention where that applies. No mask is
ever built by transformers. Refuses to know about layers and weights.
Invariant: what the metadata returns for one sequence depends on that sequence alone, up to rounding.

Shapes: T tokens of all sequences, H query heads, K key heads, D head size; N sequences padded to L in one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from treadle.errors import MisuseError

NAME = "treadle"
"""The attention implementation to ask transformers for."""

_SIMILAR = 0.8
"""Sequences share a padded group when the shorter has at least this fraction of the longer one's tokens."""

_NOT_GIVEN = object()
"""In place of a window, where a layer says nothing of one to its attention."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """What a layer asks of its attention."""

    scaling: float | None = None
    """What scores are multiplied by; None: one over the root of the head size."""
    window: int | None = None
    """How many tokens a token sees, itself among them; None: all before it."""
    softcap: float | None = None
    """The bound that scores are bent to stay within."""
    sinks: Tensor | None = None
    """A further logit of each query head, [H], that takes its share of the softmax and gives nothing."""

    @property
    def is_plain(self) -> bool:
        """Whether fused kernels offer all of it: scores are not capped, and the softmax has no sinks."""
        return self.softcap is None and self.sinks is None

    def within(self, longest: int) -> "AttentionOptions":
        """The options for sequences of up to `longest` tokens: a window that hides nothing of them is left out."""
        return self if self.window is None or self.window < longest else replace(self, window=None)


class AttentionMetadata(Protocol):
    """Which tokens see which, for one forward."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of one layer: [batch, heads, tokens, head size] in, [batch, tokens, heads, head size] out."""
        ...


def register() -> None:
    """Make the attention known to transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    treadle_metadata: AttentionMetadata | None = None,
    scaling: float | None = None,
    sliding_window: object = _NOT_GIVEN,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    if treadle_metadata is None:
        raise MisuseError(
            f"the model does not hand keyword arguments on to {type(module).__name__}: it has no metadata"
        )
    if attention_mask is not None:
        raise MisuseError(f"{type(module).__name__} builds an attention mask of its own, which is not read here")
    size, value_size = query.shape[-1], value.shape[-1]
    if size != value_size:  # latent attention: keys and values have heads of two sizes, metadata and caches of one
        scaling = size**-0.5 if scaling is None else scaling
        query, key, value = (
            functional.pad(x, (0, max(0, max(size, value_size) - x.shape[-1]))) for x in (query, key, value)
        )
    window = _find_window(module) if sliding_window is _NOT_GIVEN else cast("int | None", sliding_window)
    out = treadle_metadata.attend(module, query, key, value, AttentionOptions(scaling, window, softcap, s_aux))
    return out[..., :value_size], None


def _find_window(module: nn.Module) -> int | None:
    """The window of a layer that tells it to its mask alone (Qwen2-MoE, PhiMoE), and no mask is built here."""
    own = getattr(module, "sliding_window", _NOT_GIVEN)
    if own is _NOT_GIVEN:
        config = getattr(module, "config", None)
        varies = getattr(config, "layer_types", None) is not None
        own = None if varies else getattr(config, "sliding_window", None)
    return own if isinstance(own, int) else None


@dataclass(frozen=True, slots=True)
class _PaddedGroup:
    """Sequences of similar length, side by side. Padding is on the right, so causality alone hides it."""

    gather: Tensor
    """[N * L] where each padded place finds its token."""
    count: int
    length: int


class PackedMetadata:
    """Several sequences in one row of T tokens; each attends causally to itself."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        assert lengths and all(length > 0 for length in lengths), "a packed row holds sequences with tokens in them"
        self.lengths = tuple(lengths)
        self._device = torch.device(device)
        self._groups: tuple[_PaddedGroup, ...] | None = None
        self._restore: Tensor | None = None
        self._offsets: Tensor | None = None
        if self._device.type == "cuda":
            starts = torch.tensor((0, *self.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self._offsets = starts.to(self._device)

    def positions(self) -> Tensor:
        """The position of each token in its own sequence: [T]."""
        return torch.cat([torch.arange(length) for length in self.lengths]).to(self._device)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        # Squeezed, not indexed: the gradient of an index is a copy into zeros.
        query_T, key_T, value_T = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        options = options.within(max(self.lengths))
        if self._offsets is not None and options.is_plain and flash_takes(query_T):
            ranges = VarlenRanges(self._offsets, self._offsets, max(self.lengths), max(self.lengths))
            out_T = attend_varlen(query_T, key_T, value_T, ranges, options)
        elif len(self.lengths) == 1:
            query, key, value = (tensor.unsqueeze(0).transpose(1, 2) for tensor in (query_T, key_T, value_T))
            out_T = attend_causally(query, key, value, options)[0]
        else:
            out_T = self._attend_padded(query_T, key_T, value_T, options)
        return out_T.unsqueeze(0)

    def _attend_padded(self, query_T: Tensor, key_T: Tensor, value_T: Tensor, options: AttentionOptions) -> Tensor:
        groups, restore = self._padding()
        parts = []
        for group in groups:
            query, key, value = (
                tensor.index_select(0, group.gather).view(group.count, group.length, *tensor.shape[1:]).transpose(1, 2)
                for tensor in (query_T, key_T, value_T)
            )
            parts.append(attend_causally(query, key, value, options).flatten(0, 1))
        return torch.cat(parts).index_select(0, restore)

    def _padding(self) -> tuple[tuple[_PaddedGroup, ...], Tensor]:
        """The groups, and where each token's result is in all groups together; computed by the first layer."""
        if self._groups is None or self._restore is None:
            self._groups, self._restore = _group_similar(self.lengths, self._device)
        return self._groups, self._restore


def similar(sequences: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Sequences of similar length together, the longest first; `lengths` are those of all sequences."""
    order, groups = sorted(sequences, key=lambda at: -lengths[at]), []
    while order:
        members = [at for at in order if lengths[at] >= _SIMILAR * lengths[order[0]]]
        groups.append(members)
        order = order[len(members) :]
    return groups


def _group_similar(lengths: Sequence[int], device: torch.device) -> tuple[tuple[_PaddedGroup, ...], Tensor]:
    starts = torch.tensor((0, *lengths)).cumsum(0).tolist()
    restore = torch.empty(starts[-1], dtype=torch.long)
    groups, offset = [], 0
    for members in similar(range(len(lengths)), lengths):
        longest = lengths[members[0]]
        for row, at in enumerate(members):
            first = offset + row * longest
            restore[starts[at] : starts[at + 1]] = torch.arange(first, first + lengths[at])
        columns = torch.arange(longest)
        inside = torch.tensor([lengths[at] - 1 for at in members])[:, None]
        gather = torch.tensor([starts[at] for at in members])[:, None] + torch.minimum(columns, inside)
        groups.append(_PaddedGroup(gather.flatten().to(device), len(members), longest))
        offset += len(members) * longest
    return tuple(groups), restore.to(device)


def attend_causally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention of [N, H, L, D] to [N, K, L, D]; the result is [N, L, H, D]. A mask replaces causality and window.

    Sinks may also be anything that is one for each query when spread over [N, H, L, 1].
    """
    if mask is None and (options.window is not None or not options.is_plain):
        mask = causal_mask(query.shape[2], options.window, query.device)
    if not options.is_plain:
        assert mask is not None
        return _attend_written_out(query, key, value, options, mask).transpose(1, 2)
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=options.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L]: true where a token sees another: itself and those before it, `window` of them at most."""
    at = torch.arange(length, device=device)
    ago = at[:, None] - at
    return (ago >= 0) & (ago < (window or length))


def _attend_written_out(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, mask: Tensor) -> Tensor:
    """Attention whose scores are capped, or whose softmax has sinks, which no fused kernel offers."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scaling, softcap, sinks = options.scaling, options.softcap, options.sinks
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        spread = sinks.view(-1, 1, 1) if sinks.ndim == 1 else sinks
        scores = torch.cat([scores, spread.to(scores.dtype).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)
    return weights[..., : key.shape[2]].to(query.dtype) @ value


def flash_takes(query_T: Tensor) -> bool:
    """Whether torch's flash attention serves such heads."""
    size = query_T.shape[-1]
    return query_T.dtype in (torch.bfloat16, torch.float16) and size <= 256 and size % 8 == 0


@dataclass(frozen=True, slots=True)
class VarlenRanges:
    """Where each sequence starts among the queries and among the keys; its last query sees all its keys."""

    query_offsets: Tensor
    key_offsets: Tensor
    longest_query: int
    longest_key: int


def attend_varlen(
    query_T: Tensor, key_T: Tensor, value_T: Tensor, ranges: VarlenRanges, options: AttentionOptions
) -> Tensor:
    """Flash attention over packed sequences, differentiable: torch's public function where it can do all we need."""
    assert options.is_plain, "no fused kernel has soft caps or sinks"
    attend, scaling, window = _public_varlen(), options.scaling, options.window
    left = -1 if window is None else window - 1
    tensors = (query_T, key_T, value_T, ranges.query_offsets, ranges.key_offsets)
    longest = (ranges.longest_query, ranges.longest_key)
    if attend is not None:
        shared = query_T.shape[1] != key_T.shape[1]
        out = attend(*tensors, *longest, scale=scaling, window_size=(left, 0), enable_gqa=shared)
        return cast(Tensor, out)
    out, *_ = torch.ops.aten._flash_attention_forward(
        *tensors, *longest, 0.0, window is None, False, scale=scaling, window_size_left=left, window_size_right=0
    )
    return cast(Tensor, out)


@cache
def _public_varlen() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = signature(varlen_attn).parameters.keys()
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= known else None
