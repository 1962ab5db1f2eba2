"""The replicas of a run: who is alive, and which weights they have been given last.

Owns two facts that replicas share, and nothing of how they work. All calls come from the rollout's loop.
"""

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from treadle.cluster.ray.tensors import InStore, pack
from treadle.engine.protocol import WeightUpdate
from treadle.errors import EngineFailure


class Shelf:
    """The last weights that were pushed, so that a replica which comes back can have them."""

    def __init__(self) -> None:
        self.current: WeightUpdate | None = None
        self._stored: tuple[WeightUpdate, Any] | None = None
        self._storing = asyncio.Lock()
        self._pushes = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._awake = asyncio.Event()
        self._awake.set()

    def sleep(self) -> None:
        """Replicas give their devices' memory to the policy, until the next push."""
        self._awake.clear()

    async def awake(self) -> None:
        """Return when replicas may have their devices' memory. The policy's own deadlines bound this."""
        await self._awake.wait()

    @contextmanager
    def pushing(self, update: WeightUpdate) -> Iterator[None]:
        """Note what is on its way; a push of many replicas is over when the last one has it or has failed."""
        self.current = update
        self._awake.set()
        self._pushes += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._pushes -= 1
            if not self._pushes:
                self._quiet.set()

    async def settled(self) -> None:
        """Return when nothing is being pushed."""
        await self._quiet.wait()

    async def stored(self, update: WeightUpdate) -> Any:
        """Where plain tensors lie in Ray's store, written once for all replicas; None for any other map."""
        if isinstance(update.tensors, InStore):
            return update.tensors.reference
        if not isinstance(update.tensors, dict) or not update.tensors:
            return None
        async with self._storing:
            if self._stored is None or self._stored[0] is not update:
                self._stored = None  # the old ones make room first
                self._stored = update, await asyncio.to_thread(_put, update.tensors)
            return self._stored[1]


def _put(tensors: dict[str, Any]) -> Any:
    return ray.put(pack(tensors))


class Roster:
    """Who is alive. `somebody` is for requests that have lost their replica."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.attended = False
        """Whether somebody restarts replicas: only then is there anything to wait for."""
        self._alive: dict[Hashable, None] = {}
        self._somebody = asyncio.Event()
        self._closed: str | None = None

    def __len__(self) -> int:
        return len(self._alive)

    def join(self, replica: Hashable) -> None:
        self._alive[replica] = None
        self._somebody.set()

    def leave(self, replica: Hashable) -> None:
        self._alive.pop(replica, None)
        if not self._alive and self._closed is None:
            self._somebody.clear()

    def close(self, why: str) -> None:
        """Nobody will come any more: let go of those who wait, with the reason."""
        self._closed = self._closed or why
        self._somebody.set()

    async def somebody(self) -> None:
        """Return when a replica is alive, or nobody sees to that. The deadline is the request's own."""
        if self.attended:
            await self._somebody.wait()
        if self._closed is not None:
            raise EngineFailure(self._closed)
