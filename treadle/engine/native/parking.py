"""Keys and values in host memory, of sequences that may go on later.

Owns what is kept and what gives way: sessions between two turns and, on a CPU, prompts that siblings share, the least
recently used first; and room for rows that gave their pages up in the middle of an answer, which give way to nobody.
What comes back from here has the same bits; what was forgotten is computed again, up to rounding.
Invariant: what is parked never takes more than the budget, and never outlives the weights that computed it, except with
a row that goes on as rows do when weights change.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from treadle.engine.native.cache import Saved


@dataclass(frozen=True, slots=True)
class Parked:
    """Tokens and their keys and values, as `PageCache.save` gives them."""

    ids: Sequence[int]
    kv: Saved

    @property
    def size(self) -> int:
        return sum(part.numel() * part.itemsize for part in self.kv)


class Parking:
    """What was parked under a key, oldest first."""

    def __init__(self, num_bytes: int) -> None:
        self._parked: OrderedDict[Hashable, Parked] = OrderedDict()
        self._capacity = self._room = num_bytes
        self._held = 0

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def held_bytes(self) -> int:
        """What rows have here that were preempted."""
        return self._held

    def park(self, key: Hashable, parked: Parked) -> None:
        """Keep it, in place of what the key had; others give way. What cannot fit at all is not kept."""
        self.forget(key)
        if parked.size <= self._capacity - self._held:
            self._make_room(parked.size)
            self._parked[key] = parked
            self._room -= parked.size

    def _make_room(self, size: int) -> None:
        while self._room < size:
            _, gone = self._parked.popitem(last=False)
            self._room += gone.size

    def hold(self, size: int) -> bool:
        """Set room aside for what a preempted row had, until `let_go`. False: there is not enough."""
        if size > self._capacity - self._held:
            return False
        self._make_room(size)
        self._room -= size
        self._held += size
        return True

    def let_go(self, size: int) -> None:
        """A preempted row has its pages again, or needs none."""
        self._room += size
        self._held -= size

    def find(self, key: Hashable) -> Parked | None:
        """What the key has, if it was not forgotten; it counts as used now."""
        if key in self._parked:
            self._parked.move_to_end(key)
        return self._parked.get(key)

    def forget(self, key: Hashable) -> None:
        if key in self._parked:
            self._room += self._parked.pop(key).size

    def clear(self) -> None:
        """Forget everything that is under a key: the weights are about to change."""
        for key in list(self._parked):
            self.forget(key)


def shared_prefix(held: Sequence[int], ids: Sequence[int]) -> int:
    """How many tokens two sequences have in common at the start."""
    limit = min(len(held), len(ids))
    if list(held[:limit]) == list(ids[:limit]):
        return limit
    return next(at for at in range(limit) if held[at] != ids[at])
