"""One engine behind a router, and what is known of it.

Owns the requests in flight at the replica and the facts that decide whether it may serve. Refuses to know the others.
Invariant: what is in flight is a set of live objects, never a number kept beside them, so the count cannot drift.
"""

import asyncio
from dataclasses import dataclass
from math import inf

from treadle.engine.interrupt import Flights
from treadle.engine.protocol import Engine


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica as a person wants to see it."""

    name: str
    in_flight: int
    healthy: bool
    version: int
    last_error: str | None


@dataclass(frozen=True, slots=True)
class FlightState:
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
        "flights",
        "last_error",
        "leaving",
        "name",
        "probe",
        "probe_at",
        "ready",
    )

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name = engine.name
        self.flights = Flights()
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

    def state(self) -> ReplicaState:
        return ReplicaState(self.name, len(self.flights), self.ready, self.engine.version, self.last_error)
