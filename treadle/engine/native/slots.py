"""Slots that nobody uses, and which one is next.

Low slots first, so that running rows lie close together; among those that are close enough, rather one that holds
nothing than one whose tokens would have to move away. Knows nothing of what slots hold.
"""

import heapq
from collections.abc import Iterable

_SLACK = 64
"""Names of slots that are gone, before a heap is cleaned up."""


class FreeSlots:
    """A set of slots. Heaps may name slots that are gone: they are passed over."""

    def __init__(self, slots: Iterable[int]) -> None:
        self._free = set(slots)
        self._empty = sorted(self._free)
        self._held: list[int] = []

    def __len__(self) -> int:
        return len(self._free)

    def add(self, slot: int, *, held: bool) -> None:
        """`held`: it has tokens that somebody may want."""
        self._free.add(slot)
        heap = self._held if held else self._empty
        heapq.heappush(heap, slot)
        if len(heap) > 2 * len(self._free) + _SLACK:
            heap[:] = sorted(self._free.intersection(heap))

    def take(self, near: float) -> int:
        """The lowest that is empty, if that is below `near` or the lowest of all; else the lowest."""
        empty, held = self._lowest(self._empty), self._lowest(self._held)
        chosen = held if empty is None or (held is not None and held < empty and empty >= near) else empty
        assert chosen is not None, "asked only while there are some"
        heapq.heappop(self._empty if chosen == empty else self._held)
        self._free.remove(chosen)
        return chosen

    def _lowest(self, heap: list[int]) -> int | None:
        while heap and heap[0] not in self._free:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def remove(self, slot: int) -> None:
        """Somebody takes this very one."""
        self._free.remove(slot)

    def below(self, limit: int) -> list[int]:
        """The slots below `limit`, lowest first."""
        return sorted(slot for slot in self._free if slot < limit)
