"""Who sees whom while sampling: plans for treadle's attention that read and write the slot cache.

Owns the two ways a forward uses the cache: `PrefillPlan` for many tokens of some sequences, `DecodePlan` for one token
of each row. Refuses to know requests and sampling. Invariant: on CPU in float32 the bits a sequence gets do not depend
on what else is in the forward.

Shapes: T packed tokens, B rows, H query heads, K key heads, G = H / K, D head size, P places in the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from treadle.engine.native.cache import SlotCache, to_device
from treadle.model.attention import VarlenRanges, attend_causally, attend_varlen, flash_takes


def layer_of(module: nn.Module) -> int:
    """Which layer an attention module belongs to; transformers numbers them."""
    return cast(int, module.layer_idx)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence to be computed: those from `start` on; the ones before are in the slot already."""

    slot: int
    start: int
    ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class PrefillPlan:
    """Tokens of several sequences in one row of T, filled up with tokens that nobody sees."""

    def __init__(self, cache: SlotCache, pieces: Sequence[Piece], total: int) -> None:
        self._cache = cache
        self._pieces = pieces
        self._device = cache.kv.device
        padding = total - sum(len(piece.ids) for piece in pieces)
        slots = [piece.slot for piece in pieces for _ in piece.ids] + [0] * padding
        places = [at for piece in pieces for at in range(piece.start, piece.end)] + [cache.dump] * padding
        self._lines = cache.lines(self._tensor(slots), self._tensor(places))
        self.ids_T = self._tensor([at for piece in pieces for at in piece.ids] + [0] * padding)
        self.positions_T = self._tensor(places[: total - padding] + [0] * padding)
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        self._ranges: VarlenRanges | None = None
        self._context: tuple[Tensor, Tensor] | None = None

    def _tensor(self, numbers: list[int], dtype: torch.dtype = torch.long) -> Tensor:
        return to_device(numbers, self._device, dtype)

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
        layer = layer_of(module)
        self._cache.write(layer, self._lines, key, value)
        keys, values = self._cache.kv[layer]
        query_T = query[0].transpose(0, 1)
        if query_T.is_cuda and softcap is None and flash_takes(query_T):
            out_T = self._attend_packed(query_T, keys, values, scaling, sliding_window)
        else:
            out_T = self._attend_each(query_T, keys, values, scaling, sliding_window, softcap)
        return out_T.unsqueeze(0)

    def _attend_each(
        self,
        query_T: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """One sequence at a time, so that shapes depend on that sequence alone."""
        out_T, first = torch.zeros_like(query_T), 0
        for piece in self._pieces:
            last = first + len(piece.ids)
            heads = query_T[first:last].transpose(0, 1).unsqueeze(0)
            held = slice(piece.slot, piece.slot + 1)
            mask = self._mask(piece, window)
            out_T[first:last] = attend_causally(
                heads.contiguous(),
                keys[held, :, : piece.end],
                values[held, :, : piece.end],
                scaling=scaling,
                softcap=softcap,
                mask=mask,
            )[0]
            first = last
        return out_T

    def _mask(self, piece: Piece, window: int | None) -> Tensor:
        """[tokens, places]: true where a token sees a place; the same for all layers with the same window."""
        which = (piece.start, piece.end, window)
        if which not in self._masks:
            places = torch.arange(piece.end, device=self._device)
            ago = places[piece.start :, None] - places
            self._masks[which] = (ago >= 0) & (ago < (window or piece.end))
        return self._masks[which]

    def _attend_packed(
        self, query_T: Tensor, keys: Tensor, values: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """All sequences in one flash attention over the places that they see."""
        if self._ranges is None or self._context is None:
            self._ranges, self._context = self._find_context()
        slots_P, places_P = self._context
        real = sum(len(piece.ids) for piece in self._pieces)
        out_T = torch.zeros_like(query_T)
        out_T[:real] = attend_varlen(
            query_T[:real],
            keys[slots_P, :, places_P],
            values[slots_P, :, places_P],
            self._ranges,
            scaling=scaling,
            window=window,
        )
        return out_T

    def _find_context(self) -> tuple[VarlenRanges, tuple[Tensor, Tensor]]:
        slots = [piece.slot for piece in self._pieces for _ in range(piece.end)]
        places = [at for piece in self._pieces for at in range(piece.end)]
        offsets = [[0], [0]]
        for piece in self._pieces:
            offsets[0].append(offsets[0][-1] + len(piece.ids))
            offsets[1].append(offsets[1][-1] + piece.end)
        ranges = VarlenRanges(
            self._tensor(offsets[0], torch.int32),
            self._tensor(offsets[1], torch.int32),
            max(len(piece.ids) for piece in self._pieces),
            max(piece.end for piece in self._pieces),
        )
        return ranges, (self._tensor(slots), self._tensor(places))


class DecodePlan:
    """One token of each of the first B slots, written at `places` and seeing the `lengths` places before and with it.

    `span` bounds every length, and is a multiple of the rounding: on CPU the places up to there are read and masked.
    """

    def __init__(self, cache: SlotCache, places_B: Tensor, lengths_B: Tensor, span: int) -> None:
        self._cache = cache
        self._lines = cache.lines(torch.arange(len(places_B), device=places_B.device), places_B)
        self._lengths_B = lengths_B
        self._span = span
        self._masks: dict[int | None, Tensor] = {}

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
        layer = layer_of(module)
        self._cache.write(layer, self._lines, key, value)
        keys, values = self._cache.kv[layer]
        rows, kv_heads, span = len(self._lengths_B), keys.shape[1], self._span
        query_B = query[0].transpose(0, 1).reshape(rows, kv_heads, -1, query.shape[-1])
        out = attend_causally(
            query_B,
            keys[:rows, :, :span],
            values[:rows, :, :span],
            scaling=scaling,
            softcap=softcap,
            mask=self._mask(sliding_window, query.dtype, as_bias=softcap is None),
        )
        return out.transpose(1, 2).flatten(1, 2).unsqueeze(0)

    def _mask(self, window: int | None, dtype: torch.dtype, *, as_bias: bool) -> Tensor:
        """[B, 1, 1, span]; the query heads of one key head stand where queries do, and see the same."""
        if window not in self._masks:
            places = torch.arange(self._span, device=self._lengths_B.device)
            lengths = self._lengths_B.unsqueeze(1)
            seen = places < lengths
            if window is not None:
                seen &= places >= lengths - window
            seen = seen[:, None, None]
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
            self._masks[window] = bias if as_bias else seen
        return self._masks[window]
