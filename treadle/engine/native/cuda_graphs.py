"""CUDA graphs: the decode step on a GPU, one recorded graph for each row count.

Owns how a step is recorded and replayed, and how it goes through the layers: the `FusedModel`, where that computes what
the modules compute, else the modules with our attention in them. A step reads and changes the batch and the cache in
place, so nothing is copied in before a replay. Its output is copied to pinned memory while the next steps already run:
a row that ended takes part in some more steps, in which it is not active and changes nothing. Recording needs a model
that decides nothing in Python: rope is fixed when a model is loaded. A model that does all the same, such as a mixture
whose experts are chosen on the host, runs step by step, and a warning says so.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from treadle.engine.native.attention_metadata import PrefillChunk, PrefillMetadata, layer_of
from treadle.engine.native.fused_model import FusedModel
from treadle.engine.native.fused_sampler import sample_rows
from treadle.engine.native.input_batch import InputBatch, OutputRing, RowOutput, RowStart
from treadle.engine.native.kv_cache import PagedKVCache, round_up
from treadle.engine.native.model_runner import ModelRunner
from treadle.engine.native.paged_attention import HeadShape, PagedRows, attend_paged
from treadle.model.attention import AttentionOptions, PackedMetadata
from treadle.model.causal_lm import compute_logits, hidden_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda
"""Its streams, events and graphs carry no types."""

_WARM_UPS = 2
"""Steps before a recording: kernels are compiled and libraries take their workspaces."""

_AHEAD = 2
"""Steps that run before what the first of them ended is looked at: time for Python to do something else."""

_TOLERANCE = 0.25
"""How far the fused model's last hidden states may be from the modules', after all layers of rounding. Each layer was
compared by itself before, and closely; here a wrong slot or row would differ far more."""


class FusedDecodeMetadata:
    """Decode metadata for the paged-attention kernel. Heads come with rope applied; here they are rotated by 0."""

    def __init__(self, cache: PagedKVCache, rows: InputBatch, size: int) -> None:
        self._cache = cache
        self._paged_rows = PagedRows(cache.table, rows.active.view(torch.uint8), rows.length, cache.null_page)
        whole = torch.ones((cache.length + 1, size), dtype=cache.kv.dtype, device=cache.kv.device)
        self._angles = (whole, torch.zeros_like(whole))

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        _, heads, rows, size = query.shape
        scale = size**-0.5 if options.scaling is None else options.scaling
        shape = HeadShape(heads, key.shape[1], size, scale, options.window, options.softcap, None, None)
        qkv = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (query, key, value)], dim=1)
        out = attend_paged(
            qkv, self._cache.layer(layer_of(module)), self._paged_rows, self._angles, shape, options.sinks
        )
        return out.view(1, rows, heads, size)


class CudaGraphRunner(ModelRunner):
    """Model runner on CUDA. `eager`: no graphs."""

    def __init__(self, module: "PreTrainedModel", cache: PagedKVCache, row_step: int, *, eager: bool = False) -> None:
        super().__init__(module, cache, row_step, longest=1)  # the output ring keeps the tokens
        self._eager = eager
        self._graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        self._report = torch.zeros((4, cache.num_rows), dtype=torch.int32, device=cache.kv.device)
        self._pool: Any = None
        self._output_ring = OutputRing(cache.num_rows, cache.length)
        self._launched = 0
        self._copies = [_OutputCopy(cache.num_rows) for _ in range(_AHEAD + 1)]
        self._in_flight: deque[_OutputCopy] = deque()
        self._fused_model = FusedModel.create(module, cache)
        if self._fused_model is not None and not self._agrees(self._fused_model):
            self._fused_model = None
        if self._fused_model is None:
            log.info("%s runs module by module: its layers are of a kind that is not fused", type(module).__name__)
        self._metadata = FusedDecodeMetadata(cache, self.batch, cache.kv.shape[-1])
        self._addresses = self._locate()

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        if self._fused_model is None:
            super().prefill(chunks)
            return
        total = round_up(sum(len(chunk.ids) for chunk in chunks), self.row_step)
        self._fused_model.prefill(PrefillMetadata(self.cache, chunks, total))

    @torch.inference_mode()
    def step(self, count: int, longest: int, *, filtered: bool, penalized: bool = False) -> list[int]:
        """As in `ModelRunner`, except that rows are reported some steps after they ended."""
        rows = self._bucket(count)
        graph = None if self._eager else self._graph(rows, filtered, penalized)
        if graph is None:
            self._advance(rows, filtered, penalized)
        else:
            graph.replay()
        copy = self._copies.pop()
        copy.start(self._report, rows, processed=filtered or penalized)
        self._in_flight.append(copy)
        self._launched += 1
        return self._drain(_AHEAD)

    def start(self, starts: Sequence[RowStart]) -> None:
        super().start(starts)
        self._output_ring.start([start.row for start in starts], self._launched)

    def drain(self) -> list[int]:
        return self._drain(0)

    def _drain(self, left: int) -> list[int]:
        """The rows that ended in all but the last `left` steps."""
        ended: list[int] = []
        while len(self._in_flight) > left:
            copy = self._in_flight.popleft()
            ended += copy.read(self._output_ring)
            self._copies.append(copy)
        return ended

    def read(self, rows: Sequence[int]) -> list[RowOutput]:
        return self._output_ring.read(rows)

    def tail(self, row: int, since: int) -> list[int]:
        return self._output_ring.tail(row, since)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        super().move(sources, targets)
        self._output_ring.move(sources, targets)

    def refresh(self) -> None:
        """Graphs hold the addresses of weights: record them again where a parameter has moved."""
        if self._fused_model is not None:
            self._fused_model.merge()
        found = self._locate()
        if found != self._addresses:
            self._addresses = found
            self._graphs.clear()

    def close(self) -> None:
        self._drain(0)
        self._graphs.clear()
        super().close()

    def _locate(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self.module.parameters())

    def _bucket(self, count: int) -> int:
        """Few row counts, so that few graphs are recorded: multiples of 16 up to 64, then of an eighth of all."""
        step = (
            self.row_step if count <= 4 * self.row_step else round_up(max(64, self.cache.num_rows // 8), self.row_step)
        )
        return min(round_up(count, step), self.cache.num_rows)

    def _advance(self, count: int, filtered: bool, penalized: bool) -> None:
        """One step over `count` rows, in tensors only. Penalties take passes over the logits of their own."""
        logits = self._logits(count)
        if not penalized:
            sample_rows(logits, self.batch, self._report, filtered=filtered)
            return
        penalties = self.batch.penalties
        assert penalties is not None, "a row that asks for penalties has taken them"
        active = self.batch.active[:count].clone()
        sample_rows(logits, self.batch, self._report, filtered=filtered, penalized=penalties.apply(logits))
        penalties.count(self._report[0, :count], active)

    def _logits(self, count: int) -> Tensor:
        if self._fused_model is not None:
            hidden = self._fused_model.decode(self.batch, count)
        else:
            hidden = hidden_states(self.module, self.batch.last_id[:count], self.batch.length[:count], self._metadata)
        return compute_logits(self.module, hidden, wide=True)

    def _graph(self, rows: int, filtered: bool, penalized: bool) -> torch.cuda.CUDAGraph | None:
        """The recording of such a step; None, from then on, for a model whose steps cannot be recorded."""
        key = (rows, filtered, penalized)
        if key not in self._graphs:
            active = self.batch.active.clone()
            try:
                self._graphs[key] = self._record(*key)
            except RuntimeError as error:
                self._eager = True
                self._graphs.clear()
                name, reason = type(self.module).__name__, str(error).partition("\n")[0]
                log.warning("%s decodes without CUDA graphs, which is slower: %s", name, reason)
                return None
            finally:
                self.batch.active.copy_(active)
        return self._graphs[key]

    def _record(self, rows: int, filtered: bool, penalized: bool) -> torch.cuda.CUDAGraph:
        """Record a step while no row is active: then neither warm-up nor recording changes a row."""
        device = self.cache.kv.device
        self.batch.active.zero_()
        side = _cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._advance(rows, filtered, penalized)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._advance(rows, filtered, penalized)
        self._pool = self._pool or graph.pool()
        return graph

    @torch.inference_mode()
    def _agrees(self, fused_model: FusedModel) -> bool:
        """Whether the fused model computes what the modules do: prefill and one step, before any request."""
        lengths = [min(length, self.cache.length) for length in (33, 14)][
            : min(self.cache.num_rows, self.cache.num_pages)
        ]
        ids = torch.arange(sum(lengths), device=self.module.device) * 7 % self.module.config.vocab_size
        metadata = PackedMetadata(lengths, self.module.device)
        expected = hidden_states(self.module, ids, metadata.positions(), metadata)
        tokens = [part.tolist() for part in torch.split(ids, lengths)]
        chunks = [PrefillChunk(row, 0, part[:-1]) for row, part in enumerate(tokens)]
        for row in range(len(tokens)):
            self.cache.assign(row, 0, [row])
        self.cache.upload()
        fused_model.prefill(PrefillMetadata(self.cache, chunks, round_up(sum(lengths), self.row_step)))
        self.batch.start([_probe(row, part) for row, part in enumerate(tokens)])
        found = fused_model.decode(self.batch, len(tokens)).float()
        self.batch.stop(range(len(tokens)))
        wanted = torch.stack([part[-1] for part in torch.split(expected, lengths)]).float()
        error = float((found - wanted).norm() / wanted.norm())
        log.debug("the fused layers differ from the modules by %.2g", error)
        return error <= _TOLERANCE


def _probe(row: int, ids: Sequence[int]) -> RowStart:
    return RowStart(row, ids[-1], len(ids) - 1, 1, 0, 0, 1.0, 1.0, 0, ())


class _OutputCopy:
    """Asynchronous copy of a step's outputs to the host."""

    def __init__(self, rows: int) -> None:
        self._host = torch.zeros((4, rows), dtype=torch.int32, pin_memory=True)
        self._arrived = _cuda.Event()
        self._rows = 0
        self._processed = False

    def start(self, report: Tensor, rows: int, *, processed: bool) -> None:
        self._rows, self._processed = rows, processed
        lines = 4 if processed else 3
        self._host[:lines].copy_(report[:lines], non_blocking=True)
        self._arrived.record()

    def read(self, output_ring: OutputRing) -> list[int]:
        """Wait for the copy and append it to `output_ring`; returns the rows that ended."""
        self._arrived.synchronize()
        ids_S, logprobs_S, ended_S, processed_S = self._host.numpy()[:, : self._rows]
        processed = processed_S.view(np.float32) if self._processed else None
        return output_ring.append(ids_S, logprobs_S.view(np.float32), ended_S, processed)
