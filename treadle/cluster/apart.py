"""The engines of a run in processes of their own, on this machine: started, and started again when they die.

Owns how a successor gets the policy's weights. The policy lives on the run's loop, engines on the rollout's; calls that
concern both cross over.

Who waits for whom: a successor's weights wait until the policy's are those that engines have, then for another push to
end; a start on the policy's own GPU waits until no step trains, and a step waits for such a start.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from treadle.aio import first_error
from treadle.engine.protocol import Engine, ProcessEngine, SupportsSleep, WeightUpdate
from treadle.engine.replica_supervisor import ReplicaSupervisor
from treadle.weights.sync import WeightLock, WeightReceiver

T = TypeVar("T")

Start = Callable[[], Coroutine[Any, Any, ProcessEngine]]
"""Starts an engine, on the rollout's loop."""

Give = Callable[[WeightReceiver, int], Awaitable[object]]
"""Pushes the policy's weights, as a version; on the run's loop."""


async def across(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` on another loop. Cancelling this cancels it there."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


@dataclass(frozen=True, slots=True)
class _Distant:
    """An engine on another loop, as a push sees it."""

    engine: Engine
    loop: asyncio.AbstractEventLoop

    @property
    def name(self) -> str:
        return self.engine.name

    async def update_weights(self, update: WeightUpdate) -> str:
        return await across(self.loop, self.engine.update_weights(update))


class Apart:
    """Made on the run's loop; `start_all` is called on the rollout's."""

    def __init__(self, starts: Mapping[str, Start], weight_lock: WeightLock, give: Give):
        """`starts` starts each engine, by its name."""
        self._starts = starts
        self._stillness = weight_lock
        self._give = give
        self._home = asyncio.get_running_loop()
        self.supervisor = ReplicaSupervisor(len(starts), restore=self._restore)

    async def start_all(self, *, shares_gpu: bool, sleeps: bool) -> Sequence[Engine]:
        """Every engine. One that `shares_gpu` with the policy starts again between two steps, and then `sleeps`."""
        first = True

        async def start(once: Start) -> ProcessEngine:
            if first or not shares_gpu:
                return await once()
            return await across(self._home, self._start_idle(asyncio.get_running_loop(), once, sleeps))

        try:
            with first_error():
                async with asyncio.TaskGroup() as starting:
                    added = [
                        starting.create_task(self.supervisor.add(name, partial(start, once)))
                        for name, once in self._starts.items()
                    ]
        except BaseException:
            await self.supervisor.dismiss()
            raise
        first = False
        return [task.result() for task in added]

    async def _start_idle(self, there: asyncio.AbstractEventLoop, once: Start, sleeps: bool) -> ProcessEngine:
        async def start() -> ProcessEngine:
            engine = await once()
            if sleeps and isinstance(engine, SupportsSleep):
                await engine.sleep(1)  # the next step may begin before it has weights, which wake it
            return engine

        async with self._stillness.idle():
            return await across(there, start())

    async def _restore(self, engine: Engine, wanted: Callable[[], bool]) -> int | None:
        distant = _Distant(engine, asyncio.get_running_loop())
        return await across(self._home, self._restore_still(distant, wanted))

    async def _restore_still(self, engine: WeightReceiver, wanted: Callable[[], bool]) -> int | None:
        async with self._stillness.still() as version:
            if not wanted():
                return None
            await self._give(engine, version)
            return version
