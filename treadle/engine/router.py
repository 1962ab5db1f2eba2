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
from collections.abc import Coroutine, Iterable, Mapping
from math import inf
from typing import Any

from treadle.config.rollout import FailureConfig, LimitsConfig
from treadle.engine.in_flight import InFlightRequest, InFlightRequests, PauseGate, WaitInterrupted
from treadle.engine.protocol import ABORTED, ConfirmedWeights, Engine, Restarting, SupportsSleep, WeightUpdate
from treadle.engine.replica_set import InFlightStatus, Replica, ReplicaSet, ReplicaSnapshot, RoutingOptions, call_all
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
        self._replicas = ReplicaSet(replicas, routing)
        self._gate = PauseGate()
        self._affinity: OrderedDict[str, Replica] = OrderedDict()
        """The replica of each session, the longest silent session first."""
        self._unserved = InFlightRequests()
        """Requests that wait for a replica to come back."""
        self._timer: asyncio.TimerHandle | None = None
        self._aborting: set[asyncio.Future[Any]] = set()
        """Calls for the tokens of requests whose time was over."""
        self._control = asyncio.Lock()
        """Pausing, resuming and adding happen one after the other, so that all replicas end up in the same state."""

    @property
    def version(self) -> int:
        """The version of the last weights that arrived at a replica."""
        return self._replicas.version

    async def generate(self, request: Request) -> Completion:
        session, loop = request.session, asyncio.get_running_loop()
        failed: dict[Replica, EngineFailure] = {}
        attempts_left = self._failures.request_retries + 1
        while True:
            if self._gate.shut and not await self._admit(session):
                return ABORTED
            now = loop.time()
            if self._replicas.next_probe <= now:
                self._replicas.probe_due(now)
            replica = self._pick(session, failed)
            if replica is None:
                with InFlightRequest(self._unserved, session, now):
                    await self._replicas.revive()
                continue
            waiting = InFlightRequest(replica.in_flight, session, now)
            if self._timer is None:
                self._timer = loop.call_at(now + self._limits.request_timeout_s, self._expire)
            try:
                with waiting:
                    completion = await replica.engine.generate(request)
                self._check_answer(replica, waiting, completion)
                return completion
            except RequestRefused:
                raise
            except WaitInterrupted as interrupted:
                failure = _late(replica, waiting, interrupted)
            except EngineFailure as error:
                failure = error
            self._replicas.add_failure(replica, failure)
            failed[replica] = failure
            attempts_left -= 1
            if not attempts_left:
                raise self._give_up(session, failed) from failure

    async def generate_on_each(self, request: Request) -> dict[str, Completion]:
        """The answer of every replica that is ready, by its name; empty after an abort.

        A replica that fails is counted as for any request, and left out; an EngineFailure where all of them fail.
        """
        if self._gate.shut and not await self._admit(request.session):
            return {}
        if not self._replicas.ready:
            await self._replicas.revive()
        calls = {replica: self._generate_on(replica, request) for replica in self._replicas.ready}
        answers = await call_all(calls, self._limits.request_timeout_s)
        failed = {replica: answer for replica, answer in answers.items() if isinstance(answer, EngineFailure)}
        for replica, failure in failed.items():
            self._replicas.add_failure(replica, failure)
        if len(failed) == len(answers):
            raise EngineFailure("; ".join(f"{replica.name}: {failure}" for replica, failure in failed.items()))
        return {replica.name: answer for replica, answer in answers.items() if isinstance(answer, Completion)}

    async def _generate_on(self, replica: Replica, request: Request) -> Completion:
        waiting = InFlightRequest(replica.in_flight, request.session, asyncio.get_running_loop().time())
        try:
            with waiting:
                completion = await replica.engine.generate(request)
        except WaitInterrupted as interrupted:
            raise _late(replica, waiting, interrupted) from interrupted
        finally:
            if replica.forgetful is not None:
                replica.forgetful.forget(request.session)
        self._check_answer(replica, waiting, completion)
        return completion

    async def abort(self, session: str | None = None) -> None:
        self._gate.abort(session)
        concerned = [
            replica
            for replica in self._replicas.all
            if session is None or any(request.session == session for request in replica.in_flight)
        ]
        answers = await call_all(
            {replica: replica.engine.abort(session) for replica in concerned}, self._limits.request_timeout_s
        )
        for replica, answer in answers.items():
            if answer is not None:
                self._replicas.add_failure(replica, answer)

    async def pause(self) -> None:
        async with self._control:
            self._gate.pause()
            self._replicas.paused = True
            await self._order({replica: replica.engine.pause() for replica in self._replicas.all}, "pause")

    async def drain(self, timeout_s: float) -> None:
        """Wait until no request is at a replica; after `pause` that is soon."""
        for replica in self._replicas.all:
            if not await replica.in_flight.drain(timeout_s):
                raise DeadlineError(
                    f"{len(replica.in_flight)} requests did not leave {replica.name} in {timeout_s:g} s"
                )

    async def resume(self) -> None:
        async with self._control:
            self._replicas.paused = False
            await self._order({replica: replica.engine.resume() for replica in self._replicas.all}, "resume")
            self._gate.resume()

    async def sleep(self, level: int = 1) -> None:
        """Let every replica that can give its device's memory back."""
        calls = {
            replica: replica.engine.sleep(level)
            for replica in self._replicas.members
            if isinstance(replica.engine, SupportsSleep)
        }
        await self._order(calls, "sleep")

    async def health(self) -> None:
        """Ask every replica. Those that cannot serve are set aside; it raises when none is left."""
        await self._replicas.probe()

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        """Hand new weights to every replica.

        One that cannot take them is set aside until a later update reaches it; damage on the way is raised.
        """
        calls = {replica: replica.engine.update_weights(update) for replica in self._replicas.members}
        answers = await call_all(calls, self._limits.request_timeout_s)
        confirmed = {replica: answer for replica, answer in answers.items() if isinstance(answer, ConfirmedWeights)}
        arrived = [replica for replica, answer in confirmed.items() if answer.checksum == update.checksum]
        if arrived:
            self._replicas.version = update.version
        for replica in arrived:
            self._replicas.confirm(replica, update.version)
        for replica in self._replicas.members:
            if replica not in answers:
                self._replicas.refresh(replica)  # it joined meanwhile, with the weights of before
        problems = [
            self._missed(replica, answer, update) for replica, answer in answers.items() if replica not in arrived
        ]
        if len(arrived) < len(confirmed) or not arrived:
            reasons = "; ".join(problems) or "there is no replica"
            raise EngineFailure(f"weights of version {update.version} did not arrive: {reasons}")
        return ConfirmedWeights(update.checksum, max(confirmed[replica].pause_s for replica in arrived))

    def mark_synced(self, name: str, version: int) -> None:
        """A replica was proven to have these weights, by other ways than an update through here."""
        for replica in self._replicas.members:
            if replica.name == name:
                self._replicas.confirm(replica, version)
                if version != self._replicas.version:
                    self._replicas.refresh(replica)

    async def add(self, engine: Engine) -> None:
        """Let a replica take part at once."""
        async with self._control:
            replica = self._replicas.join(engine)
            if self._replicas.paused:
                await self._order({replica: engine.pause()}, "pause")

    async def remove(self, name: str, *, timeout_s: float | None = None) -> Engine:
        """Take a replica out and hand it back, idle, for the caller to close.

        Its requests may end in peace for `timeout_s` (`limits.close_timeout_s` unless given). Then they are aborted,
        and keep their tokens; what does not end even so is sent to another replica.
        """
        replica, grace_s = self._replicas.retire(name), self._routing.probe_timeout_s
        if not await replica.in_flight.drain(self._limits.close_timeout_s if timeout_s is None else timeout_s):
            await call_all({replica: replica.engine.abort()}, grace_s)
            if not await replica.in_flight.drain(grace_s):
                replica.in_flight.interrupt("the replica was removed")
                await replica.in_flight.drain(grace_s)
        self._replicas.drop(replica)
        self._affinity = OrderedDict((session, own) for session, own in self._affinity.items() if own is not replica)
        return replica.engine

    def forget(self, session: str) -> None:
        """A session has ended: neither its replica nor what is cached for it there need be remembered."""
        replica = self._affinity.pop(session, None)
        if replica is not None and replica.forgetful is not None:
            replica.forgetful.forget(session)

    def snapshot(self) -> tuple[ReplicaSnapshot, ...]:
        """Every replica, those that leave included."""
        return tuple(replica.state() for replica in self._replicas.all)

    def in_flight(self) -> tuple[InFlightStatus, ...]:
        """Every request without an answer, oldest first."""
        now = asyncio.get_running_loop().time()
        found = [InFlightStatus(session, "", now - since) for session, since in self._gate.waiting()]
        found += [InFlightStatus(request.session, "", now - request.started) for request in self._unserved]
        for replica in self._replicas.all:
            found += [
                InFlightStatus(request.session, replica.name, now - request.started) for request in replica.in_flight
            ]
        return tuple(sorted(found, key=lambda request: -request.age_s))

    async def close(self) -> None:
        """Close every replica. One that does not end in `limits.close_timeout_s` is named in an EngineFailure."""
        if not self._gate.close(f"{self.name} is closed"):
            return
        await self._replicas.end_probes()
        calls = {replica: replica.engine.close() for replica in self._replicas.all}
        answers = await call_all(calls, self._limits.close_timeout_s)
        stuck = {replica: answer for replica, answer in answers.items() if answer is not None}
        for replica in stuck:
            replica.in_flight.interrupt(f"{self.name} is closed")
        if self._timer is not None:
            self._timer.cancel()
        for aborting in self._aborting:
            aborting.cancel()
        if stuck:
            raise EngineFailure("; ".join(f"{replica.name} did not close: {why}" for replica, why in stuck.items()))

    def _pick(self, session: str, failed: Mapping[Replica, EngineFailure]) -> Replica | None:
        """The session's own replica while that is no busier than it should be, else one of the least busy."""
        ready = self._replicas.ready
        if failed:
            ready = tuple(replica for replica in ready if replica not in failed) or ready
        if not ready:
            return None
        least = min([len(replica.in_flight) for replica in ready])
        own = self._affinity.get(session)
        if own is None or own not in ready or len(own.in_flight) - least > self._routing.overload_margin:
            idlest = [replica for replica in ready if len(replica.in_flight) == least]
            own = idlest[0] if len(idlest) == 1 else self._rng.choice(idlest)
            self._affinity[session] = own
            if len(self._affinity) > self._routing.max_sessions:
                self._affinity.popitem(last=False)
        self._affinity.move_to_end(session)
        return own

    def _check_answer(self, replica: Replica, waited: InFlightRequest, completion: Completion) -> None:
        """Raise for an answer that is none; a good one ends the failures of its replica."""
        if waited.grace_until is not None and not completion.ids and completion.stop is StopReason.ABORT:
            raise _late(replica, waited, f"no answer in {self._limits.request_timeout_s:g} s")
        if self._check is not None:
            self._check.refuse_broken(completion, replica.name, waited.session)
        if replica.failures or replica.backoff_s:
            replica.failures, replica.backoff_s = 0, 0.0

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
        """Abort requests whose time is over, so that they answer with the tokens they have; end those that did not."""
        loop, timeout_s, next_due = asyncio.get_running_loop(), self._limits.request_timeout_s, inf
        now = loop.time() + 1e-6
        for replica in self._replicas.all:
            if isinstance(replica.engine, Restarting) and replica.engine.restarting:
                for request in replica.in_flight:
                    request.due_from = now
            for request in replica.in_flight:
                if request.due_from + timeout_s > now:
                    next_due = min(next_due, request.due_from + timeout_s)
                    break
                if request.grace_until is None:
                    request.grace_until = now + self._routing.probe_timeout_s
                    self._abort_late(replica, request.session)
                if request.grace_until > now:
                    next_due = min(next_due, request.grace_until)
                else:
                    request.interrupt(f"no answer in {timeout_s:g} s")
        self._timer = loop.call_at(next_due, self._expire) if next_due < inf else None

    def _abort_late(self, replica: Replica, session: str) -> None:
        """Have a replica end a session's requests with what they have. Where it cannot, `_expire` ends them."""
        calls = {replica: replica.engine.abort(session)}
        aborting = asyncio.ensure_future(call_all(calls, self._routing.probe_timeout_s))
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)

    async def _order(self, calls: Mapping[Replica, Coroutine[Any, Any, None]], word: str) -> None:
        """Make these calls; a replica that does not do it is set aside, and its requests go to the others."""
        answers = await call_all(calls, self._limits.request_timeout_s)
        for replica, answer in answers.items():
            if answer is not None:
                self._replicas.set_aside(replica, f"could not {word}: {answer}")
                replica.in_flight.interrupt(f"the replica could not {word}: {answer}")

    def _missed(self, replica: Replica, answer: ConfirmedWeights | EngineFailure, update: WeightUpdate) -> str:
        """Set aside a replica that lacks an update; returns why."""
        if isinstance(answer, ConfirmedWeights):
            why = f"sent checksum {update.checksum}, arrived {answer.checksum}"
            self._replicas.confirm(replica, -1)
            replica.in_flight.interrupt(f"damaged weights: {why}")
        else:
            why = str(answer)
        self._replicas.set_aside(replica, f"weights of version {update.version}: {why}")
        return f"{replica.name}: {why}"

    def _give_up(self, session: str, failed: dict[Replica, EngineFailure]) -> EngineFailure:
        attempts = self._failures.request_retries + 1
        reasons = "; ".join(str(failure) for failure in failed.values())
        return EngineFailure(f"session {session} failed at all of {attempts} attempts: {reasons}")


def _late(replica: Replica, waited: InFlightRequest, why: object) -> EngineFailure:
    age_s = asyncio.get_running_loop().time() - waited.started
    return EngineFailure(f"{replica.name}: session {waited.session}, {age_s:.1f} s old: {why}")
