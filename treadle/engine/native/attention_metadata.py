"""Attention metadata for sampling: which tokens attend to which, over the paged KV cache.

Owns the two ways a forward uses the cache: `PrefillMetadata` for many tokens of some sequences, `DecodeMetadata` for
one token of each row. Refuses to know requests and sampling. Invariant: on CPU in float32 the bits a sequence gets do
not depend on what else is in the forward.

Shapes: T packed tokens, B rows, H query heads, K key heads, G = H / K, D head size, P slots in the cache.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from treadle.engine.native.kv_cache import PagedKVCache, to_device
from treadle.model.attention import AttentionOptions, VarlenRanges, attend_causally, attend_varlen, flash_takes


def layer_of(module: nn.Module) -> int:
    """Which layer an attention module belongs to; transformers numbers them."""
    return cast(int, module.layer_idx)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens of one sequence to be computed: those from `start` on; the ones before are in the row's pages already."""

    row: int
    start: int
    ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class PrefillMetadata:
    """Prefill of several sequences, packed into T tokens; the padding is seen by no token."""

    def __init__(self, cache: PagedKVCache, chunks: Sequence[PrefillChunk], total: int) -> None:
        self._cache = cache
        self._chunks = chunks
        self._device = cache.kv.device
        self._real = sum(len(chunk.ids) for chunk in chunks)
        padding = total - self._real
        shapes = [(chunk.row, chunk.start, len(chunk.ids)) for chunk in chunks]
        rows_T, self.positions_T = _spread(self._tensor([*shapes, (0, 0, padding)]), total)
        self.positions_T[self._real :] = 0
        self.pages_T, self.offsets_T = cache.find_slots(rows_T, self.positions_T)
        self.pages_T[self._real :] = cache.null_page
        ids = array("q", chain.from_iterable(chunk.ids for chunk in chunks))
        ids.extend([0] * padding)
        self.ids_T = self._tensor(ids)
        self._slot_mapping: Tensor | None = None
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        self._ranges: VarlenRanges | None = None
        self._context: tuple[Tensor, Tensor] | None = None

    def _tensor(self, numbers: Sequence[Any], dtype: torch.dtype = torch.long) -> Tensor:
        return to_device(numbers, self._device, dtype)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        layer = layer_of(module)
        if self._slot_mapping is None:
            self._slot_mapping = self._cache.slot_mapping(self.pages_T, self.offsets_T)
        self._cache.write(layer, self._slot_mapping, key, value)
        query_T, key_T, value_T = (heads[0].transpose(0, 1) for heads in (query, key, value))
        return self.attend_heads(layer, query_T, key_T, value_T, options).unsqueeze(0)

    def attend_heads(
        self, layer: int, query_T: Tensor, key_T: Tensor, value_T: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention of [T, H, D] to what the pages hold, which has the new keys and values in it already: [T, H, D]."""
        if not query_T.is_cuda or not options.is_plain or not flash_takes(query_T):
            return self._attend_each(query_T, layer, options)
        if any(chunk.start for chunk in self._chunks):
            return self._attend_packed(query_T, *self._cache.layer(layer), options)
        if self._ranges is None:
            self._ranges = self._find_ranges([chunk.end for chunk in self._chunks])
        return attend_varlen(query_T, key_T, value_T, self._ranges, options)

    def _attend_each(self, query_T: Tensor, layer: int, options: AttentionOptions) -> Tensor:
        """One sequence at a time, so that shapes depend on that sequence alone."""
        out_T, first = torch.zeros_like(query_T), 0
        for chunk in self._chunks:
            last = first + len(chunk.ids)
            heads = query_T[first:last].transpose(0, 1).unsqueeze(0)
            keys, values = self._cache.read(layer, slice(chunk.row, chunk.row + 1), chunk.end)
            mask = self._mask(chunk, options.window)
            out_T[first:last] = attend_causally(heads.contiguous(), keys, values, options, mask)[0]
            first = last
        return out_T

    def _mask(self, chunk: PrefillChunk, window: int | None) -> Tensor:
        """[tokens, slots]: true where a token sees a slot; the same for all layers with the same window."""
        which = (chunk.start, chunk.end, window)
        if which not in self._masks:
            slots = torch.arange(chunk.end, device=self._device)
            ago = slots[chunk.start :, None] - slots
            self._masks[which] = (ago >= 0) & (ago < (window or chunk.end))
        return self._masks[which]

    def _attend_packed(self, query_T: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """All sequences in one flash attention over the slots that they see."""
        if self._ranges is None or self._context is None:
            shapes = [(chunk.row, 0, chunk.end) for chunk in self._chunks]
            padding = len(query_T) - self._real
            spread = _spread(self._tensor([*shapes, (0, 0, padding)]), sum(at for *_, at in shapes) + padding)
            self._context = self._cache.find_slots(*spread)
            self._ranges = self._find_ranges([chunk.end for chunk in self._chunks])
        pages_P, offsets_P = self._context
        key_P, value_P = (kind[pages_P, :, offsets_P] for kind in (keys, values))
        return attend_varlen(query_T, key_P, value_P, self._ranges, options)

    def _find_ranges(self, seen: Sequence[int]) -> VarlenRanges:
        """Where sequences begin among the tokens, and among the slots that they see; padding is one more sequence."""
        queries = [len(chunk.ids) for chunk in self._chunks]
        padding = len(self.ids_T) - self._real
        ends = [[0, *accumulate([*lengths, padding])] for lengths in (queries, seen)]
        of_queries, of_keys = (self._tensor(offset, torch.int32) for offset in ends)
        return VarlenRanges(of_queries, of_keys, max(*queries, padding), max(*seen, padding))


def _spread(table: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """From [chunks, 3] of row, start and tokens to the row and the slot of each token: [total] each."""
    row, start, tokens = table.unbind(1)
    first = tokens.cumsum(0) - tokens
    chunk_T = torch.repeat_interleave(tokens, output_size=total)
    slot_T = torch.arange(total, device=table.device) + (start - first)[chunk_T]
    return row[chunk_T], slot_T


class DecodeMetadata:
    """One token of each of the first B rows, written at its position and seeing all slots up to there.

    Inactive rows write to the null page, and see their first slot. `span` bounds every length, and is a
    multiple of the rounding: on CPU the slots up to there are read and masked.
    """

    def __init__(self, cache: PagedKVCache, active_B: Tensor, positions_B: Tensor, span: int) -> None:
        self._cache = cache
        slots_B = torch.where(active_B, positions_B, 0)
        pages_B, offsets_B = cache.find_slots(torch.arange(len(slots_B), device=slots_B.device), slots_B)
        self._slot_mapping = cache.slot_mapping(torch.where(active_B, pages_B, cache.null_page), offsets_B)
        self._lengths_B = slots_B + 1
        self._span = span
        self._masks: dict[tuple[int | None, bool], Tensor] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        layer = layer_of(module)
        self._cache.write(layer, self._slot_mapping, key, value)
        rows, kv_heads = len(self._lengths_B), key.shape[1]
        keys, values = self._cache.read(layer, slice(0, rows), self._span)
        query_B = query[0].transpose(0, 1).reshape(rows, kv_heads, -1, query.shape[-1])
        mask = self._mask(options.window, query.dtype, as_bias=options.is_plain)
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.view(1, kv_heads, -1, 1))
        out = attend_causally(query_B, keys, values, options, mask)
        return out.transpose(1, 2).flatten(1, 2).unsqueeze(0)

    def _mask(self, window: int | None, dtype: torch.dtype, *, as_bias: bool) -> Tensor:
        """[B, 1, 1, span]; the query heads of one key head stand where queries do, and see the same."""
        if (window, as_bias) not in self._masks:
            slots = torch.arange(self._span, device=self._lengths_B.device)
            lengths = self._lengths_B.unsqueeze(1)
            seen = slots < lengths
            if window is not None:
                seen &= slots >= lengths - window
            seen = seen[:, None, None]
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
            self._masks[window, as_bias] = bias if as_bias else seen
        return self._masks[window, as_bias]
