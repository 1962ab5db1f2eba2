"""Keys and values of sequences that may go on later: sessions between two turns, and prompts that siblings share.

Owns what is kept and what gives way: the least recently used go first, in two steps on a GPU, to host memory and then
for good. What comes back from here has the same bits; what was forgotten is computed again, up to rounding.
Invariant: what is parked never takes more than the budget, and never outlives the weights that computed it.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Parked:
    """Tokens and their keys and values, as `SlotCache.take` gives them."""

    ids: Sequence[int]
    kv: Tensor

    @property
    def size(self) -> int:
        return self.kv.numel() * self.kv.itemsize


class Parking:
    """What was parked under a key, oldest first. `device_bytes` is for what stays on a GPU."""

    def __init__(self, host_bytes: int, device_bytes: int = 0) -> None:
        self._near: OrderedDict[Hashable, Parked] = OrderedDict()
        self._far: OrderedDict[Hashable, Parked] = OrderedDict()
        self._near_room = device_bytes
        self._far_room = host_bytes

    def __len__(self) -> int:
        return len(self._near) + len(self._far)

    def park(self, key: Hashable, parked: Parked) -> None:
        """Keep it, in place of what the key had; others give way."""
        self.forget(key)
        on_host = parked.kv.device.type == "cpu"
        if on_host:
            self._keep_far(key, parked)
            return
        self._near[key] = parked
        self._near_room -= parked.size
        while self._near_room < 0:
            oldest, moved = self._near.popitem(last=False)
            self._near_room += moved.size
            self._keep_far(oldest, Parked(moved.ids, moved.kv.to("cpu")))

    def _keep_far(self, key: Hashable, parked: Parked) -> None:
        self._far[key] = parked
        self._far_room -= parked.size
        while self._far_room < 0:
            _, gone = self._far.popitem(last=False)
            self._far_room += gone.size

    def is_tight(self, size: int) -> bool:
        """Whether parking this much on the GPU would move something to the host."""
        return self._near_room < size

    def find(self, key: Hashable) -> Parked | None:
        """What the key has, if it was not forgotten; it counts as used now."""
        for kept in (self._near, self._far):
            if key in kept:
                kept.move_to_end(key)
                return kept[key]
        return None

    def forget(self, key: Hashable) -> None:
        if key in self._near:
            self._near_room += self._near.pop(key).size
        elif key in self._far:
            self._far_room += self._far.pop(key).size

    def clear(self) -> None:
        """Forget everything: the weights are about to change."""
        for key in (*self._near, *self._far):
            self.forget(key)


def shared_prefix(held: Sequence[int], ids: Sequence[int]) -> int:
    """How many tokens two sequences have in common at the start."""
    limit = min(len(held), len(ids))
    if list(held[:limit]) == list(ids[:limit]):
        return limit
    return next(at for at in range(limit) if held[at] != ids[at])
