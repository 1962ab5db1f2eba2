"""Persistent batch: the state of every row in tensors, and the ring of its outputs.

`InputBatch` is what a decode step reads and changes without asking Python; row i of the page table belongs to row i. It
owns how rows start, move, stop and are read out; refuses to know requests. On a GPU, `OutputRing` keeps what the rows
sampled on the host, step by step, so that reading a response asks no device.
Invariants: only active rows change in a step; a row that drew a stop token, its last token or NaN is no longer active.
The steps of a row that runs are still in the ring; entries of rows that are not active mean nothing.

Shapes: S rows, R steps in the ring, W stop tokens at most.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.engine.native.kv_cache import to_device
from treadle.engine.native.sampler import Penalties, PenaltyFactors, SamplerOutput, SamplingMetadata

MAX_STOPS = 16
"""Stop tokens that one request may have."""


NO_PENALTIES: PenaltyFactors = (1.0, 0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class RowStart:
    """How a row begins: its last token is the first one to be decoded; `length` tokens before it are in its pages."""

    row: int
    last_id: int
    length: int
    left: int
    stream: int
    draw: int
    temperature: float
    top_p: float
    top_k: int
    stops: Sequence[int]
    min_p: float = 0.0
    penalties: PenaltyFactors = NO_PENALTIES
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    """What the penalties look at; empty where there are none."""


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What a row sampled."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    processed: tuple[float, ...] = ()
    """Logprobs of the distribution sampled from; they mean nothing for rows that ask for no filter or penalty."""

    @property
    def has_nan(self) -> bool:
        """Whether the model's logits were no numbers."""
        total = sum(self.logprobs)  # none is positive, so only one that is no number makes the sum none
        return total != total

    def then(self, later: "RowOutput") -> "RowOutput":
        """This, and what was sampled after it."""
        if not self.ids:
            return later
        return RowOutput(self.ids + later.ids, self.logprobs + later.logprobs, self.processed + later.processed)

    def truncate(self, tokens: int) -> "RowOutput":
        """The first tokens of it."""
        return RowOutput(self.ids[:tokens], self.logprobs[:tokens], self.processed[:tokens])


