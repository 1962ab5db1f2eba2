"""The decode step on a GPU: one Triton kernel for attention, and one CUDA graph for each row count.

Owns how a step is recorded and replayed. A step reads and changes the rows and the cache in place, so replaying the
graph is all it takes; nothing is copied in. What a step ended is copied to pinned memory while the next one already
runs: a row that ended takes part in one more step, in which it is not active and changes nothing.
Recording needs a model that decides nothing in Python; the few that do run the same step without graphs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treadle.engine.native.cache import SlotCache, round_up
from treadle.engine.native.decoder import Decoder
from treadle.engine.native.kernels import attend_rows
from treadle.engine.native.plans import layer_of
from treadle.engine.native.rows import Response

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_cuda: Any = torch.cuda
"""Its streams, events and graphs carry no types."""

_WARM_UPS = 2
"""Steps before a recording: kernels are compiled and libraries take their workspaces."""

_SYNCHRONOUS_ROPES = ("dynamic", "longrope")
"""Kinds of rotary embedding that look at positions from Python, which no graph can record."""


class FusedDecodePlan:
    """One token of each of the first B slots, in one kernel for each layer."""

    def __init__(self, cache: SlotCache, places_B: Tensor, lengths_B: Tensor) -> None:
        self._cache = cache
        self._places_B = places_B
        self._lengths_B = lengths_B

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
        keys, values = self._cache.kv[layer_of(module)]
        out = attend_rows(
            query,
            key,
            value,
            keys,
            values,
            self._places_B,
            self._lengths_B,
            scaling=scaling,
            window=sliding_window,
            softcap=softcap,
        )
        return out.unsqueeze(0)


class GraphDecoder(Decoder):
    """A decoder on CUDA."""

    def __init__(self, module: "PreTrainedModel", cache: SlotCache, row_step: int) -> None:
        super().__init__(module, cache, row_step)
        rope = getattr(module.config, "rope_parameters", None) or {}
        self._eager = rope.get("rope_type") in _SYNCHRONOUS_ROPES
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._ended = torch.zeros(cache.slots, dtype=torch.bool, device=cache.kv.device)
        self._pool: Any = None
        self._reader = _cuda.Stream(cache.kv.device)
        self._copies = [_Copy(cache.slots) for _ in range(2)]
        self._behind: _Copy | None = None

    def plan(self, places: Tensor, lengths: Tensor, span: int) -> FusedDecodePlan:
        return FusedDecodePlan(self.cache, places, lengths)

    @torch.inference_mode()
    def step(self, count: int, longest: int, *, filtered: bool) -> list[int]:
        """As in `Decoder`, except that it tells which rows ended in the step before."""
        rows = self._bucket(count)
        if self._eager:
            self._ended[:rows] = self.advance(rows, 0, filtered)
        else:
            self._graph(rows, filtered).replay()
        before, self._behind = self._behind, self._copy(rows)
        return [] if before is None else before.read()

    def settle(self) -> list[int]:
        before, self._behind = self._behind, None
        return [] if before is None else before.read()

    @torch.inference_mode()
    def read(self, slots: Sequence[int]) -> list[Response]:
        """As in `Decoder`; beside the step that is running, which does not touch rows that ended before it."""
        if self._behind is None:
            return self.rows.read(slots)
        with torch.cuda.stream(self._reader):
            return self.rows.read(slots)

    def _bucket(self, count: int) -> int:
        """Few row counts, so that few graphs are recorded: multiples of 16 up to 64, then of an eighth of the slots."""
        step = self.row_step if count <= 4 * self.row_step else round_up(max(64, self.cache.slots // 8), self.row_step)
        return min(round_up(count, step), self.cache.slots)

    def _copy(self, rows: int) -> "_Copy":
        copy = self._copies[0] if self._behind is self._copies[1] else self._copies[1]
        copy.start(self._ended[:rows])
        return copy

    def _graph(self, rows: int, filtered: bool) -> torch.cuda.CUDAGraph:
        if (rows, filtered) not in self._graphs:
            self._graphs[rows, filtered] = self._record(rows, filtered)
        return self._graphs[rows, filtered]

    def _record(self, rows: int, filtered: bool) -> torch.cuda.CUDAGraph:
        """Record a step while no row is active: then neither warm-up nor recording changes a row."""
        device = self.cache.kv.device
        active = self.rows.active.clone()
        self.rows.active.zero_()
        side = _cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._ended[:rows] = self.advance(rows, 0, filtered)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._ended[:rows] = self.advance(rows, 0, filtered)
        self._pool = self._pool or graph.pool()
        self.rows.active.copy_(active)
        return graph


class _Copy:
    """Which rows ended, on its way to the host."""

    def __init__(self, slots: int) -> None:
        self._host = torch.zeros(slots, dtype=torch.bool, pin_memory=True)
        self._arrived = _cuda.Event()
        self._rows = 0

    def start(self, ended: Tensor) -> None:
        self._rows = len(ended)
        self._host[: self._rows].copy_(ended, non_blocking=True)
        self._arrived.record()

    def read(self) -> list[int]:
        self._arrived.synchronize()
        found: list[int] = self._host[: self._rows].nonzero().flatten().tolist()
        return found
