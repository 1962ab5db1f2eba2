"""Replica supervisor: an engine whose process dies is started again, under the same name.

Owns the slots of one rollout's engines: which serve, which are being started again, and when that is given up. Requests
run in slices (`partial`): one that lost its process returns the tokens of the slices before, for its session to go on
with; without any it is made again. On this machine and on a cluster alike.

    generate, update_weights   wait for the successor, if no other engine serves; else they fail, and go elsewhere
    tend                       one for each slot: waits for the process's end, without a deadline; then for the next one
                               (its launch deadline) and for its weights, by the next push or by a restore

Invariant: a successor serves nothing before it has the weights of the others. When the last slot is given up, `watch`
raises the cause.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict
from typing import Any, Protocol, Self

from treadle.engine.in_flight import PauseGate
from treadle.engine.protocol import (
    ABORTED,
    Engine,
    EngineGone,
    Placed,
    ProcessEngine,
    SupportsForget,
    SupportsSleep,
    WeightUpdate,
)
from treadle.engine.requests import SAVE_S, PartialRequests, SaveSlice, join_completions
from treadle.engine.router import Router
from treadle.errors import EngineFailure, RunError, TreadleError
from treadle.process.supervisor import (
    DEFAULT_POLICY,
    Recovery,
    RestartFailed,
    RestartPolicy,
    print_recovery,
    restart,
)
from treadle.types import Completion, Request


class Restore(Protocol):
    """Gives an engine the weights of the others, as soon as that can be done; unless it is not `wanted` any more."""

    async def __call__(self, engine: Engine, wanted: Callable[[], bool]) -> int | None:
        """The version it has now; None: it was not wanted."""
        ...


class ReplicaSupervisor:
    """The engines of one rollout. Without `restore`, a successor has the model's weights, or waits for a push."""

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
        self._slots: list[RestartingEngine] = []
        self._router: Router | None = None
        self._note: Callable[[str, Mapping[str, object]], None] | None = None
        self._end = asyncio.Event()
        self._cause = ""

    async def add(self, name: str, start: Callable[[], Awaitable[ProcessEngine]]) -> "RestartingEngine":
        """An engine that `start` starts, now and whenever its process has died."""
        slot = RestartingEngine(name, await start(), start, self)
        self._slots.append(slot)
        return slot

    async def attend(self, router: Router, note: Callable[[str, Mapping[str, object]], None]) -> Self:
        """Let the router know when an engine is back, and note what happens."""
        self._router, self._note = router, note
        return self

    async def watch(self) -> None:
        """Wait until no engine is left, and raise why."""
        await self._end.wait()
        raise RunError(self._cause)

    async def close(self) -> None:
        """Restart no replica from now on. The engines themselves are the router's."""
        for slot in self._slots:
            await slot.rest()

    async def dismiss(self) -> None:
        """Close every engine; for when not all of them could be started."""
        for slot in self._slots:
            await slot.close()

    def serves_without(self, slot: "RestartingEngine") -> bool:
        """Whether another replica would serve a request now."""
        return any(other.serves for other in self._slots if other is not slot)

    def relieve(self, slot: "RestartingEngine") -> None:
        """A replica serves again: requests that wait at other slots are released."""
        for other in self._slots:
            if other is not slot and not other.serves:
                other.send_away()

    def tell(self, recovery: Recovery) -> None:
        self._report(recovery)
        if self._note is not None:
            self._note("replica", asdict(recovery))

    def mark_synced(self, name: str, version: int) -> None:
        """An engine was proven to have these weights, without the router."""
        if self._router is not None:
            self._router.mark_synced(name, version)

    def give_up(self, reason: str) -> None:
        """A slot stays empty. With the last one the rollout ends."""
        if sum(slot.lost or slot.absent for slot in self._slots) == self._size:
            self._cause = f"no replica is left, and none could be started again: {reason}"
            self._end.set()

    def go_on_without(self, name: str, reason: str) -> None:
        """A slot has no place for a process now: the others go on, until it has one or the run ends."""
        slot = next(slot for slot in self._slots if slot.name == name)
        slot.absent = True
        self.give_up(reason)
        left = sum(other.serves for other in self._slots)
        going_on = f"{left} of {self._size} replicas go on until a node joins"
        self.tell(Recovery(name, slot.cause, None, slot.dead_s, f"{reason}; {going_on}"))


