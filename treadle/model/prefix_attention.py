"""Attention over a prefix tree: sequences that begin with the same tokens, whose shared prefix is computed once.

A packed forward holds segments instead of whole sequences. A segment continues another one, its parent, or starts a
sequence; its tokens attend to themselves causally and to all tokens before them on the way from the root. So n answers
to one prompt are n + 1 segments. Keys and values of a segment's path are gathered by index, and queries are the
segment's own: flash attention with more keys than queries where that applies, padded attention elsewhere. Windows, soft
caps and sinks are those of whole sequences. The gathered copies are not kept for backward, but gathered again.
Invariant: hidden states and gradients are those of the sequences packed one after the other, up to rounding.

Shapes: T tokens of all segments, E tokens of all paths, H query heads, K key heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treadle.model.attention import AttentionOptions, VarlenRanges, attend_causally, flash_takes, similar

_ROOT = -1


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Segments of sequences in the order of a forward."""

    lengths: tuple[int, ...]
    """Tokens of each segment."""
    parents: tuple[int, ...]
    """The segment that each one continues, which comes before it; -1 where a sequence starts."""

    def starts(self) -> list[int]:
        """Where each segment starts among the tokens of the forward; at last, how many there are."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        return starts

    def depths(self) -> list[int]:
        """Tokens before each segment on its path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == _ROOT else depths[parent] + self.lengths[parent])
        return depths

    def paths(self) -> list[Tensor]:
        """For each segment, the tokens from its root to its own last one, as indices into the forward."""
        paths: list[Tensor] = []
        for start, length, parent in zip(self.starts(), self.lengths, self.parents, strict=False):
            own = torch.arange(start, start + length)
            paths.append(own if parent == _ROOT else torch.cat((paths[parent], own)))
        return paths


@dataclass(frozen=True, slots=True)
class _PaddedSegments:
    """Segments of similar length with as many tokens before them, side by side; padding is on the right."""

    queries: Tensor
    """[N * L] where each padded place finds its query."""
    keys: Tensor
    """[N * (depth + L)]"""
    count: int
    length: int
    depth: int

    def mask(self, window: int | None) -> Tensor | None:
        """[L, depth + L]: which keys a query sees; None where plain causality says it."""
        if not self.depth and window is None:
            return None
        at = torch.arange(self.depth + self.length, device=self.queries.device)
        ago = at[self.depth :, None] - at
        return (ago >= 0) & (ago < (window or len(at)))


class PrefixTreeMetadata:
    """Attention metadata of segments that share prefixes."""

    def __init__(self, tree: PrefixTree, device: torch.device | str = "cpu") -> None:
        assert tree.lengths and all(length > 0 for length in tree.lengths), "segments have tokens"
        self._device = torch.device(device)
        self._depths = tree.depths()
        self._tree = tree
        self._longest = max(depth + length for depth, length in zip(self._depths, tree.lengths, strict=True))
        self._padded: tuple[tuple[_PaddedSegments, ...], Tensor] | None = None
        self._flash: tuple[Tensor, VarlenRanges] | None = None

    def positions(self) -> Tensor:
        """The position of each token in its sequence: [T]."""
        pairs = zip(self._depths, self._tree.lengths, strict=True)
        return torch.cat([torch.arange(depth, depth + length) for depth, length in pairs]).to(self._device)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        query_T, key_T, value_T = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        options = options.within(self._longest)
        if query_T.is_cuda and options.is_plain and flash_takes(query_T):
            index_E, ranges = self._varlen()
            flash: Any = _FlashOverPaths
            out_T = cast(Tensor, flash.apply(query_T, key_T, value_T, index_E, ranges, options))
        else:
            out_T = self._attend_padded(query_T, key_T, value_T, options)
        return out_T.unsqueeze(0)

    def _attend_padded(self, query_T: Tensor, key_T: Tensor, value_T: Tensor, options: AttentionOptions) -> Tensor:
        groups, restore = self._padding()
        parts = []
        for group in groups:
            query, key, value = (
                _gather(tensor, index).view(group.count, -1, *tensor.shape[1:]).transpose(1, 2)
                for tensor, index in ((query_T, group.queries), (key_T, group.keys), (value_T, group.keys))
            )
            parts.append(attend_causally(query, key, value, options, group.mask(options.window)).flatten(0, 1))
        return torch.cat(parts).index_select(0, restore)

    def _padding(self) -> tuple[tuple[_PaddedSegments, ...], Tensor]:
        """The groups, and where each token's result is in all groups together; computed by the first layer."""
        if self._padded is None:
            self._padded = _pad_segments(self._tree, self._depths, self._device)
        return self._padded

    def _varlen(self) -> tuple[Tensor, VarlenRanges]:
        """The tokens of all paths, and which queries go with which of them; computed by the first layer."""
        if self._flash is None:
            tree, device, found = self._tree, self._device, self._tree.paths()
            paths = [len(path) for path in found]
            queries, keys = (
                torch.tensor((0, *lengths)).cumsum(0).to(torch.int32).to(device) for lengths in (tree.lengths, paths)
            )
            self._flash = torch.cat(found).to(device), VarlenRanges(queries, keys, max(tree.lengths), max(paths))
        return self._flash


