"""Turns in shared weights: which request computes with the module now, and as which model.

    training      has the weights to itself
    sampling      shares them with all other sampling from the same adapter

First come, first served, in groups: when the weights are free, the request that has waited longest gets them, and with
it every waiting request that can share its turn. A newcomer joins a turn only while no request waits for another.
Waits: `take` waits for the turns before it, at most `timeout_s`.
Invariant: at any moment all holders agree on the adapter, and one that is alone is the only one.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from treadle.tinker.adapters import AdapterWeights
from treadle.tinker.refusals import RequestFailed


@dataclass(eq=False, slots=True)
class _Claim:
    adapter: AdapterWeights | None
    alone: bool
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def joins(self, other: "_Claim") -> bool:
        return not self.alone and not other.alone and self.adapter is other.adapter


class WeightTurns:
    """The order of those who want the weights."""

    def __init__(self) -> None:
        self._holders: list[_Claim] = []
        self._waiting: deque[_Claim] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def take(self, adapter: AdapterWeights | None, *, alone: bool, timeout_s: float) -> AsyncIterator[None]:
        """Inside, the weights are this caller's, alone or with others that want the same adapter."""
        claim = _Claim(adapter, alone)
        if not self._waiting and all(claim.joins(holder) for holder in self._holders):
            self._holders.append(claim)
        else:
            self._waiting.append(claim)
            await self._wait(claim, timeout_s)
        try:
            yield
        finally:
            self._holders.remove(claim)
            self._grant()

    async def _wait(self, claim: _Claim, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await claim.granted
        except BaseException as error:
            if claim in self._holders:
                self._holders.remove(claim)
            else:
                self._waiting.remove(claim)
            self._grant()
            if isinstance(error, TimeoutError):
                reason = f"the request waited {timeout_s:.0f} s for other models' requests, and was given up"
                raise RequestFailed(reason, by_user=False) from None
            raise

    def _grant(self) -> None:
        if self._holders or not self._waiting:
            return
        first = self._waiting.popleft()
        chosen = [first, *(claim for claim in self._waiting if claim.joins(first))]
        self._waiting = deque(claim for claim in self._waiting if claim not in chosen)
        for claim in chosen:
            self._holders.append(claim)
            if not claim.granted.done():
                claim.granted.set_result(None)
