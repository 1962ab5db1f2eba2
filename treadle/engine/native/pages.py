"""Pages and rows that nobody uses, and how many use each of the others.

Owns the counts. A page may be shared: it is free again when the last one lets go of it. Knows nothing of what is in a
page and who uses it. Invariant: a page is free, or counted at least once.
"""

import heapq
from collections.abc import Iterable, Sequence

_SLACK = 64
"""Numbers that are gone, before the heap is cleaned up."""


class Free:
    """Numbers that nobody uses, lowest first. The heap may name some that are gone: they are passed over."""

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
        """The one that `take` gives."""
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
        """Somebody takes this very one."""
        self._free.remove(number)

    def below(self, limit: int) -> list[int]:
        """Those below `limit`, lowest first."""
        return sorted(number for number in self._free if number < limit)


class Pages:
    """All pages, free or counted."""

    def __init__(self, count: int) -> None:
        self.free = Free(count)
        self.releases = 0
        """Grows whenever pages come free."""
        self._users = [0] * count

    def users(self, page: int) -> int:
        return self._users[page]

    def take(self, count: int) -> list[int]:
        """So many free pages, each for one user."""
        taken = [self.free.take() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def claim(self, page: int) -> None:
        """Take this very one, which is free."""
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