def _pad_segments(
    tree: PrefixTree, depths: Sequence[int], device: torch.device
) -> tuple[tuple[_PaddedSegments, ...], Tensor]:
    starts, paths = tree.starts(), tree.paths()
    restore = torch.empty(starts[-1], dtype=torch.long)
    groups, offset = [], 0
    for depth in sorted(set(depths)):
        here = [at for at, other in enumerate(depths) if other == depth]
        for members in similar(here, tree.lengths):
            longest = tree.lengths[members[0]]
            for row, at in enumerate(members):
                first = offset + row * longest
                restore[starts[at] : starts[at + 1]] = torch.arange(first, first + tree.lengths[at])
            inside = torch.tensor([tree.lengths[at] for at in members])[:, None] - 1
            own = torch.minimum(torch.arange(longest), inside)
            queries = torch.tensor([starts[at] for at in members])[:, None] + own
            before = torch.stack([paths[at][:depth] for at in members])
            keys = torch.cat((before, queries), dim=1)
            padded = queries.flatten().to(device), keys.flatten().to(device)
            groups.append(_PaddedSegments(*padded, len(members), longest, depth))
            offset += len(members) * longest
    return tuple(groups), restore.to(device)


class _Gather(torch.autograd.Function):
    """Tokens by index, any of them several times. Gradients of copies are added up in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, values_T: Tensor, index_E: Tensor) -> Tensor:
        ctx.save_for_backward(index_E)
        ctx.tokens = len(values_T)
        return values_T.index_select(0, index_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_E: Tensor) -> tuple[Tensor, None]:
        (index_E,) = ctx.saved_tensors
        return _sum_copies(grad_E, index_E, ctx.tokens), None


def _gather(values_T: Tensor, index_E: Tensor) -> Tensor:
    return cast(Tensor, _Gather.apply(values_T, index_E))  # type: ignore[no-untyped-call]


def _sum_copies(grad_E: Tensor, index_E: Tensor, tokens: int) -> Tensor:
    """The gradient of each token: the sum over its copies."""
    wide = torch.promote_types(grad_E.dtype, torch.float32)
    total_T = torch.zeros((tokens, *grad_E.shape[1:]), dtype=wide, device=grad_E.device)
    return total_T.index_add_(0, index_E, grad_E.to(wide)).to(grad_E.dtype)


class _FlashOverPaths(torch.autograd.Function):
    """Flash attention of each segment's queries to the keys of its path: the last query sees all of them."""

    @staticmethod
    def forward(
        ctx: Any,
        query_T: Tensor,
        key_T: Tensor,
        value_T: Tensor,
        index_E: Tensor,
        ranges: VarlenRanges,
        options: AttentionOptions,
    ) -> Tensor:
        tensors = (query_T, key_T.index_select(0, index_E), value_T.index_select(0, index_E))
        out_T, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(
            *tensors, *_positional(ranges), 0.0, options.window is None, False, **_keywords(options)
        )
        ctx.save_for_backward(query_T, key_T, value_T, index_E, out_T, lse, seed, unused)
        ctx.ranges, ctx.options = ranges, options
        return cast(Tensor, out_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        query_T, key_T, value_T, index_E, out_T, lse, seed, unused = ctx.saved_tensors
        grad_query_T, *grads_E = torch.ops.aten._flash_attention_backward(
            grad_T.contiguous(),
            query_T,
            key_T.index_select(0, index_E),
            value_T.index_select(0, index_E),
            out_T,
            lse,
            *_positional(ctx.ranges),
            0.0,
            ctx.options.window is None,
            seed,
            unused,
            **_keywords(ctx.options),
        )
        grad_key_T, grad_value_T = (_sum_copies(grad_E, index_E, len(key_T)) for grad_E in grads_E)
        return grad_query_T, grad_key_T, grad_value_T, None, None, None


def _positional(ranges: VarlenRanges) -> tuple[Tensor, Tensor, int, int]:
    return ranges.query_offsets, ranges.key_offsets, ranges.longest_query, ranges.longest_key


def _keywords(options: AttentionOptions) -> dict[str, Any]:
    left = -1 if options.window is None else options.window - 1
    return {"scale": options.scaling, "window_size_left": left, "window_size_right": 0}
