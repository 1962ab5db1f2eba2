"""A bounded buffer between the dispatcher and whoever reads a stream; both ends live on the manager's loop.

Waits: `put` waits while the buffer is full, woken by `take`; `take` waits while it is empty, woken by `put` or `close`.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    """Items in the order they were put."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: deque[T] = deque()
        self._changed = asyncio.Condition()
        self._closed = False

    async def put(self, item: T) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._items) < self._most)
            self._items.append(item)
            self._changed.notify_all()

    async def close(self) -> None:
        """Nothing more will be put."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def take(self) -> list[T]:
        """Everything there is, at least one item; an empty list once the feed is closed and empty."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._items or self._closed)
            taken = list(self._items)
            self._items.clear()
            self._changed.notify_all()
            return taken
