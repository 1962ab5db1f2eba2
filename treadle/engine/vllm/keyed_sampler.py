"""Keyed sampler inside vLLM: our counter-based draw, as a logits processor of vLLM's first model runner.

That runner draws from a generator for each request, which cannot go on where an interrupted request stopped, and takes
one kernel per row. Here all rows are drawn at once, by the same arithmetic and the same noise as in the native engine:
keyed by (stream, position). The row that leaves holds the logprob at the drawn token and -inf elsewhere; vLLM then
takes the largest, and reports that very number (`logprobs_mode: processed_logits`). vLLM's second model runner keys its
noise by seed and position itself, and does without this.

Rows of other origin (vLLM's own OpenAI server) are turned into logprobs and sampled by vLLM.
"""

from collections import OrderedDict
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from treadle.engine.native.sampler import Penalties, SamplingMetadata, sample

EXTRA = "treadle"
"""The key under which a request's own parameters travel in vLLM's `extra_args`."""


_NO_PENALTIES = (1.0, 0.0, 0.0, 1.0)

_MAX_HELD = 1 << 20
"""Logprobs that were not requested yet; the oldest are dropped first."""


class KeyedRow(NamedTuple):
    """How one row is drawn. `drawn` is the runner's own list of what was sampled so far; it grows."""

    temperature: float
    top_p: float
    top_k: int
    stream: int
    position: int
    drawn: list[int]
    min_p: float
    penalties: tuple[float, float, float, float]
    prompt: list[int]
    answer: list[int]
    """What was sampled of this answer before the request."""

    @property
    def is_filtered(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def is_penalized(self) -> bool:
        return self.penalties != _NO_PENALTIES


CURRENT: "list[KeyedSampler]" = []
"""The one of this worker process, once vLLM has made it."""


class KeyedSampler(LogitsProcessor):  # type: ignore[misc]
    """Made by vLLM's worker."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, KeyedRow] = {}
        self._processed: OrderedDict[tuple[int, int], float] = OrderedDict()
        """By stream and position: logprobs of the distribution sampled from, until `take_processed`."""
        CURRENT[:] = [self]

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, _read_row)

    def apply(self, logits: Tensor) -> Tensor:
        if not self._rows:
            return logits.log_softmax(dim=-1)
        places = sorted(place for place in self._rows if place < len(logits))
        rows = [self._rows[place] for place in places]
        if len(places) == len(logits):
            return self._draw(logits, rows)
        others = logits.log_softmax(dim=-1)
        ours = torch.tensor(places, device=logits.device)
        others[ours] = self._draw(logits[ours], rows)
        return others

    def _draw(self, logits: Tensor, rows: list[KeyedRow]) -> Tensor:
        filtered, penalized = any(row.is_filtered for row in rows), None
        if any(row.is_penalized for row in rows):
            penalized = self._penalize(logits, rows)
        found = sample(logits, self._controls(rows), filtered=filtered, penalized=penalized)
        if found.processed is not None:
            self._keep(rows, found.processed.tolist())
        return _force(torch.empty_like(logits), found.ids, found.logprobs)

    def _penalize(self, logits: Tensor, rows: list[KeyedRow]) -> Tensor:
        """Through tables that are made anew in each step: the way for few rows, and no cost for the others."""
        table = Penalties(len(rows), logits.shape[1], logits.device)
        for place, row in enumerate(rows):
            if row.is_penalized:
                table.start(place, row.prompt, row.answer + row.drawn, row.penalties)
        return table.apply(logits)

    def _keep(self, rows: list[KeyedRow], values: list[float]) -> None:
        for row, value in zip(rows, values, strict=True):
            if row.is_filtered or row.is_penalized:
                self._processed[row.stream, row.position + len(row.drawn)] = value
        while len(self._processed) > _MAX_HELD:
            self._processed.popitem(last=False)

    def take_processed(self, stream: int, position: int, count: int) -> list[float]:
        """The logprobs of some tokens in the distribution they were sampled from; not a number where unknown."""
        return [self._processed.pop((stream, position + at), nan) for at in range(count)]

    def _controls(self, rows: list[KeyedRow]) -> SamplingMetadata:
        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)

        return SamplingMetadata(
            column([row.temperature for row in rows], torch.float32),
            column([row.top_p for row in rows], torch.float32),
            column([row.top_k for row in rows], torch.int64),
            column([row.stream for row in rows], torch.int64),
            column([row.position + len(row.drawn) for row in rows], torch.int64),
            column([row.min_p for row in rows], torch.float32),
        )


def _force(target: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """Rows in which only the drawn token is possible, and worth its logprob."""
    return target.fill_(float("-inf")).scatter_(1, ids.unsqueeze(1), logprobs.unsqueeze(1))


def _read_row(params: Any, prompt_ids: list[int] | None, drawn: list[int]) -> KeyedRow | None:
    extra = (params.extra_args or {}).get(EXTRA)
    if extra is None:
        return None
    temperature, top_p, top_k, stream, position, min_p, penalties, num_begun = extra
    seen = list(prompt_ids or ())
    begun = len(seen) - num_begun
    row = (temperature, top_p, top_k, stream, position, drawn, min_p)
    return KeyedRow(*row, tuple(penalties), seen[:begun], seen[begun:])
