"""Our own draw inside vLLM's first model runner, through its interface for logits processors.

That runner draws from a generator for each request, which cannot go on where an interrupted request stopped, and takes
one kernel per row. Here all rows are drawn at once, by the same arithmetic and the same noise as in the embedded
engine: keyed by (stream, position). The row that leaves holds the logprob at the drawn token and -inf elsewhere; vLLM
then takes the largest, and reports that very number (`logprobs_mode: processed_logits`). vLLM's second model runner
keys its noise by seed and position itself, and does without this.

Rows of other origin (vLLM's own OpenAI server) are turned into logprobs and sampled by vLLM.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from treadle.engine.native.sampling import Controls, sample

EXTRA = "treadle"
"""The key under which a request's own parameters travel in vLLM's `extra_args`."""


class Row(NamedTuple):
    """How one row is drawn. `drawn` is the runner's own list of what was sampled so far; it grows."""

    temperature: float
    top_p: float
    top_k: int
    stream: int
    position: int
    drawn: list[int]


class KeyedSampling(LogitsProcessor):  # type: ignore[misc]
    """Made by vLLM's worker."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, _read_row)

    def apply(self, logits: Tensor) -> Tensor:
        if not self._rows:
            return logits.log_softmax(dim=-1)
        places = sorted(place for place in self._rows if place < len(logits))
        rows = [self._rows[place] for place in places]
        filtered = any(row.top_k > 0 or row.top_p < 1 for row in rows)
        if len(places) == len(logits):
            return _force(torch.empty_like(logits), *sample(logits, self._controls(rows), filtered=filtered))
        others = logits.log_softmax(dim=-1)
        ours = torch.tensor(places, device=logits.device)
        drawn = sample(logits[ours], self._controls(rows), filtered=filtered)
        others[ours] = _force(torch.empty_like(logits[ours]), *drawn)
        return others

    def _controls(self, rows: list[Row]) -> Controls:
        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)

        return Controls(
            column([row.temperature for row in rows], torch.float32),
            column([row.top_p for row in rows], torch.float32),
            column([row.top_k for row in rows], torch.int64),
            column([row.stream for row in rows], torch.int64),
            column([row.position + len(row.drawn) for row in rows], torch.int64),
        )


def _force(target: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """Rows in which only the drawn token is possible, and worth its logprob."""
    return target.fill_(float("-inf")).scatter_(1, ids.unsqueeze(1), logprobs.unsqueeze(1))


def _read_row(params: Any, prompt_ids: list[int] | None, drawn: list[int]) -> Row | None:
    extra = (params.extra_args or {}).get(EXTRA)
    if extra is None:
        return None
    temperature, top_p, top_k, stream, position = extra
    return Row(temperature, top_p, top_k, stream, position, drawn)
