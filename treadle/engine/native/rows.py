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
from treadle.engine.native.penalties import Factors, Penalties
from treadle.engine.native.sampling import Controls, Sampled

MAX_STOPS = 16
"""Stop tokens that one request may have."""


NO_PENALTIES: Factors = (1.0, 0.0, 0.0, 1.0)


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
    penalties: Factors = NO_PENALTIES
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    """What the penalties look at; empty where there are none."""


@dataclass(frozen=True, slots=True)
class Response:
    """What a row sampled."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    processed: tuple[float, ...] = ()
    """Logprobs of the distribution sampled from; they mean nothing for rows that ask for no filter or penalty."""

    @property
    def is_broken(self) -> bool:
        """Whether the model's logits were no numbers."""
        total = sum(self.logprobs)  # none is positive, so only one that is no number makes the sum none
        return total != total

    def then(self, later: "Response") -> "Response":
        """This, and what was sampled after it."""
        if not self.ids:
            return later
        return Response(self.ids + later.ids, self.logprobs + later.logprobs, self.processed + later.processed)

    def cut(self, tokens: int) -> "Response":
        """The first tokens of it."""
        return Response(self.ids[:tokens], self.logprobs[:tokens], self.processed[:tokens])


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
        self.min_p = numbers(rows, dtype=torch.float32)
        self.stops = numbers(rows, MAX_STOPS)
        self.out_ids = numbers(rows, longest)
        self.out_logprobs = numbers(rows, longest, dtype=torch.float32)
        self.out_processed = numbers(rows, longest, dtype=torch.float32)
        self.penalties: Penalties | None = None
        """Taken when a row first asks for one."""
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

    def start_penalties(self, starts: Sequence[RowStart], words: int) -> None:
        """Let rows begin with the tokens that their penalties look at; those without any lose an earlier row's."""
        if self.penalties is None:
            if all(start.penalties == NO_PENALTIES for start in starts):
                return
            self.penalties = Penalties(len(self.active), words, self._device)
        for start in starts:
            if start.penalties == NO_PENALTIES:
                self.penalties.set_factors(start.row, NO_PENALTIES)
            else:
                self.penalties.start(start.row, start.prompt, start.answer, start.penalties)

    def controls(self, rows: int) -> Controls:
        return Controls(
            *(self.temperature[:rows], self.top_p[:rows], self.top_k[:rows], self.stream[:rows], self.draw[:rows]),
            self.min_p[:rows],
        )

    def advance(self, rows: int, sampled: Sampled) -> Tensor:
        """Take in what a step drew; true for rows that ended with it."""
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

    def read(self, rows: Sequence[int]) -> list[Response]:
        """What rows sampled so far."""
        at = self._index(rows)
        counts = self.count[at].tolist()
        longest = max(counts, default=0)
        found = [column[at, :longest].tolist() for column in (self.out_ids, self.out_logprobs, self.out_processed)]
        return [Response(*(tuple(column[row][:count]) for column in found)) for row, count in enumerate(counts)]

    def tail(self, row: int, since: int) -> list[int]:
        """What a row sampled after its first `since` tokens."""
        ids: list[int] = self.out_ids[row, since : int(self.count[row])].tolist()
        return ids

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give rows another place; the places they left become inactive."""
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
