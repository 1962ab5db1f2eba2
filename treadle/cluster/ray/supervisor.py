"""Brings replicas back: one that dies leaves the router, is started again, gets the current weights and rejoins.

Owns who is restarted, how often, and when that is given up. Knows no tokens; requests find their own way (`replica`).

    tend     one for each post: waits for its replica's end, without a deadline; woken by the socket or by Ray
    retire   waits until a replica is alive, so that requests which wait at the dead one have somewhere to go
    revive   waits for an actor and an engine (`limits.launch_timeout_s`), and for a push that is under way

Invariant: while one post may still be filled, the run goes on; when the last one is given up, it ends with the cause.
"""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from treadle.cluster.ray.pool import Post, ReplicaPool
from treadle.cluster.ray.replica import RemoteReplica
from treadle.engine.protocol import WeightUpdate
from treadle.engine.router import Router
from treadle.errors import EngineFailure, RunError, TreadleError
from treadle.rollout.dispatch import first_error


@dataclass(frozen=True, slots=True)
class Patience:
    """The numbers behind giving up."""

    attempts: int = 3
    """Starts that may fail in a row, or replicas that may die young in a row."""
    young_s: float = 60.0
    """A replica that lived longer did not die of its start."""
    first_wait_s: float = 1.0
    """Before the second attempt; doubled each time."""


DEFAULT_PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class Recovery:
    """What became of a replica that died."""

    replica: str
    cause: str
    successor: str | None
    """None: it was given up, for `reason`."""
    seconds: float
    """From its death to its successor's first request, or to the giving up."""
    reason: str = ""

    def __str__(self) -> str:
        died = f"{self.replica} died: {self.cause}"
        if self.successor is None:
            return f"{died}; it could not be brought back: {self.reason}"
        return f"{died}; {self.successor} took its place after {self.seconds:.1f} s"


def print_recovery(recovery: Recovery) -> None:
    """The default place for reports: standard error."""
    print(f"note: {recovery}", file=sys.stderr, flush=True)


class Supervisor:
    """See the module. `watch` raises when no replica is left; `close` ends the supervision, and no replica."""

    def __init__(
        self, pool: ReplicaPool, router: Router, report: Callable[[Recovery], None], patience: Patience
    ) -> None:
        self._pool = pool
        self._router = router
        self._report = report
        self._patience = patience
        self._open = len(pool.posts)
        """Posts that are filled, or may be again."""
        self._work = asyncio.ensure_future(self._tend_all())

    @classmethod
    async def attend(
        cls,
        pool: ReplicaPool,
        router: Router,
        *,
        report: Callable[[Recovery], None] = print_recovery,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> Self:
        """Look after the replicas that `pool` has started and `router` routes to; on the loop of both."""
        pool.roster.attended = True
        return cls(pool, router, report, patience)

    async def watch(self) -> None:
        """Wait until there is nothing to look after any more; raise if that is not as it should be."""
        await asyncio.shield(self._work)

    async def close(self) -> None:
        """Restart nobody from now on."""
        self._pool.roster.close("the rollout is closing")
        self._work.cancel()
        await asyncio.wait({self._work})
        if not self._work.cancelled():
            self._work.exception()  # whoever watched has heard it

    async def _tend_all(self) -> None:
        with first_error():
            async with asyncio.TaskGroup() as group:
                for post, replica in zip(self._pool.posts, self._pool.replicas, strict=True):
                    group.create_task(self._tend(post, replica))

    async def _tend(self, post: Post, first: RemoteReplica) -> None:
        """Keep one post filled."""
        clock, replica, lives, deaths = asyncio.get_running_loop().time, first, 1, 0
        while True:
            born = clock()
            await replica.life.gone()
            if replica.closed:
                return
            self._pool.roster.leave(replica)
            died, cause = clock(), await replica.life.cause()
            deaths = deaths + 1 if died - born < self._patience.young_s else 1
            with first_error():
                async with asyncio.TaskGroup() as group:
                    retiring = group.create_task(self._retire(replica))
                    successor, reason, lives = await self._revive(post, lives, deaths)
                    if successor is None:
                        self._give_up(reason)
                        retiring.cancel()
            name = None if successor is None else successor.name
            self._report(Recovery(replica.name, cause, name, clock() - died, reason))
            if successor is None:
                return await self._drop(replica)
            replica = successor

    async def _retire(self, replica: RemoteReplica) -> None:
        await self._pool.roster.somebody()
        await self._drop(replica)

    async def _drop(self, replica: RemoteReplica) -> None:
        """Take a dead replica from the router; requests that are still there move on."""
        if replica.name in {state.name for state in self._router.snapshot()}:
            await self._router.remove(replica.name, timeout_s=0)
        await replica.close()

    async def _revive(self, post: Post, lives: int, deaths: int) -> tuple[RemoteReplica | None, str, int]:
        """A successor at work, or why there is none; and the number of lives so far."""
        reason = f"it died {deaths} times in a row, each time within {self._patience.young_s:g} s"
        for attempt in range(deaths, self._patience.attempts + 1):
            if not post.seat.there():
                return None, f"{post.seat.node.machine.name} has left the cluster", lives
            if post.seat.gpus:
                await self._pool.roster.shelf.awake()  # else the policy has the device to itself
            lives += 1
            try:
                return await self._start(post, lives), "", lives
            except TreadleError as error:
                reason = str(error)
            await asyncio.sleep(self._patience.first_wait_s * 2 ** (attempt - 1))
        return None, reason, lives

    async def _start(self, post: Post, life: int) -> RemoteReplica:
        replica = await RemoteReplica.start(post.again(life), post.seat, self._pool.roster)
        try:
            await self._bring_in(post, replica)
        except BaseException:
            await replica.close()
            raise
        self._pool.roster.join(replica)
        return replica

    async def _bring_in(self, post: Post, replica: RemoteReplica) -> None:
        """Give a replica the weights of the others and let it take part. A push that begins meanwhile passes it by."""
        shelf = self._pool.roster.shelf
        while True:
            await shelf.settled()
            update = shelf.current
            if update is not None:
                await _give(replica, update, post.setup.rollout.limits.request_timeout_s)
            await self._router.add(replica)
            await shelf.settled()
            if shelf.current is update:
                return
            await self._router.remove(replica.name, timeout_s=0)

    def _give_up(self, reason: str) -> None:
        """A post is lost. With the last one, the run is."""
        self._open -= 1
        if self._open == 0:
            self._pool.roster.close(f"no replica is left: {reason}")
            raise RunError(f"no replica is left, and none could be brought back: {reason}")


async def _give(replica: RemoteReplica, update: WeightUpdate, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            confirmed = await replica.update_weights(update)
    except TimeoutError:
        late = f"{replica.name} did not take the weights of version {update.version} within {timeout_s:g} s"
        raise EngineFailure(late) from None
    if confirmed != update.checksum:
        raise EngineFailure(
            f"{replica.name} got damaged weights of version {update.version}: {confirmed}, not {update.checksum}"
        )
