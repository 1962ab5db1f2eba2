"""Page pool: which pages of the paged KV cache are free, and how many users each of the others has.

Owns numbers alone, no memory. Invariant: a page is free, or counted at least once.
"""

import heapq
from collections.abc import Iterable, Sequence

_SLACK = 64
"""Taken numbers in the heap, before it is rebuilt."""


class FreeList:
    """Free numbers, lowest first. The heap may still contain taken ones: they are skipped."""

    def __init__(self, count: int) -> None:
        self._free = set(range(count))
        self._heap = list(range(count))

    def __len__(self) -> int:
        return len(self._free)

    def __contains__(self, number: int) -> bool:
        return number in self._free

    def add(self, number: int) -> None:
        self._free.add(number)
        heapq.heappush(self._heap, number)
        if len(self._heap) > 2 * len(self._free) + _SLACK:
            self._heap = sorted(self._free)

    def lowest(self) -> int | None:
        """The next one that `take` returns."""
        while self._heap and self._heap[0] not in self._free:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def take(self) -> int:
        lowest = self.lowest()
        assert lowest is not None, "asked only while there are some"
        heapq.heappop(self._heap)
        self._free.remove(lowest)
        return lowest

    def remove(self, number: int) -> None:
        """Take this one."""
        self._free.remove(number)

    def below(self, limit: int) -> list[int]:
        """The free numbers below `limit`, lowest first."""
        return sorted(number for number in self._free if number < limit)


class PagePool:
    """Page pool with reference counts."""

    def __init__(self, count: int) -> None:
        self.releases = 0
        """Grows whenever pages come free."""
        self.reset(count)

    def reset(self, count: int) -> None:
        """Begin again with so many pages, all free."""
        self.free = FreeList(count)
        self._users = [0] * count

    def extend(self, pages: range) -> None:
        """Add new pages, all free."""
        self._users += [0] * (pages.stop - len(self._users))
        for page in pages:
            self.free.add(page)
        self.releases += len(pages)

    def users(self, page: int) -> int:
        return self._users[page]

    def take(self, count: int) -> list[int]:
        """So many free pages, each for one user."""
        taken = [self.free.take() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def claim(self, page: int) -> None:
        """Take this page, which is free."""
        self.free.remove(page)
        self._users[page] = 1

    def share(self, pages: Iterable[int]) -> None:
        """One more user of each."""
        for page in pages:
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One user less of each; those without any are free."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self.free.add(page)
                self.releases += 1
