"""Replica supervisor: an engine whose process dies is started again, under the same name.

Owns the replicas of one rollout: which serve, which are being started again, and when that is given up. Each of them is
a `RestartingEngine` (`restarting_engine.py`). On this machine and on a cluster alike.

Invariant: when the last replica is given up, or open sessions are `interrupt`ed, `watch` raises the cause.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass

from treadle.engine.protocol import Engine, ProcessEngine
from treadle.engine.requests import SAVE_S
from treadle.engine.restarting_engine import RestartingEngine, Restore
from treadle.engine.router import Router
from treadle.errors import EnginesLost
from treadle.journal import Journal
from treadle.process.supervisor import DEFAULT_POLICY, Recovery, RestartPolicy, print_recovery


class ReplicaSupervisor:
    """The engines of one rollout. Without `restore`, a replacement has the model's weights, or waits for a push."""

    def __init__(
        self,
        size: int,
        *,
        restore: Restore | None = None,
        policy: RestartPolicy = DEFAULT_POLICY,
        report: Callable[[Recovery], None] = print_recovery,
        save_s: float | None = SAVE_S,
    ) -> None:
        self.restore = restore
        self.save_s = save_s
        self.policy = policy
        self._size = size
        self._report = report
        self._replicas: list[RestartingEngine] = []
        self._router: Router | None = None
        self._journal: Journal | None = None
        self._end = asyncio.Event()
        self._cause = ""
        self._is_watched = False

    async def add(self, name: str, start: Callable[[], Awaitable[ProcessEngine]]) -> RestartingEngine:
        """An engine that `start` starts, now and whenever its process has died."""
        replica = RestartingEngine(name, await start(), start, self)
        self._replicas.append(replica)
        return replica

    def connect(self, router: Router, journal: Journal | None = None) -> None:
        """Let the router know when an engine is back, and the journal what happened."""
        self._router, self._journal = router, journal

    async def watch(self) -> None:
        """Wait until no engine is left, or open sessions cannot go on; raise why."""
        self._is_watched = True
        try:
            await self._end.wait()
        except asyncio.CancelledError:
            self._is_watched = False
            raise
        raise EnginesLost(self._cause)

    @property
    def ends_rollout(self) -> bool:
        """Whether `watch` raises now: requests wait for that, instead of failing one by one."""
        return self._is_watched and self._end.is_set()

    async def close(self) -> None:
        """Restart no replica from now on. The engines themselves are the router's."""
        for replica in self._replicas:
            await replica.stop_restarting()

    async def close_engines(self) -> None:
        """Close every engine; for when not all of them could be started."""
        for replica in self._replicas:
            await replica.close()

    def serves_without(self, replica: RestartingEngine) -> bool:
        """Whether another replica would serve a request now."""
        return any(other.serves for other in self._replicas if other is not replica)

    def interrupt(self, reason: str) -> None:
        """What is sampled now cannot go on: `watch` raises, until an engine serves again."""
        self._cause = reason
        self._end.set()

    def release_waiting(self, replica: RestartingEngine) -> None:
        """A replica serves again: requests that wait for other replicas are released."""
        self._end.clear()
        for other in self._replicas:
            if other is not replica and not other.serves:
                other.abort_waiting()

    def report(self, recovery: Recovery) -> None:
        self._report(recovery)
        if self._journal is not None:
            self._journal.add_event("replica", **asdict(recovery))

    def mark_synced(self, name: str, version: int) -> None:
        """An engine was proven to have these weights, without the router."""
        if self._router is not None:
            self._router.mark_synced(name, version)

    def give_up(self, reason: str) -> None:
        """A replica is not started again. With the last one the rollout ends."""
        if sum(replica.is_lost or replica.is_absent for replica in self._replicas) == self._size:
            self._cause = f"no replica is left, and none could be started again: {reason}"
            self._end.set()

    def go_on_without(self, name: str, reason: str) -> None:
        """There is no place for a replica's process now: the others go on, until there is one or the run ends."""
        replica = next(replica for replica in self._replicas if replica.name == name)
        replica.is_absent = True
        self.give_up(reason)
        left = sum(other.serves for other in self._replicas)
        going_on = f"{left} of {self._size} replicas go on until a node joins"
        self.report(Recovery(name, replica.cause, None, replica.dead_s, f"{reason}; {going_on}"))


@dataclass(frozen=True, slots=True)
class StartedEngines:
    """The replicas of one rollout, and what restarts them."""

    engines: Sequence[Engine]
    supervisor: ReplicaSupervisor | None = None
    """Restarts the engines, and ends the rollout with the last one; None: their failures are those of requests."""
