"""Model runner: prefill of chunks, and decode steps that give every active row its next token.

Owns the module, the KV cache and the batch, and the layout of a forward. Knows nothing of requests, threads and loops.
Row counts, packed lengths and cache spans are rounded up: on CPU in float32 the bits of a row are then the same in
every batch. Few rows, or a rest of few rows for one core, take another path through the matrix library and give other
bits; `find_row_step` measures how many rows this machine needs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treadle.engine.native.attention_metadata import DecodeMetadata, PrefillChunk, PrefillMetadata
from treadle.engine.native.input_batch import InputBatch, RowOutput, RowStart
from treadle.engine.native.kv_cache import SPAN_STEP, PagedKVCache, round_up
from treadle.engine.native.sampler import sample
from treadle.model.attention import PackedMetadata
from treadle.model.causal_lm import compute_logits, hidden_states, output_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelRunner:
    """Computes on one device with plain torch: the way that works everywhere."""

    def __init__(
        self, module: "PreTrainedModel", cache: PagedKVCache, row_step: int, *, longest: int | None = None
    ) -> None:
        """`longest`: tokens of an answer that the batch keeps for each row; by default all of them."""
        self.module = module
        self.cache = cache
        self.row_step = row_step
        self.batch = InputBatch(cache.num_rows, cache.length if longest is None else longest, cache.kv.device)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Compute the keys and values of `chunks`; no logits."""
        metadata = PrefillMetadata(self.cache, chunks, round_up(sum(len(chunk.ids) for chunk in chunks), self.row_step))
        hidden_states(self.module, metadata.ids_T, metadata.positions_T, metadata)

    @torch.inference_mode()
    def step(self, count: int, longest: int, *, filtered: bool, penalized: bool = False) -> list[int]:
        """One token for each active row among the first `count`; the rows that ended.

        `longest` bounds the tokens in their pages. `filtered`: some row asks for min-p, top-k or top-p; `penalized`:
        some row asks for a penalty.
        """
        ended = self.advance(round_up(count, self.row_step), round_up(longest + 1, SPAN_STEP), filtered, penalized)
        return ended.nonzero().flatten().tolist()

    def advance(self, count: int, span: int, filtered: bool, penalized: bool = False) -> Tensor:
        """One step over `count` rows, in tensors only."""
        batch, active = self.batch, self.batch.active[:count]
        positions = batch.length[:count]
        metadata = DecodeMetadata(self.cache, active, positions, span)
        hidden = hidden_states(self.module, batch.last_id[:count], positions, metadata)
        logits = compute_logits(self.module, hidden)
        if not penalized:
            return batch.advance(count, sample(logits, batch.sampling_metadata(count), filtered=filtered))
        assert batch.penalties is not None, "a row that asks for penalties has taken them"
        sampled = sample(
            logits, batch.sampling_metadata(count), filtered=filtered, penalized=batch.penalties.apply(logits)
        )
        batch.penalties.count(sampled.ids, active)
        return batch.advance(count, sampled)

    @torch.inference_mode()
    def start(self, starts: Sequence[RowStart]) -> None:
        """Make rows active."""
        self.batch.start_penalties(starts, output_weight(self.module).shape[0])
        self.batch.start(starts)

    def tail(self, row: int, since: int) -> list[int]:
        """What a row sampled after its first `since` tokens, as far as it is known by now."""
        return self.batch.tail(row, since)

    def drain(self) -> list[int]:
        """The rows that ended in steps not yet reported by `step`."""
        return []

    def read(self, rows: Sequence[int]) -> list[RowOutput]:
        """What rows sampled that ended or were stopped."""
        return self.batch.read(rows)

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move rows; what is in the cache does not move with them."""
        self.batch.move(sources, targets)

    def refresh(self) -> None:
        """Called when the weights may have changed."""

    def close(self) -> None:
        """Free what was taken. The last call."""
        self.cache.close()


@torch.inference_mode()
def find_row_step(module: "PreTrainedModel", most: int, device: torch.device) -> int:
    """The smallest number of rows whose multiples, up to `most`, all compute the same bits for a row on this machine.

    16 on two cores; more cores need more rows. Elsewhere than on CPU in float32 bits are not promised, and 16 is taken.
    """
    smallest = 16
    if device.type != "cpu" or module.dtype != torch.float32:
        return smallest
    top = round_up(most, smallest)
    ids = torch.arange(top, device=device) % module.config.vocab_size

    def logits(rows: int) -> Tensor:
        metadata = PackedMetadata([1] * rows, device)
        return compute_logits(module, hidden_states(module, ids[:rows], torch.zeros_like(ids[:rows]), metadata))

    whole = logits(top)
    step = smallest
    while step < top:
        if all(torch.equal(logits(rows), whole[:rows]) for rows in (step, 2 * step, 3 * step) if rows < top):
            return step
        step *= 2
    return top