class RestartingEngine:
    """An `Engine` around those that hold its slot in turn. Made by `ReplicaSupervisor.add`."""

    def __init__(
        self,
        name: str,
        first: ProcessEngine,
        start: Callable[[], Awaitable[ProcessEngine]],
        supervisor: ReplicaSupervisor,
    ) -> None:
        self.name = name
        self.version = first.version
        self.lost = False
        """No process will hold this slot again."""
        self.absent = False
        """No process can hold it for now."""
        self._place = first.place if isinstance(first, Placed) else ""
        self._died = 0.0
        self._supervisor = supervisor
        self._start = start
        self._engine: ProcessEngine | None = first
        self._successor: ProcessEngine | None = None
        """Started, and without weights yet."""
        self._arrived = asyncio.Event()
        """There is an engine or a successor; or there will be none."""
        self._gate = PauseGate()
        self._requests = PartialRequests(supervisor.save_s, self._interrupt)
        self._interrupting: set[asyncio.Task[None]] = set()
        self._paused = False
        self._cause = ""
        self._arrived.set()
        self._tending = asyncio.ensure_future(self._stay(first))

    @property
    def serves(self) -> bool:
        return self._engine is not None

    @property
    def restarting(self) -> bool:
        return self._engine is None and not self.lost and not self.absent

    @property
    def cause(self) -> str:
        """Of the last death."""
        return self._cause

    @property
    def dead_s(self) -> float:
        """Since the last death."""
        return asyncio.get_running_loop().time() - self._died

    async def generate(self, request: Request) -> Completion:
        while True:
            if self._gate.shut:
                self._refuse()
                if not await self._gate.admit(request.session):
                    return ABORTED
            engine = self._engine
            assert engine is not None, "the gate is open while there is one"
            saved: list[Completion] = []
            try:
                last = await self._requests.generate(engine, request, _keeper(saved))
            except EngineGone:
                self._lose(engine)
                if saved:
                    return join_completions(saved, ABORTED, self.name)
                self._refuse()
            else:
                return join_completions(saved, last, self.name)

    def _interrupt(self, abort: Coroutine[Any, Any, None]) -> None:
        """Let a request hand its tokens over. An engine that cannot is gone, and the request itself sees that."""
        task = asyncio.ensure_future(abort)
        self._interrupting.add(task)
        task.add_done_callback(self._interrupting.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def update_weights(self, update: WeightUpdate) -> str:
        while True:
            engine = self._engine or self._successor
            if engine is None:
                self._refuse()
                await self._arrived.wait()
                continue
            try:
                confirmed = await engine.update_weights(update)
            except EngineGone:
                self._lose(engine)
                continue
            if confirmed == update.checksum:
                self._seat(engine, update.version)
            return confirmed

    async def abort(self, session: str | None = None) -> None:
        self._gate.abort(session)
        self._requests.end(session)
        await self._order(lambda engine: engine.abort(session))

    async def pause(self) -> None:
        self._paused = True
        self.send_away()  # those that wait for a successor count as running
        self._requests.end()
        await self._order(lambda engine: engine.pause())

    async def resume(self) -> None:
        self._paused = False
        await self._order(lambda engine: engine.resume())

    async def sleep(self, level: int = 1) -> None:
        """Where the engine can."""
        self._requests.end()
        await self._order(lambda engine: engine.sleep(level) if isinstance(engine, SupportsSleep) else _nothing())

    async def _order(self, call: Callable[[ProcessEngine], Awaitable[None]]) -> None:
        """Tell the engine, or its successor. One that is gone needs not be told; the next one is as it should be."""
        engine = self._engine or self._successor
        if engine is not None:
            try:
                await call(engine)
            except EngineGone:
                self._lose(engine)

    def send_away(self) -> None:
        """End what waits for a successor, with no tokens: sessions ask again."""
        self._gate.abort()

    def forget(self, session: str) -> None:
        if isinstance(self._engine, SupportsForget):
            self._engine.forget(session)

    async def health(self) -> None:
        if self._engine is None:
            raise EngineFailure(f"{self.name} is being started again: {self._cause}")
        await self._engine.health()

    async def rest(self) -> None:
        """Do not come back from the next death."""
        self._tending.cancel()
        await asyncio.wait({self._tending})
        if not self._tending.cancelled():
            self._tending.exception()  # already raised to the waiting calls

    async def close(self) -> None:
        self._gate.close(f"{self.name} is closed")
        self._requests.end()
        await self.rest()
        for engine in (self._engine, self._successor):
            if engine is not None:
                await engine.close()

    def _refuse(self) -> None:
        """Fail where waiting is no use: other replicas serve meanwhile, or no restart follows."""
        if self.lost:
            raise EngineFailure(f"{self.name} could not be started again: {self._cause}")
        if self._supervisor.serves_without(self):
            raise EngineFailure(f"{self.name} is being started again: {self._cause}")

    def _lose(self, engine: ProcessEngine) -> None:
        """The replica is gone, as a failed call or its supervision noticed."""
        if engine is self._engine or engine is self._successor:
            self._engine = self._successor = None
            self._arrived.clear()
            self._gate.pause()

    def _seat(self, engine: ProcessEngine, version: int) -> None:
        """This one has these weights, and serves from now on."""
        self.version = version
        if engine is self._successor:
            self._engine, self._successor = engine, None
            self.absent = False
            self._gate.resume()
            self._supervisor.relieve(self)

    async def _stay(self, first: ProcessEngine) -> None:
        """Supervise the slot; whatever fails there, no request waits forever."""
        try:
            await self._tend(first)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}", 0.0)
            raise

    async def _tend(self, engine: ProcessEngine) -> None:
        """Keep the slot filled."""
        clock, deaths, policy = asyncio.get_running_loop().time, 0, self._supervisor.policy
        while True:
            born = clock()
            self._cause = await engine.gone()
            died = self._died = clock()
            self._lose(engine)
            await engine.close()
            deaths = deaths + 1 if died - born < policy.young_s else 1
            try:
                engine = await self._succeed(deaths)
            except RestartFailed as failure:
                return self._give_up(str(failure), clock() - died)
            if self.serves:
                place = engine.place if isinstance(engine, Placed) else ""
                moved, self._place = "" if place == self._place else place, place
                self._supervisor.tell(Recovery(self.name, self._cause, self.name, clock() - died, place=moved))

    def _give_up(self, reason: str, seconds: float) -> None:
        recovery = Recovery(self.name, self._cause, None, seconds, reason)
        self.lost, self._cause = True, reason
        self._gate.close(f"{self.name} could not be started again: {reason}")
        self._arrived.set()
        self._supervisor.give_up(reason)
        self._supervisor.tell(recovery)

    async def _succeed(self, deaths: int) -> ProcessEngine:
        """A successor that serves, or RestartFailed: why there is none."""

        async def attempt() -> ProcessEngine:
            engine = await self._start()
            try:
                await self._equip(engine)
            except TreadleError:
                self._lose(engine)
                await engine.close()
                raise
            except BaseException:
                await asyncio.shield(engine.close())
                raise
            return engine

        return await restart(attempt, self._supervisor.policy, deaths)

    async def _equip(self, engine: ProcessEngine) -> None:
        """Let a successor begin: with weights that a push brings, or with restored ones."""
        self._successor = engine
        if self._paused:
            await engine.pause()
            if not self._paused:  # a resume came meanwhile
                await engine.resume()
        self._arrived.set()
        if self._supervisor.restore is None:
            if engine.version == self.version:
                self._seat(engine, engine.version)
            return
        restoring = asyncio.ensure_future(self._supervisor.restore(engine, lambda: self._successor is engine))
        dying = asyncio.ensure_future(engine.gone())
        try:
            await asyncio.wait({restoring, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not restoring.done():  # it may wait for a push, which may wait for the next successor
                raise EngineGone(f"{self.name} died before it had weights: {dying.result()}")
        finally:
            restoring.cancel()
            dying.cancel()
        version = restoring.result()
        if version is not None and self._successor is engine:
            self._seat(engine, version)
            self._supervisor.mark_synced(self.name, version)


def _keeper(saved: list[Completion]) -> SaveSlice:
    async def keep(part: Completion) -> None:
        saved.append(part)

    return keep


async def _nothing() -> None:
    """What an engine does that cannot sleep."""
