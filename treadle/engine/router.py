"""Router: load balancing over replicas, with session affinity, deadlines and retries.

Each request goes to its session's replica, or to the least loaded one, and moves to another when that fails. Owns
session affinity, deadlines and retries. Refuses to know what an engine is made of; the router is an engine itself.
Invariant: every request ends, by a completion, an abort or an `EngineFailure` that names replica, age and session; and
however it ends, nothing of it is counted any more.

What waits for what: a request waits for the pause gate, then for one replica, then maybe for the next. Each of these
waits ends after `limits.request_timeout_s`. One timer serves them all, since the oldest request is due first. A request
past its deadline is aborted at its replica, and the tokens it has are its answer; it fails only where there are none,
or where the replica does not answer in `probe_timeout_s` either. The router is paused while its last replica restarts,
so that requests wait instead of failing.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from math import inf
from typing import Any

from treadle.config.rollout import FailureConfig, LimitsConfig
from treadle.engine.in_flight import InFlightRequest, InFlightRequests, PauseGate, WaitInterrupted
from treadle.engine.protocol import ABORTED, Engine, Restarting, SupportsForget, SupportsSleep, WeightUpdate
from treadle.engine.replica_set import InFlightStatus, Replica, ReplicaSet, ReplicaSnapshot, RoutingOptions
from treadle.engine.requests import AnswerCheck
from treadle.errors import DeadlineError, EngineFailure, RequestRefused
from treadle.types import Completion, Request, StopReason

DEFAULT_ROUTING = RoutingOptions()


class Router:
    """Engines behind one name. Owns them: `close` closes those that are still there."""

    def __init__(
        self,
        replicas: Iterable[Engine],
        *,
        limits: LimitsConfig,
        failures: FailureConfig,
        rng: random.Random,
        routing: RoutingOptions = DEFAULT_ROUTING,
        name: str = "router",
        check: AnswerCheck | None = None,
    ) -> None:
        self.name = name
        self._limits = limits
        self._failures = failures
        self._rng = rng
        self._routing = routing
        self._check = check
        self._fleet = ReplicaSet(replicas, routing)
        self._gate = PauseGate()
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._stranded = InFlightRequests()
        """Requests that wait for a replica to come back."""
        self._timer: asyncio.TimerHandle | None = None
        self._collecting: set[asyncio.Future[Any]] = set()
        """Calls for the tokens of requests whose time was over."""
        self._control = asyncio.Lock()
        """Pausing, resuming and adding happen one after the other, so that all replicas end up in the same state."""

    @property
    def version(self) -> int:
        """The version of the last weights that arrived at a replica."""
        return self._fleet.version

    async def generate(self, request: Request) -> Completion:
        session, now = request.session, asyncio.get_running_loop().time()
        failed: dict[Replica, EngineFailure] | None = None
        attempts_left = self._failures.request_retries + 1
        while True:
            if self._gate.shut and not await self._admit(session):
                return ABORTED
            if self._fleet.next_probe <= now:
                self._fleet.probe_due(now)
            replica = self._pick(session, failed)
            if replica is None:
                await self._revive(session)
                continue
            try:
                return await self._send(replica, request, session)
            except RequestRefused:
                raise
            except EngineFailure as failure:
                self._fleet.blame(replica, failure)
                failed = {**(failed or {}), replica: failure}
                attempts_left -= 1
                if not attempts_left:
                    raise self._give_up(session, failed) from failure
                now = asyncio.get_running_loop().time()

    async def abort(self, session: str | None = None) -> None:
        self._gate.abort(session)
        concerned = [
            replica
            for replica in self._fleet.replicas
            if session is None or any(flight.session == session for flight in replica.flights)
        ]
        timeout_s = self._limits.request_timeout_s
        answers = await self._fleet.ask(concerned, lambda engine: engine.abort(session), timeout_s)
        for replica, answer in answers.items():
            if answer is not None:
                self._fleet.blame(replica, answer)

    async def pause(self) -> None:
        async with self._control:
            self._gate.pause()
            self._fleet.paused = True
            await self._order(self._fleet.replicas, lambda engine: engine.pause(), "pause")

    async def drain(self, timeout_s: float) -> None:
        """Wait until no request is at a replica; after `pause` that is soon."""
        for replica in self._fleet.replicas:
            if not await replica.flights.drain(timeout_s):
                raise DeadlineError(f"{len(replica.flights)} requests did not leave {replica.name} in {timeout_s:g} s")

    async def resume(self) -> None:
        async with self._control:
            self._fleet.paused = False
            await self._order(self._fleet.replicas, lambda engine: engine.resume(), "resume")
            self._gate.resume()

    async def sleep(self, level: int = 1) -> None:
        """Let every replica that can give its device's memory back."""
        sleepers = [replica for replica in self._fleet.members if isinstance(replica.engine, SupportsSleep)]

        async def sleep(engine: Engine) -> None:
            assert isinstance(engine, SupportsSleep), "chosen before"
            await engine.sleep(level)

        await self._order(sleepers, sleep, "sleep")

    async def health(self) -> None:
        """Ask every replica. Those that cannot serve are set aside; it raises when none is left."""
        await self._fleet.probe()

    async def update_weights(self, update: WeightUpdate) -> str:
        """Hand new weights to every replica.

        One that cannot take them is set aside until a later update reaches it; damage on the way is raised.
        """
        timeout_s = self._limits.request_timeout_s
        answers = await self._fleet.ask(self._fleet.members, lambda engine: engine.update_weights(update), timeout_s)
        arrived = [replica for replica, answer in answers.items() if answer == update.checksum]
        if arrived:
            self._fleet.version = update.version
        for replica in arrived:
            self._fleet.confirm(replica, update.version)
        for replica in self._fleet.members:
            if replica not in answers:
                self._fleet.judge(replica)  # it joined meanwhile, with the weights of before
        problems = [
            self._missed(replica, answer, update) for replica, answer in answers.items() if replica not in arrived
        ]
        damaged = any(isinstance(answer, str) and answer != update.checksum for answer in answers.values())
        if damaged or not arrived:
            reasons = "; ".join(problems) or "there is no replica"
            raise EngineFailure(f"weights of version {update.version} did not arrive: {reasons}")
        return update.checksum

    def mark_synced(self, name: str, version: int) -> None:
        """A replica was proven to have these weights, by other ways than an update through here."""
        for replica in self._fleet.members:
            if replica.name == name:
                self._fleet.confirm(replica, version)
                if version != self._fleet.version:
                    self._fleet.judge(replica)

    async def add(self, engine: Engine) -> None:
        """Let a replica take part at once."""
        async with self._control:
            replica = self._fleet.join(engine)
            if self._fleet.paused:
                await self._order([replica], lambda engine: engine.pause(), "pause")

    async def remove(self, name: str, *, timeout_s: float | None = None) -> Engine:
        """Take a replica out and hand it back, idle, for the caller to close.

        Its requests may end in peace for `timeout_s` (`limits.close_timeout_s` unless given). Then they are aborted,
        and keep their tokens; what does not end even so is sent to another replica.
        """
        replica, grace_s = self._fleet.retire(name), self._routing.probe_timeout_s
        if not await replica.flights.drain(self._limits.close_timeout_s if timeout_s is None else timeout_s):
            await self._fleet.ask([replica], lambda engine: engine.abort(), grace_s)
            if not await replica.flights.drain(grace_s):
                replica.flights.end("the replica was removed")
                await replica.flights.drain(grace_s)
        self._fleet.drop(replica)
        self._homes = OrderedDict((session, home) for session, home in self._homes.items() if home is not replica)
        return replica.engine

    def forget(self, session: str) -> None:
        """A session has ended: neither its home nor what is kept for it there need be remembered."""
        home = self._homes.pop(session, None)
        if home is not None and isinstance(home.engine, SupportsForget):
            home.engine.forget(session)

    def snapshot(self) -> tuple[ReplicaSnapshot, ...]:
        """Every replica, those that leave included."""
        return tuple(replica.state() for replica in self._fleet.replicas)

    def flights(self) -> tuple[InFlightStatus, ...]:
        """Every request without an answer, oldest first."""
        now = asyncio.get_running_loop().time()
        found = [InFlightStatus(session, "", now - since) for session, since in self._gate.waiting()]
        found += [InFlightStatus(flight.session, "", now - flight.started) for flight in self._stranded]
        for replica in self._fleet.replicas:
            found += [InFlightStatus(flight.session, replica.name, now - flight.started) for flight in replica.flights]
        return tuple(sorted(found, key=lambda flight: -flight.age_s))

    async def close(self) -> None:
        """Close every replica. One that does not end in `limits.close_timeout_s` is named in an EngineFailure."""
        if not self._gate.close(f"{self.name} is closed"):
            return
        await self._fleet.end_probes()
        answers = await self._fleet.ask(
            self._fleet.replicas, lambda engine: engine.close(), self._limits.close_timeout_s
        )
        stuck = {replica: answer for replica, answer in answers.items() if answer is not None}
        for replica in stuck:
            replica.flights.end(f"{self.name} is closed")
        if self._timer is not None:
            self._timer.cancel()
        for asking in self._collecting:
            asking.cancel()
        if stuck:
            raise EngineFailure("; ".join(f"{replica.name} did not close: {why}" for replica, why in stuck.items()))

    def _pick(self, session: str, failed: dict[Replica, EngineFailure] | None) -> Replica | None:
        """The session's own replica while that is no busier than it should be, else one of the least busy."""
        ready = self._fleet.ready
        if failed:
            ready = tuple(replica for replica in ready if replica not in failed) or ready
        if not ready:
            return None
        least = min([len(replica.flights) for replica in ready])
        home = self._homes.get(session)
        if home is None or home not in ready or len(home.flights) - least > self._routing.overload_margin:
            idlest = [replica for replica in ready if len(replica.flights) == least]
            home = idlest[0] if len(idlest) == 1 else self._rng.choice(idlest)
            self._homes[session] = home
            if len(self._homes) > self._routing.max_sessions:
                self._homes.popitem(last=False)
        self._homes.move_to_end(session)
        return home

    async def _send(self, replica: Replica, request: Request, session: str) -> Completion:
        loop = asyncio.get_running_loop()
        flight = InFlightRequest(session, loop.time())
        replica.flights[flight] = None
        if self._timer is None:
            self._timer = loop.call_at(flight.started + self._limits.request_timeout_s, self._expire)
        try:
            with flight:
                completion = await replica.engine.generate(request)
        except WaitInterrupted as interrupted:
            raise self._late(replica, flight, interrupted) from None
        finally:
            replica.flights.finish(flight)
        if flight.grace_until is not None and not completion.ids and completion.stop is StopReason.ABORT:
            raise self._late(replica, flight, f"no answer in {self._limits.request_timeout_s:g} s")
        if self._check is not None:
            self._check.refuse_broken(completion, replica.name, session)
        if replica.failures or replica.backoff_s:
            replica.failures, replica.backoff_s = 0, 0.0
        return completion

    def _late(self, replica: Replica, flight: InFlightRequest, why: object) -> EngineFailure:
        age_s = asyncio.get_running_loop().time() - flight.started
        return EngineFailure(f"{replica.name}: session {flight.session}, {age_s:.1f} s old: {why}")

    async def _revive(self, session: str) -> None:
        flight = InFlightRequest(session, asyncio.get_running_loop().time())
        self._stranded[flight] = None
        try:
            await self._fleet.revive()
        finally:
            self._stranded.finish(flight)

    async def _admit(self, session: str) -> bool:
        timeout_s = self._limits.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._gate.admit(session)
        except TimeoutError:
            raise EngineFailure(
                f"{self.name}: session {session} was held back by a pause for {timeout_s:g} s"
            ) from None

    def _expire(self) -> None:
        """Ask for the tokens of flights whose time is over, end those that waited for them, come back for the next."""
        loop, timeout_s, next_due = asyncio.get_running_loop(), self._limits.request_timeout_s, inf
        now = loop.time() + 1e-6
        for replica in self._fleet.replicas:
            if isinstance(replica.engine, Restarting) and replica.engine.restarting:
                for flight in replica.flights:
                    flight.due_from = now
            for flight in replica.flights:
                if flight.due_from + timeout_s > now:
                    next_due = min(next_due, flight.due_from + timeout_s)
                    break
                if flight.grace_until is None:
                    flight.grace_until = now + self._routing.probe_timeout_s
                    self._collect(replica, flight.session)
                if flight.grace_until > now:
                    next_due = min(next_due, flight.grace_until)
                else:
                    flight.fire(f"no answer in {timeout_s:g} s")
        self._timer = loop.call_at(next_due, self._expire) if next_due < inf else None

    def _collect(self, replica: Replica, session: str) -> None:
        """Have a replica end a session's requests with what they have. One that cannot is seen by its flights' end."""
        grace_s = self._routing.probe_timeout_s
        asking = asyncio.ensure_future(self._fleet.ask([replica], lambda engine: engine.abort(session), grace_s))
        self._collecting.add(asking)
        asking.add_done_callback(self._collecting.discard)

    async def _order(self, replicas: Iterable[Replica], call: Callable[[Engine], Awaitable[None]], word: str) -> None:
        """Tell replicas what to do; one that does not is set aside, and loses its requests to the others."""
        answers = await self._fleet.ask(replicas, call, self._limits.request_timeout_s)
        for replica, answer in answers.items():
            if answer is not None:
                self._fleet.set_aside(replica, f"could not {word}: {answer}")
                replica.flights.end(f"the replica could not {word}: {answer}")

    def _missed(self, replica: Replica, answer: str | EngineFailure, update: WeightUpdate) -> str:
        """Set aside a replica that lacks an update; returns why."""
        if isinstance(answer, str):
            why = f"sent checksum {update.checksum}, arrived {answer}"
            self._fleet.confirm(replica, -1)
            replica.flights.end(f"damaged weights: {why}")
        else:
            why = str(answer)
        self._fleet.set_aside(replica, f"weights of version {update.version}: {why}")
        return f"{replica.name}: {why}"

    def _give_up(self, session: str, failed: dict[Replica, EngineFailure]) -> EngineFailure:
        attempts = self._failures.request_retries + 1
        reasons = "; ".join(str(failure) for failure in failed.values())
        return EngineFailure(f"session {session} failed at all of {attempts} attempts: {reasons}")