class InputBatch:
    """All rows, active or not. Every tensor stays where it is, so that a CUDA graph can hold on to it."""

    def __init__(self, rows: int, longest: int, device: torch.device) -> None:
        def numbers(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.active = numbers(rows, dtype=torch.bool)
        self.last_id = numbers(rows)
        self.length = numbers(rows)
        self.left = numbers(rows)
        self.count = numbers(rows)
        self.stream = numbers(rows)
        self.draw = numbers(rows)
        self.top_k = numbers(rows)
        self.temperature = numbers(rows, dtype=torch.float32)
        self.top_p = numbers(rows, dtype=torch.float32)
        self.min_p = numbers(rows, dtype=torch.float32)
        self.stops = numbers(rows, MAX_STOPS)
        self.out_ids = numbers(rows, longest)
        self.out_logprobs = numbers(rows, longest, dtype=torch.float32)
        self.out_processed = numbers(rows, longest, dtype=torch.float32)
        self.penalties: Penalties | None = None
        """Allocated when a row first asks for one."""
        self._device = device
        self._moved = (
            *(self.active, self.last_id, self.length, self.left, self.count, self.stream, self.draw, self.top_k),
            *(self.temperature, self.top_p, self.min_p, self.stops, self.out_ids, self.out_logprobs),
            self.out_processed,
        )

    def start(self, starts: Sequence[RowStart]) -> None:
        """Make rows active."""
        at = self._index([start.row for start in starts])
        whole = [
            (start.last_id, start.length, start.left, _signed(start.stream), start.draw, start.top_k)
            + tuple(start.stops)
            + (-1,) * (MAX_STOPS - len(start.stops))
            for start in starts
        ]
        table = to_device(whole, self._device)
        for column, target in enumerate((self.last_id, self.length, self.left, self.stream, self.draw, self.top_k)):
            target[at] = table[:, column]
        self.stops[at] = table[:, 6:]
        shape = [(start.temperature, start.top_p, start.min_p) for start in starts]
        floats = to_device(shape, self._device, torch.float32)
        self.temperature[at], self.top_p[at], self.min_p[at] = floats[:, 0], floats[:, 1], floats[:, 2]
        self.count[at] = 0
        self.active[at] = True

    def start_penalties(self, starts: Sequence[RowStart], vocab_size: int) -> None:
        """Let rows begin with the tokens that their penalties look at; those without any lose an earlier row's."""
        if self.penalties is None:
            if all(start.penalties == NO_PENALTIES for start in starts):
                return
            self.penalties = Penalties(len(self.active), vocab_size, self._device)
        for start in starts:
            if start.penalties == NO_PENALTIES:
                self.penalties.set_factors(start.row, NO_PENALTIES)
            else:
                self.penalties.start(start.row, start.prompt, start.answer, start.penalties)

    def sampling_metadata(self, rows: int) -> SamplingMetadata:
        return SamplingMetadata(
            *(self.temperature[:rows], self.top_p[:rows], self.top_k[:rows], self.stream[:rows], self.draw[:rows]),
            self.min_p[:rows],
        )

    def advance(self, rows: int, sampled: SamplerOutput) -> Tensor:
        """Append what a step sampled; true for rows that ended with it."""
        active, count = self.active[:rows], self.count[:rows]
        at = count.clamp(max=self.out_ids.shape[1] - 1).unsqueeze(1)
        columns = [(self.out_ids, sampled.ids), (self.out_logprobs, sampled.logprobs)]
        if sampled.processed is not None:
            columns.append((self.out_processed, sampled.processed))
        for column, drawn in columns:
            target = column[:rows]
            target.scatter_(1, at, torch.where(active, drawn, target.gather(1, at).squeeze(1)).unsqueeze(1))
        one = active.long()
        for grown in (count, self.length[:rows], self.draw[:rows]):
            grown += one
        self.left[:rows] -= one
        last_id = self.last_id[:rows]
        last_id.copy_(torch.where(active, sampled.ids, last_id))
        stopped = (sampled.ids.unsqueeze(1) == self.stops[:rows]).any(dim=1)
        ended = active & (stopped | (self.left[:rows] <= 0) | sampled.logprobs.isnan())
        active &= ~ended
        return ended

    def stop(self, rows: Sequence[int]) -> None:
        """Make rows inactive; what they sampled can still be read."""
        self.active[self._index(rows)] = False

    def read(self, rows: Sequence[int]) -> list[RowOutput]:
        """What rows sampled so far."""
        at = self._index(rows)
        counts = self.count[at].tolist()
        longest = max(counts, default=0)
        found = [column[at, :longest].tolist() for column in (self.out_ids, self.out_logprobs, self.out_processed)]
        return [RowOutput(*(tuple(column[row][:count]) for column in found)) for row, count in enumerate(counts)]

    def tail(self, row: int, since: int) -> list[int]:
        """What a row sampled after its first `since` tokens."""
        ids: list[int] = self.out_ids[row, since : int(self.count[row])].tolist()
        return ids

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move rows; the ones they leave become inactive."""
        source, target = self._index(sources), self._index(targets)
        for tensor in self._moved:
            tensor[target] = tensor[source]
        if self.penalties is not None:
            self.penalties.move(source, target)
        self.active[source] = False

    def _index(self, rows: Sequence[int]) -> Tensor:
        return to_device(rows, self._device)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


_SLACK = 8
"""Steps that may run before the end of a row is known."""


class OutputRing:
    """The last steps of all rows. Steps are counted from 0."""

    def __init__(self, rows: int, longest: int) -> None:
        self._ids_SR = np.zeros((rows, longest + _SLACK), np.int32)
        self._logprobs_SR = np.zeros((rows, longest + _SLACK), np.float32)
        self._processed_SR: NDArray[np.float32] | None = None
        """Allocated with the first step that reports it."""
        self._first = [0] * rows
        self._ends: dict[int, int] = {}
        """The step after the last, of rows that ended."""
        self._steps = 0

    def start(self, rows: Iterable[int], step: int) -> None:
        """Rows take part from `step` on."""
        for row in rows:
            self._first[row] = step
            self._ends.pop(row, None)

    def append(
        self,
        ids_S: NDArray[np.int32],
        logprobs_S: NDArray[np.float32],
        ended_S: NDArray[np.int32],
        processed_S: NDArray[np.float32] | None = None,
    ) -> list[int]:
        """Append the next step, of the first rows; returns the rows that ended with it."""
        if processed_S is not None:
            if self._processed_SR is None:
                self._processed_SR = np.zeros_like(self._logprobs_SR)
            self._processed_SR[: len(ids_S), self._steps % self._ids_SR.shape[1]] = processed_S
        at, rows = self._steps % self._ids_SR.shape[1], len(ids_S)
        self._ids_SR[:rows, at] = ids_S
        self._logprobs_SR[:rows, at] = logprobs_S
        self._steps += 1
        ended: list[int] = np.flatnonzero(ended_S).tolist()
        self._ends.update(dict.fromkeys(ended, self._steps))
        return ended

    def read(self, rows: Sequence[int]) -> list[RowOutput]:
        """What rows sampled until they ended, or until now."""
        return [self._read(row, self._first[row], self._ends.get(row, self._steps)) for row in rows]

    def _read(self, row: int, first: int, end: int) -> RowOutput:
        span, processed = self._span(first, end), ()
        if self._processed_SR is not None:
            processed = tuple(self._processed_SR[row, span].tolist())
        ids, logprobs = self._ids_SR[row, span].tolist(), self._logprobs_SR[row, span].tolist()
        return RowOutput(tuple(ids), tuple(logprobs), processed)

    def _span(self, first: int, end: int) -> slice | NDArray[np.int64]:
        size = self._ids_SR.shape[1]
        start, count = first % size, max(0, end - first)
        return slice(start, start + count) if start + count <= size else np.arange(start, start + count) % size

    def tail(self, row: int, since: int) -> list[int]:
        """What a row sampled after its first `since` tokens, as far as appended."""
        span = self._span(self._first[row] + since, self._ends.get(row, self._steps))
        ids: list[int] = self._ids_SR[row, span].tolist()
        return ids

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move rows."""
        for source, target in zip(sources, targets, strict=True):
            for kept in (self._ids_SR, self._logprobs_SR, self._processed_SR):
                if kept is not None:
                    kept[target] = kept[source]
            self._first[target] = self._first[source]
            self._ends.pop(target, None)
