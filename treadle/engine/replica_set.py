"""Replica set: the replicas behind a router, their health and their in-flight requests.

Owns membership, health and which replica may serve. Refuses to know session affinity and retries.
Invariants: `ready` holds exactly the replicas that stay, work, and have the same weights as the others. What is in
flight at a replica is a set of live objects, never a counter kept beside them, so the count cannot drift.

    ready ──failures in a row, a failed health check, stale or damaged weights──► aside
    aside ──a good health check, and the weights of the others──► ready

Nothing polls: a replica that was set aside is probed when its backoff is over and a request arrives, or at once when no
other replica is left. A probe is a task of the set: one at a time for each replica, with a deadline, ended by
`end_probes`. A replica that gives no answer to two probes in a row is frozen: its process is replaced, where that can
be done, and requests wait for the next one there, as after any death.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from treadle.engine.in_flight import InFlightRequests
from treadle.engine.protocol import Engine, SupportsForget, SupportsReplace
from treadle.errors import EngineFailure, MisuseError, nearest

PROBE_TIMEOUT_S = 5.0
SILENT_PROBES = 2
"""Probes in a row without an answer, after which a replica is frozen."""


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """Status of one replica, for reports."""

    name: str
    in_flight: int
    healthy: bool
    version: int
    last_error: str | None


@dataclass(frozen=True, slots=True)
class InFlightStatus:
    """One request that has no answer yet. `replica` is empty while a pause holds it back, or none can serve."""

    session: str
    replica: str
    age_s: float


class Replica:
    """`ready`: requests may be sent here. `leaving`: it is being removed."""

    __slots__ = (
        "backoff_s",
        "confirmed",
        "engine",
        "failures",
        "forgetful",
        "in_flight",
        "last_error",
        "leaving",
        "name",
        "probe",
        "probe_at",
        "ready",
        "replaceable",
        "silent",
    )

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name = engine.name
        self.forgetful = engine if isinstance(engine, SupportsForget) else None
        """The engine, where it can be told that a session is over; asked once, as a protocol check is slow."""
        self.replaceable = engine if isinstance(engine, SupportsReplace) else None
        """The engine, where its process can be replaced."""
        self.silent = 0
        """Probes without an answer, in a row."""
        self.in_flight = InFlightRequests()
        self.ready = True
        self.leaving = False
        self.confirmed = engine.version
        """The version whose arrival was confirmed; -1 after damaged weights."""
        self.failures = 0
        """Failed requests since the last one that worked."""
        self.last_error: str | None = None
        self.backoff_s = 0.0
        self.probe_at = inf
        self.probe: asyncio.Task[None] | None = None

    def state(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(self.name, len(self.in_flight), self.ready, self.engine.version, self.last_error)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """The numbers behind routing decisions."""

    overload_margin: int = 8
    """A session leaves its replica when that has more than this many requests in flight over the least loaded."""
    max_sessions: int = 65_536
    """Sessions whose replica is remembered; the longest silent is forgotten first."""
    failures_in_row: int = 3
    """Failed requests, with none that worked between them, after which a replica is set aside."""
    probe_timeout_s: float = PROBE_TIMEOUT_S
    silent_probes: int = SILENT_PROBES
    """Probes in a row without an answer, after which a replica's process is replaced."""
    first_probe_s: float = 1.0
    """Time until a replica that was set aside is probed; doubled each time until a request works again."""
    max_probe_s: float = 60.0


