"""The one attention of every model that treadle runs, for training and for sampling.

Owns the name "treadle" in transformers' attention interface: whoever calls a model's forward passes a plan, and the
plan says which tokens see which. No mask is ever built by transformers. Refuses to know about layers and weights.
Invariant: what a plan returns for one sequence depends on that sequence alone, up to rounding.

Shapes: T tokens of all sequences, H query heads, K key heads, D head size; N sequences padded to L in one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

NAME = "treadle"
"""The attention implementation to ask transformers for."""

_SIMILAR = 0.8
"""Sequences share a padded group when the shorter has at least this fraction of the longer one's tokens."""


class Plan(Protocol):
    """Which tokens see which, for one forward."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
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
    treadle_plan: Plan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    assert attention_mask is None, "the plan says who sees whom"
    assert others.get("s_aux") is None, "attention sinks are refused when the model is loaded"
    out = treadle_plan.attend(
        module, query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap
    )
    return out, None


@dataclass(frozen=True, slots=True)
class _PaddedGroup:
    """Sequences of similar length, side by side. Padding is on the right, so causality alone hides it."""

    gather: Tensor
    """[N * L] where each padded place finds its token."""
    count: int
    length: int


class PackedPlan:
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

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        # Squeezed, not indexed: the gradient of an index is a copy into zeros.
        query_T, key_T, value_T = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        window = sliding_window if sliding_window is not None and sliding_window < max(self.lengths) else None
        if self._offsets is not None and softcap is None and flash_takes(query_T):
            ranges = VarlenRanges(self._offsets, self._offsets, max(self.lengths), max(self.lengths))
            out_T = attend_varlen(query_T, key_T, value_T, ranges, scaling=scaling, window=window)
        elif len(self.lengths) == 1:
            heads = tuple(tensor.unsqueeze(0).transpose(1, 2) for tensor in (query_T, key_T, value_T))
            out_T = attend_causally(*heads, scaling=scaling, window=window, softcap=softcap)[0]
        else:
            out_T = self._attend_padded(query_T, key_T, value_T, scaling, window, softcap)
        return out_T.unsqueeze(0)

    def _attend_padded(
        self,
        query_T: Tensor,
        key_T: Tensor,
        value_T: Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        groups, restore = self._padding()
        parts = []
        for group in groups:
            padded = (
                tensor.index_select(0, group.gather).view(group.count, group.length, *tensor.shape[1:]).transpose(1, 2)
                for tensor in (query_T, key_T, value_T)
            )
            parts.append(attend_causally(*padded, scaling=scaling, window=window, softcap=softcap).flatten(0, 1))
        return torch.cat(parts).index_select(0, restore)

    def _padding(self) -> tuple[tuple[_PaddedGroup, ...], Tensor]:
        """The groups, and where each token's result is in all groups together; computed by the first layer."""
        if self._groups is None or self._restore is None:
            self._groups, self._restore = _group_similar(self.lengths, self._device)
        return self._groups, self._restore


def _group_similar(lengths: Sequence[int], device: torch.device) -> tuple[tuple[_PaddedGroup, ...], Tensor]:
    starts = torch.tensor((0, *lengths)).cumsum(0).tolist()
    order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
    restore = torch.empty(starts[-1], dtype=torch.long)
    groups, done, offset = [], 0, 0
    while done < len(order):
        longest = lengths[order[done]]
        members = [at for at in order[done:] if lengths[at] >= _SIMILAR * longest]
        for row, at in enumerate(members):
            first = offset + row * longest
            restore[starts[at] : starts[at + 1]] = torch.arange(first, first + lengths[at])
        columns = torch.arange(longest)
        inside = torch.tensor([lengths[at] - 1 for at in members])[:, None]
        gather = torch.tensor([starts[at] for at in members])[:, None] + torch.minimum(columns, inside)
        groups.append(_PaddedGroup(gather.flatten().to(device), len(members), longest))
        done, offset = done + len(members), offset + len(members) * longest
    return tuple(groups), restore.to(device)


def attend_causally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention of [N, H, L, D] to [N, K, L, D]; the result is [N, L, H, D]. A mask replaces causality."""
    if mask is None and (window is not None or softcap is not None):
        mask = causal_mask(query.shape[2], window, query.device)
    if softcap is not None:
        assert mask is not None
        return _attend_capped(query, key, value, scaling, softcap, mask).transpose(1, 2)
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L]: true where a token sees another: itself and those before it, `window` of them at most."""
    at = torch.arange(length, device=device)
    ago = at[:, None] - at
    return (ago >= 0) & (ago < (window or length))


def _attend_capped(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float, mask: Tensor
) -> Tensor:
    """Attention whose scores are capped, which no fused kernel offers."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1, dtype=torch.float32)
    return weights.to(query.dtype) @ value


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
    query_T: Tensor, key_T: Tensor, value_T: Tensor, ranges: VarlenRanges, *, scaling: float | None, window: int | None
) -> Tensor:
    """Flash attention over packed sequences, differentiable: torch's public function where it can do all we need."""
    attend = _public_varlen()
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
