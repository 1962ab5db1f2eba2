"""The groups that were admitted and have not left: in order of admission, and counted by the version of their tokens.

Owns the choice of a batch. Counts are kept as groups come, end and leave, so that looking for a batch whenever one ends
costs as much as there are versions among them, not groups. Samples nothing and waits for nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from treadle.types import Group, Task


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that was admitted, and has not left."""

    position: int
    """Of its task, counted from the very first."""
    task: Task
    version: int
    """No token of it is older."""
    since: float
    attempt: int = 0
    group: Group | None = None
    """Once it is ready."""
    work: asyncio.Task[None] | None = field(default=None, repr=False)


class OpenGroups:
    """See the module. What changes a version or makes a group ready goes through here."""

    def __init__(self) -> None:
        self._items: dict[int, OpenGroup] = {}
        """By position, in order of admission."""
        self._open: Counter[int] = Counter()
        """How many there are of each version, ready or not; a version that has none is not in it."""
        self._ready: Counter[int] = Counter()
        """How many of them are ready."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[OpenGroup]:
        return iter(self._items.values())

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(self._items)

    def add(self, item: OpenGroup) -> None:
        """A group begins."""
        self._items[item.position] = item
        self._open[item.version] += 1

    def end(self, item: OpenGroup, group: Group, version: int) -> None:
        """It is ready, and `version` sampled its oldest token."""
        _count_down(self._open, item.version)
        item.group, item.version = group, version
        self._open[version] += 1
        self._ready[version] += 1

    def remove(self, item: OpenGroup) -> None:
        """It leaves."""
        del self._items[item.position]
        _count_down(self._open, item.version)
        if item.group is not None:
            _count_down(self._ready, item.version)

    def count_until(self, version: int) -> int:
        """How many may have tokens of this version, or older."""
        return sum(count for at, count in self._open.items() if at <= version)

    def choose(self, size: int, due: int | None) -> list[OpenGroup] | None:
        """The oldest groups that are ready, in order of admission; None while there are too few, or too young ones.

        Too young: a later batch would then have more groups at their bound than it has places. `due` is the version
        that is at its bound now; None where nothing is waited for.
        """
        if self._ready.total() < size or (due is not None and self._leaves_too_many(size, due)):
            return None
        places = self._places(size)
        chosen: list[OpenGroup] = []
        for item in self:
            if item.group is not None and places[item.version] > 0:
                places[item.version] -= 1
                chosen.append(item)
        return chosen

    def _places(self, size: int) -> Counter[int]:
        """How many groups of each version make up a batch of the oldest."""
        places: Counter[int] = Counter()
        for version in sorted(self._ready):
            places[version] = min(self._ready[version], size - places.total())
        return places

    def _leaves_too_many(self, size: int, due: int) -> bool:
        """With v versions to go until some groups are at their bound, v batches can take them; this one, the rest."""
        open_ = ready = 0
        for version in sorted(self._open):
            open_ += self._open[version]
            ready += self._ready[version]
            if open_ - (version - due) * size > min(ready, size):
                return True
        return False


def _count_down(counts: Counter[int], version: int) -> None:
    counts[version] -= 1
    if not counts[version]:
        del counts[version]
