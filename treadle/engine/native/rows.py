"""The state of each row of a batch, in tensors: what a decode step reads and changes without asking Python.

Row i of the page table belongs to row i. Owns how rows start, move, stop and are read out; refuses to know requests.
Invariant: only active rows change in a step; a row that drew a stop token, its last token or no number at all is no
longer active.

Shapes: W stop tokens at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.engine.native.cache import to_device
from treadle.engine.native.sampling import Controls, Sampled

MAX_STOPS = 16
"""Stop tokens that one request may have."""


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


@dataclass(frozen=True, slots=True)
class Response:
    """What a row sampled."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def is_broken(self) -> bool:
        """Whether the model's logits were no numbers."""
        total = sum(self.logprobs)  # none is positive, so only one that is no number makes the sum none
        return total != total

    def then(self, later: "Response") -> "Response":
        """This, and what was sampled after it."""
        return Response(self.ids + later.ids, self.logprobs + later.logprobs) if self.ids else later


class Rows:
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
        self.stops = numbers(rows, MAX_STOPS)
        self.out_ids = numbers(rows, longest)
        self.out_logprobs = numbers(rows, longest, dtype=torch.float32)
        self._device = device
        self._moved = (
            *(self.active, self.last_id, self.length, self.left, self.count, self.stream, self.draw, self.top_k),
            *(self.temperature, self.top_p, self.stops, self.out_ids, self.out_logprobs),
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
        shape = to_device([(start.temperature, start.top_p) for start in starts], self._device, torch.float32)
        self.temperature[at], self.top_p[at] = shape[:, 0], shape[:, 1]
        self.count[at] = 0
        self.active[at] = True

    def controls(self, rows: int) -> Controls:
        return Controls(
            self.temperature[:rows], self.top_p[:rows], self.top_k[:rows], self.stream[:rows], self.draw[:rows]
        )

    def advance(self, rows: int, sampled: Sampled) -> Tensor:
        """Take in what a step drew; true for rows that ended with it."""
        active, count = self.active[:rows], self.count[:rows]
        at = count.clamp(max=self.out_ids.shape[1] - 1).unsqueeze(1)
        for target, drawn in ((self.out_ids[:rows], sampled.ids), (self.out_logprobs[:rows], sampled.logprobs)):
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

    def read(self, rows: Sequence[int]) -> list[Response]:
        """What rows sampled so far."""
        at = self._index(rows)
        counts = self.count[at].tolist()
        longest = max(counts, default=0)
        ids, logprobs = self.out_ids[at, :longest].tolist(), self.out_logprobs[at, :longest].tolist()
        return [Response(tuple(ids[row][:count]), tuple(logprobs[row][:count])) for row, count in enumerate(counts)]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give rows another place; the places they left become inactive."""
        source, target = self._index(sources), self._index(targets)
        for tensor in self._moved:
            tensor[target] = tensor[source]
        self.active[source] = False

    def _index(self, rows: Sequence[int]) -> Tensor:
        return to_device(rows, self._device)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