class ReplicaSet:
    """Replicas by name. Made outside or inside a loop; used in one."""

    def __init__(self, engines: Iterable[Engine], routing: RoutingOptions) -> None:
        self.ready: tuple[Replica, ...] = ()
        self.paused = False
        """Whether replicas that come back are paused."""
        self.next_probe = inf
        self._routing = routing
        self._replicas: dict[str, Replica] = {}
        self._crash: BaseException | None = None
        engines = tuple(engines)
        self.version = max((engine.version for engine in engines), default=0)
        for engine in engines:
            self.join(engine)

    @property
    def all(self) -> tuple[Replica, ...]:
        """All replicas, those being removed included, in order of joining."""
        return tuple(self._replicas.values())

    @property
    def members(self) -> tuple[Replica, ...]:
        """All replicas that are not being removed."""
        return tuple(replica for replica in self._replicas.values() if not replica.leaving)

    def join(self, engine: Engine) -> Replica:
        """Take a replica in. One with other weights than the rest waits for the next update."""
        if engine.name in self._replicas:
            raise MisuseError(f"there is a replica named {engine.name!r} already: remove it first, or use another name")
        replica = self._replicas[engine.name] = Replica(engine)
        self.refresh(replica)
        return replica

    def retire(self, name: str) -> Replica:
        """Send a replica nothing more. Its requests go on."""
        replica = self._replicas.get(name)
        if replica is None:
            hint = nearest(name, self._replicas) or f"there are: {', '.join(self._replicas) or 'none'}"
            raise MisuseError(f"there is no replica named {name!r}; {hint}")
        replica.leaving, replica.ready = True, False
        if replica.probe is not None:
            replica.probe.cancel()
        self._update_ready()
        return replica

    def drop(self, replica: Replica) -> None:
        self._replicas.pop(replica.name, None)

    def add_failure(self, replica: Replica, failure: EngineFailure) -> None:
        """A request failed at a replica. A replica that is aside already keeps the reason it is aside for."""
        if not replica.ready:
            return
        replica.failures += 1
        replica.last_error = str(failure)
        if replica.failures >= self._routing.failures_in_row:
            self.set_aside(replica, str(failure))

    def set_aside(self, replica: Replica, why: str) -> None:
        """Send nothing there until a probe says it works. Each time in a row waits twice as long for that."""
        replica.ready, replica.last_error = False, why
        first, longest = self._routing.first_probe_s, self._routing.max_probe_s
        replica.backoff_s = min(longest, replica.backoff_s * 2 or first)
        replica.probe_at = asyncio.get_running_loop().time() + replica.backoff_s
        self._update_ready()

    def confirm(self, replica: Replica, version: int) -> None:
        """Weights arrived whole, or (-1) damaged."""
        replica.confirmed = version
        if version >= 0 and not replica.ready:
            replica.probe_at = -inf  # it may have waited for just this
        self._update_ready()

    def probe_due(self, now: float) -> None:
        """Probe the replicas whose backoff is over, without waiting for them."""
        if self._crash is not None:
            raise self._crash
        for replica in self.members:
            if not replica.ready and replica.probe_at <= now:
                self._start_probe(replica)
        self._update_ready()

    async def probe(self) -> None:
        """Probe every replica now, and return when each has answered or timed out."""
        probes = [self._start_probe(replica) for replica in self.members]
        if probes:
            await asyncio.wait(probes)
        self._raise_if_none()

    async def revive(self) -> None:
        """Probe every replica now, and return when one is ready; those that gave no answer more than once."""
        asked = self.members
        for _ in range(self._routing.silent_probes):
            probes = {self._start_probe(replica) for replica in asked}
            while probes and not self.ready:
                _, probes = await asyncio.wait(probes, return_when=asyncio.FIRST_COMPLETED)
            asked = tuple(replica for replica in self.members if replica.silent and replica.replaceable is not None)
            if self.ready or not asked:
                break
        self._raise_if_none()

    async def end_probes(self) -> None:
        probes = [replica.probe for replica in self.all if replica.probe is not None]
        for probe in probes:
            probe.cancel()
        if probes:
            await asyncio.wait(probes, timeout=self._routing.probe_timeout_s)

    def _start_probe(self, replica: Replica) -> asyncio.Task[None]:
        if replica.probe is None:
            replica.probe_at = inf
            replica.probe = asyncio.get_running_loop().create_task(self._probe(replica), name=f"probe {replica.name}")
            replica.probe.add_done_callback(lambda task: self._probed(replica, task))
        return replica.probe

    async def _probe(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(self._routing.probe_timeout_s):
                await replica.engine.health()
                if not replica.ready:
                    await (replica.engine.pause() if self.paused else replica.engine.resume())
        except TimeoutError:
            self._add_silence(replica)
        except EngineFailure as failure:
            replica.silent = 0
            self.set_aside(replica, str(failure))
            replica.in_flight.interrupt(f"the replica cannot serve: {failure}")
        else:
            self.refresh(replica)

    def _add_silence(self, replica: Replica) -> None:
        replica.silent += 1
        why = f"no answer to a health check in {self._routing.probe_timeout_s:g} s"
        if replica.silent >= self._routing.silent_probes and replica.replaceable is not None:
            reason = f"{why}, {replica.silent} times in a row"
            if replica.replaceable.replace(reason):
                return self.refresh(replica)
        self.set_aside(replica, why)

    def _probed(self, replica: Replica, task: asyncio.Task[None]) -> None:
        """A probe that broke is a bug: the next request raises it."""
        replica.probe = None
        if not task.cancelled() and (crash := task.exception()) is not None:
            self._crash, self.next_probe = crash, -inf

    def refresh(self, replica: Replica) -> None:
        """A replica works: it may serve if its weights are those of the others."""
        replica.ready = not replica.leaving and replica.confirmed == self.version
        replica.failures = replica.silent = 0
        if replica.ready:
            replica.probe_at = inf
        elif not replica.leaving:
            had = f"version {replica.confirmed}" if replica.confirmed >= 0 else "damaged weights"
            replica.last_error = f"has {had}, the others version {self.version}: waits for the next update"
        self._update_ready()

    def _update_ready(self) -> None:
        members = self.members
        self.ready = tuple(replica for replica in members if replica.ready)
        self.next_probe = min((replica.probe_at for replica in members), default=inf)

    def _raise_if_none(self) -> None:
        if self._crash is not None:
            raise self._crash
        if not self.ready:
            reasons = "; ".join(f"{replica.name}: {replica.last_error}" for replica in self.members)
            raise EngineFailure(f"no replica can serve: {reasons or 'there is none'}")


async def call_all(
    calls: Mapping[Replica, Coroutine[Any, Any, T]], timeout_s: float
) -> dict[Replica, T | EngineFailure]:
    """Make a call on each replica, all at once. A failure is an answer too."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {replica: group.create_task(_answer(call, timeout_s)) for replica, call in calls.items()}
    finally:
        for call in calls.values():
            call.close()  # one that was cancelled before it began
    return {replica: task.result() for replica, task in tasks.items()}


async def _answer(call: Coroutine[Any, Any, T], timeout_s: float) -> T | EngineFailure:
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        return EngineFailure(f"no answer in {timeout_s:g} s")
    except EngineFailure as failure:
        return failure
