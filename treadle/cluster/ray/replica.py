"""A replica on the cluster, as a router sees it: an Engine whose work is done in an actor.

Owns what is known here of each request: the tokens that the actor brought to safety. Knows no other replica but through
the roster, which says whether there is one.
Invariant: a request whose actor dies returns the tokens that were saved, for the session to go on with elsewhere; or,
where there are none, fails for the router to try another; while no replica is alive, it waits for one.
"""

import asyncio
import itertools
from dataclasses import replace
from typing import Any

from ray.exceptions import RayActorError, RayError

from treadle.cluster.ray.actors import ReplicaActor
from treadle.cluster.ray.faults import explain, own_error
from treadle.cluster.ray.life import Life
from treadle.cluster.ray.messages import Call, Generate, ReplicaSetup, Saved
from treadle.cluster.ray.roster import Roster
from treadle.cluster.ray.seat import Seat
from treadle.config import RolloutConfig
from treadle.engine.channel import ChannelClosed
from treadle.engine.partial import join_parts
from treadle.engine.protocol import ABORTED, EngineGone, WeightUpdate
from treadle.errors import EngineFailure, TreadleError
from treadle.types import Completion, Request


class RemoteReplica:
    """An `Engine`. Built by `start`, whole."""

    life: Life

    def __init__(self, name: str, rollout: RolloutConfig, roster: Roster) -> None:
        self.name = name
        self.version = 0
        self._reads_text = not rollout.uses_gpus()
        """Whether the engine wants the conversation, too, and not its tokens alone."""
        self._close_timeout_s = rollout.limits.close_timeout_s
        self._roster = roster
        self._numbers = itertools.count()
        self._saved: dict[int, list[Completion]] = {}
        self.closed = False

    @classmethod
    async def start(cls, setup: ReplicaSetup, seat: Seat, roster: Roster) -> "RemoteReplica":
        """A replica whose engine runs, or an error within `rollout.limits.launch_timeout_s`. It is on no roster yet."""
        limits = setup.rollout.limits
        replica = cls(setup.name, setup.rollout, roster)
        replica.life = await Life.start(
            ReplicaActor,
            seat,
            setup,
            name=setup.name,
            answer=replica._keep,
            expected=TreadleError,
            timeout_s=limits.launch_timeout_s,
        )
        return replica

    async def generate(self, request: Request) -> Completion:
        if self.closed:
            raise EngineFailure(f"{self.name} is closed")
        number = next(self._numbers)
        if not self._reads_text and request.messages:
            request = replace(request, messages=(), tools=())
        try:
            last: Completion = await self.life.peer.ask(Generate(number, request))
        except ChannelClosed:
            if number not in self._saved:
                raise await self._lost(request.session) from None
            last = ABORTED
        finally:
            saved = self._saved.pop(number, ())
        return join_parts(saved, last, self.name)

    async def abort(self, session: str | None = None) -> None:
        await self._call("abort", session)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def health(self) -> None:
        await self._call("health")

    async def update_weights(self, update: WeightUpdate) -> str:
        """Take new weights. One that is gone has failed, unless it was the last: then its successor takes them."""
        try:
            with self._roster.shelf.pushing(update):
                confirmed = await self._push(update)
        except EngineGone:
            if await self._succeeded(update):
                return update.checksum
            raise
        self.version = update.version
        return confirmed

    async def _push(self, update: WeightUpdate) -> str:
        """Plain tensors lie in Ray's store; others say themselves where they are."""
        stored = await self._roster.shelf.stored(update)
        if stored is None:
            return str(await self._call("update_weights", update))
        try:
            return str(await self.life.call("update_weights", update.version, update.checksum, stored))
        except RayActorError as error:
            raise EngineGone(f"{self.name} is gone: {explain(error)}") from error
        except RayError as error:
            raise own_error(error) or EngineFailure(f"{self.name}: {explain(error)}") from error

    async def _succeeded(self, update: WeightUpdate) -> bool:
        """Whether the last replica, gone now, has a successor that confirmed these weights: none joins without."""
        self._roster.leave(self)
        if len(self._roster) or not self._roster.attended:
            return False
        await self._roster.somebody()
        return self._roster.shelf.current is update

    async def close(self) -> None:
        """Close the engine, which ends its requests, then the actor."""
        if self.closed:
            return
        self.closed = True
        self._roster.leave(self)
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await self.life.peer.ask(Call("close"))
        except (ChannelClosed, TimeoutError):
            pass  # it is gone, or is ended now: nothing is left of it either way
        finally:
            await self.life.end()

    async def sleep(self, level: int = 1) -> None:
        """Give the device's memory back, where the engine can. The next weights wake it."""
        self._roster.shelf.sleep()
        await self._call("sleep", level)

    def forget(self, session: str) -> None:
        """A session is over: what the engine keeps for it may go."""
        if not self.life.over:
            self.life.peer.tell(Call("forget", (session,)))

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await self.life.peer.ask(Call(method, arguments))
        except ChannelClosed:
            raise EngineGone(f"{self.name} is gone: {await self.life.cause()}") from None

    async def _lost(self, session: str) -> EngineFailure:
        """The failure of a request whose actor is gone; known when there is a replica that can do better."""
        cause = await self.life.cause()
        self._roster.leave(self)
        await self._roster.somebody()
        return EngineFailure(f"{self.name}: session {session}: the replica is gone: {cause}")

    async def _keep(self, saved: Saved) -> None:
        """Tokens of a running request have come."""
        self._saved.setdefault(saved.number, []).append(saved.part)
