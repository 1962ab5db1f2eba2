"""Brings replicas back: one that dies leaves the router, is started again, gets the current weights and rejoins.

Owns who is restarted, where, how often, and when that is given up. Knows no tokens; requests find their own way
(`replica`).

    tend     one for each post: waits for its replica's end, without a deadline; woken by the socket or by Ray
    retire   waits until a replica is alive, so that requests which wait at the dead one have somewhere to go
    revive   waits for an actor and an engine (`limits.launch_timeout_s`), and for a push that is under way
    move     waits for room on another node (`Patience.place_s`), where the old one has left; then the others go on, and
             it waits for a node that joins, as long as the run lasts

Invariant: while one post may still be filled, the run goes on; when the last one is given up, it ends with the cause.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from treadle.cluster.ray.pool import Post, ReplicaPool
from treadle.cluster.ray.replica import RemoteReplica
from treadle.engine.protocol import WeightUpdate
from treadle.engine.recovery import DEFAULT_PATIENCE, Patience, Recovery, print_recovery
from treadle.engine.router import Router
from treadle.errors import EngineFailure, RunError, TreadleError
from treadle.rollout.dispatch import first_error


@dataclass(slots=True)
class _Charge:
    """One post, and how it has fared."""

    post: Post
    replica: RemoteReplica
    lives: int = 1
    deaths: int = 0
    """In a row, each soon after its birth."""
    died_at: float = 0.0
    cause: str = ""


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
                    group.create_task(self._tend(_Charge(post, replica)))

    async def _tend(self, charge: _Charge) -> None:
        """Keep one post filled."""
        clock = asyncio.get_running_loop().time
        while True:
            born, dead, place = clock(), charge.replica, charge.post.seat
            await dead.life.gone()
            if dead.closed:
                return
            self._pool.roster.leave(dead)
            charge.died_at, charge.cause = clock(), await dead.life.cause()
            charge.deaths = charge.deaths + 1 if charge.died_at - born < self._patience.young_s else 1
            with first_error():
                async with asyncio.TaskGroup() as group:
                    retiring = group.create_task(self._retire(dead))
                    problem = await self._revive(charge)
                    if problem is not None:
                        self._give_up(problem)
                        retiring.cancel()
            if problem is not None:
                self._report(Recovery(dead.name, charge.cause, None, clock() - charge.died_at, problem))
                return await self._drop(dead)
            moved = "" if charge.post.seat is place else str(charge.post.seat)
            seconds = clock() - charge.died_at
            self._report(Recovery(dead.name, charge.cause, charge.replica.name, seconds, place=moved))

    async def _retire(self, replica: RemoteReplica) -> None:
        await self._pool.roster.somebody()
        await self._drop(replica)

    async def _drop(self, replica: RemoteReplica) -> None:
        """Take a dead replica from the router; requests that are still there move on."""
        if replica.name in {state.name for state in self._router.snapshot()}:
            await self._router.remove(replica.name, timeout_s=0)
        await replica.close()

    async def _revive(self, charge: _Charge) -> str | None:
        """Fill a post again; or say why it stays empty."""
        patience, attempt = self._patience, charge.deaths
        problem = f"it died {charge.deaths} times in a row, each time within {patience.young_s:g} s"
        while attempt <= patience.attempts:
            if not charge.post.seat.there() and not await self._move(charge):
                return f"{charge.post.seat.node.machine.name} has left the cluster"
            if charge.post.seat.gpus:
                await self._pool.roster.shelf.awake()  # else the policy has the device to itself
            charge.lives += 1
            try:
                charge.replica = await self._start(charge.post, charge.lives)
                return None
            except TreadleError as error:
                problem = str(error)
            if charge.post.seat.there():  # else the machine is to blame, and it moves on at once
                await asyncio.sleep(patience.first_wait_s * 2 ** (attempt - 1))
                attempt += 1
        return problem

    async def _move(self, charge: _Charge) -> bool:
        """Find a post another place; False where its replica is bound to the machine that has left."""
        move, seat = self._pool.move, charge.post.seat
        if move is None:
            return False
        try:
            async with asyncio.timeout(self._patience.place_s):
                found = await move(seat)
        except TimeoutError:
            self._go_on_without(charge)
            found = await move(seat)
            self._open += 1
        charge.post = charge.post.moved(found)
        return True

    def _go_on_without(self, charge: _Charge) -> None:
        """No node has room for a replica: the others go on, until a node joins or the run ends."""
        seat, now = charge.post.seat, asyncio.get_running_loop().time()
        wanted = f"{len(seat.gpus)} GPU" if seat.gpus else "1 CPU"
        problem = f"{seat.node.machine.name} has left the cluster, and no other node has {wanted} to spare"
        self._give_up(problem)
        left = f"{len(self._pool.roster)} of {len(self._pool.posts)} replicas go on until a node joins"
        self._report(Recovery(charge.replica.name, charge.cause, None, now - charge.died_at, f"{problem}; {left}"))

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
