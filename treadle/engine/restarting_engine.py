"""Restarting engine: one replica, whichever process serves for it: one that dies is started again, under the same name.

Owns the process of a replica, and the requests that it runs. They run in slices (`partial`): one that lost its process
returns the tokens of the slices before, for its session to go on with; without any it is made again.

    generate, update_weights   wait for the replacement, if no other engine serves; else they fail, and go elsewhere
    supervision                one for each replica: waits for the process's end, without a deadline; then for the next
                               one (its launch deadline) and for its weights, by the next push or by a restore

A process that lives and answers nothing is killed, and replaced as one that died (`replace`): when health checks that
the router makes have no answer, and before weights or a pause are sent to it.

Invariant: a replacement serves nothing before it has the weights of the others.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from treadle.engine.in_flight import PauseGate
from treadle.engine.protocol import (
    ABORTED,
    ConfirmedWeights,
    Engine,
    EngineGone,
    Placed,
    ProcessEngine,
    SupportsForget,
    SupportsKill,
    SupportsSleep,
    WeightUpdate,
)
from treadle.engine.replica_set import PROBE_TIMEOUT_S, SILENT_PROBES
from treadle.engine.requests import PartialRequests, SlicedRequest, join_completions
from treadle.errors import EngineFailure, TreadleError
from treadle.process.supervisor import Recovery, RestartFailed, restart
from treadle.types import Completion, Request

if TYPE_CHECKING:
    from treadle.engine.replica_supervisor import ReplicaSupervisor

PAUSE_S = 60.0
"""How long an engine that was just started may take to be paused: it has no requests yet."""


class Restore(Protocol):
    """Gives an engine the weights of the others, as soon as that can be done; unless it is not `wanted` any more."""

    async def __call__(self, engine: Engine, wanted: Callable[[], bool]) -> int | None:
        """The version it has now; None: it was not wanted."""
        ...


class RestartingEngine:
    """A replica: an `Engine` around its process, and around those that replace it. Made by `ReplicaSupervisor.add`."""

    def __init__(
        self,
        name: str,
        first: ProcessEngine,
        start: Callable[[], Awaitable[ProcessEngine]],
        supervisor: "ReplicaSupervisor",
    ) -> None:
        self.name = name
        self.version = first.version
        self.is_lost = False
        """It is not started again."""
        self.is_absent = False
        """There is no place for its process now."""
        self._place = first.place if isinstance(first, Placed) else ""
        self._died = 0.0
        self._supervisor = supervisor
        self._start = start
        self._engine: ProcessEngine | None = first
        self._replacement: ProcessEngine | None = None
        """Started, and without weights yet."""
        self._arrived = asyncio.Event()
        """There is an engine or a replacement; or there will be none."""
        self._gate = PauseGate()
        self._requests = PartialRequests(supervisor.save_s, self._interrupt)
        self._interrupting: set[asyncio.Task[None]] = set()
        self._paused = False
        self._updating = 0
        """Updates that the process is taking in."""
        self._killed_since = ""
        """Why it was killed from here."""
        self._cause = ""
        self._arrived.set()
        self._supervising = asyncio.ensure_future(self._supervise(first))

    @property
    def serves(self) -> bool:
        return self._engine is not None

    @property
    def restarting(self) -> bool:
        return self._engine is None and not self.is_lost and not self.is_absent

    @property
    def cause(self) -> str:
        """Why the last process died."""
        return self._cause

    @property
    def dead_s(self) -> float:
        """Seconds since the last process died."""
        return asyncio.get_running_loop().time() - self._died

    async def generate(self, request: Request) -> Completion:
        while True:
            if self._gate.shut:
                if not self._supervisor.ends_rollout:
                    self._refuse_to_wait()
                if not await self._gate.admit(request.session):
                    return ABORTED
            engine = self._engine
            assert engine is not None, "the gate is open while there is one"
            with SlicedRequest(self._requests, request) as sliced:
                try:
                    while sliced.last is None:
                        sliced.start_timer(engine)
                        sliced.add(await engine.generate(sliced.rest))
                    return join_completions(sliced.saved, sliced.last, self.name)
                except EngineGone:
                    self._drop(engine)
                    if sliced.saved:
                        return join_completions(sliced.saved, ABORTED, self.name)
            if not self._supervisor.ends_rollout:
                self._refuse_to_wait()

    def _interrupt(self, abort: Coroutine[Any, Any, None]) -> None:
        """Let a request hand its tokens over. An engine that cannot is gone, and the request itself sees that."""
        task = asyncio.ensure_future(abort)
        self._interrupting.add(task)
        task.add_done_callback(self._interrupting.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        while True:
            engine = self._engine or self._replacement
            if engine is None:
                self._refuse_to_wait()
                await self._arrived.wait()
                continue
            if not await self._responds(engine):
                continue
            self._updating += 1
            try:
                confirmed = await engine.update_weights(update)
            except EngineGone:
                self._drop(engine)
                continue
            finally:
                self._updating -= 1
            if confirmed.checksum == update.checksum:
                self._serve_with(engine, update.version)
            return confirmed

    async def abort(self, session: str | None = None) -> None:
        self._gate.abort(session)
        self._requests.end(session)
        await self._order(lambda engine: engine.abort(session))

    async def pause(self) -> None:
        self._paused = True
        self.abort_waiting()  # those that wait for a replacement count as running
        self._requests.end()
        if self._engine is not None:
            await self._responds(self._engine)
        await self._order(lambda engine: engine.pause())

    async def resume(self) -> None:
        self._paused = False
        await self._order(lambda engine: engine.resume())

    async def sleep(self, level: int = 1) -> None:
        """Where the engine can."""
        self._requests.end()
        await self._order(lambda engine: engine.sleep(level) if isinstance(engine, SupportsSleep) else _noop())

    async def _order(self, call: Callable[[ProcessEngine], Awaitable[None]]) -> None:
        """Tell the engine, or its replacement. One that is gone needs not be told; the next one is as it should be."""
        engine = self._engine or self._replacement
        if engine is not None:
            try:
                await call(engine)
            except EngineGone:
                self._drop(engine)

    def abort_waiting(self) -> None:
        """End what waits for a replacement, with no tokens: sessions ask again."""
        self._gate.abort()

    def forget(self, session: str) -> None:
        if isinstance(self._engine, SupportsForget):
            self._engine.forget(session)

    async def health(self) -> None:
        if self._engine is None:
            happens = "could not be" if self.is_lost else "is being"
            raise EngineFailure(f"{self.name} {happens} started again: {self._cause}")
        await self._engine.health()

    async def _responds(self, engine: ProcessEngine) -> bool:
        """Whether an engine is there to be told something that is waited for; a frozen one is replaced first."""
        for _ in range(SILENT_PROBES):
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await engine.health()
                return True
            except TimeoutError:
                continue
            except EngineGone:
                self._drop(engine)
                return False
            except EngineFailure:
                return True  # it can still say what is wrong
        if not self.replace(f"no answer to a health check in {PROBE_TIMEOUT_S:g} s, {SILENT_PROBES} times in a row"):
            return True
        self._drop(engine)
        return False

    def replace(self, reason: str) -> bool:
        """Kill a process that gives no answer, for the next one to take its place. One that takes in weights is spared:
        it may be too busy to answer, and the push has a deadline of its own."""
        engine = self._engine or self._replacement
        if self._updating or not isinstance(engine, SupportsKill):
            return False
        self._killed_since = reason
        engine.kill()
        return True

    async def stop_restarting(self) -> None:
        """Do not come back from the next death."""
        self._supervising.cancel()
        await asyncio.wait({self._supervising})
        if not self._supervising.cancelled():
            self._supervising.exception()  # already raised to the waiting calls

    async def close(self) -> None:
        self._gate.close(f"{self.name} is closed")
        self._requests.end()
        await self.stop_restarting()
        for engine in (self._engine, self._replacement):
            if engine is not None:
                await engine.close()

    def _refuse_to_wait(self) -> None:
        """Fail where waiting is no use: other replicas serve meanwhile, or no restart follows."""
        if self.is_lost:
            raise EngineFailure(f"{self.name} could not be started again: {self._cause}")
        if self._supervisor.serves_without(self):
            raise EngineFailure(f"{self.name} is being started again: {self._cause}")

    def _drop(self, engine: ProcessEngine) -> None:
        """The replica is gone, as a failed call or its supervision noticed."""
        if engine is self._engine or engine is self._replacement:
            self._engine = self._replacement = None
            self._arrived.clear()
            self._gate.pause()

    def _serve_with(self, engine: ProcessEngine, version: int) -> None:
        """This one has these weights, and serves from now on."""
        self.version = version
        if engine is self._replacement:
            self._engine, self._replacement = engine, None
            self.is_absent = False
            self._gate.resume()
            self._supervisor.release_waiting(self)
            place = engine.place if isinstance(engine, Placed) else ""
            moved, self._place = "" if place == self._place else place, place
            self._supervisor.report(Recovery(self.name, self._cause, self.name, self.dead_s, place=moved))

    async def _supervise(self, first: ProcessEngine) -> None:
        """Supervise the process; whatever fails there, no request waits forever."""
        try:
            await self._keep_filled(first)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}", 0.0)
            raise

    async def _keep_filled(self, engine: ProcessEngine) -> None:
        """Restart the engine process whenever it ends, until the restart policy gives up."""
        clock, quick_exits, policy = asyncio.get_running_loop().time, 0, self._supervisor.policy
        while True:
            started_at = clock()
            self._cause = await engine.gone()
            if self._killed_since:
                self._cause, self._killed_since = f"it was killed, since there was {self._killed_since}", ""
            died = self._died = clock()
            self._drop(engine)
            await engine.close()
            quick_exits = quick_exits + 1 if died - started_at < policy.min_uptime_s else 1
            try:
                engine = await self._restart(quick_exits)
            except RestartFailed as failure:
                return self._give_up(str(failure), clock() - died)

    def _give_up(self, reason: str, seconds: float) -> None:
        recovery = Recovery(self.name, self._cause, None, seconds, reason)
        self.is_lost, self._cause = True, reason
        self._supervisor.give_up(reason)
        if not self._supervisor.ends_rollout:
            self._gate.close(f"{self.name} could not be started again: {reason}")
        self._arrived.set()
        self._supervisor.report(recovery)

    async def _restart(self, quick_exits: int) -> ProcessEngine:
        """A replacement that serves, or RestartFailed: why there is none."""

        async def attempt() -> ProcessEngine:
            engine = await self._start()
            try:
                await self._give_weights(engine)
            except TreadleError:
                self._drop(engine)
                await engine.close()
                raise
            except BaseException:
                await asyncio.shield(engine.close())
                raise
            return engine

        return await restart(attempt, self._supervisor.policy, quick_exits)

    async def _give_weights(self, engine: ProcessEngine) -> None:
        """Let a replacement begin: with weights that a push brings, or with restored ones."""
        self._replacement = engine
        if self._paused:
            await self._pause_replacement(engine)
        self._arrived.set()
        if self._supervisor.restore is None:
            if engine.version == self.version:
                self._serve_with(engine, engine.version)
            return
        restoring = asyncio.ensure_future(self._supervisor.restore(engine, lambda: self._replacement is engine))
        dying = asyncio.ensure_future(engine.gone())
        try:
            await asyncio.wait({restoring, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not restoring.done():  # it may wait for a push, which may wait for the next replacement
                raise EngineGone(f"{self.name} died before it had weights: {dying.result()}")
        finally:
            restoring.cancel()
            dying.cancel()
        version = restoring.result()
        if version is not None and self._replacement is engine:
            self._serve_with(engine, version)
            self._supervisor.mark_synced(self.name, version)

    async def _pause_replacement(self, engine: ProcessEngine) -> None:
        try:
            async with asyncio.timeout(PAUSE_S):
                await engine.pause()
                if not self._paused:  # a resume came meanwhile
                    await engine.resume()
        except TimeoutError:
            raise EngineFailure(f"{self.name} was started, and did not pause within {PAUSE_S:g} s") from None


async def _noop() -> None:
    """No-op for engines without a sleep mode."""
