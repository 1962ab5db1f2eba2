"""Whatever happens in whatever order, the router's counts are exact and every request ends."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.breakable import BreakableEngine, replica, router
from tests.letters import ask
from tests.virtual_time import VirtualTimeLoop
from treadle.engine.protocol import WeightUpdate
from treadle.engine.replica_set import InFlightStatus
from treadle.errors import EngineFailure
from treadle.types import Completion

SECONDS = st.floats(0.0, 60.0)
UIDS = st.sampled_from([f"t{at}" for at in range(6)])
PICK = st.integers(0, 10**6)


class RouterMachine(RuleBasedStateMachine):
    """Requests, cancels, aborts, pauses, deaths, recoveries, updates, arrivals and departures."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.engines = [self.make(0), self.make(1)]
        self.made = 2
        self.version = 0
        self.paused = False
        self.requests: list[asyncio.Task[Completion]] = []
        self.removals: list[asyncio.Task[object]] = []
        self.door = router(*self.engines, timeout_s=40.0, retries=1, overload_margin=2, max_sessions=4)

    def make(self, number: int) -> BreakableEngine:
        return replica(f"r{number}", latency_s=15.0, latency_tail=6.0, failure_rate=0.1, hang_rate=0.1)

    def do(self, seconds: float = 1e-3) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    async def look(self) -> tuple[tuple[InFlightStatus, ...], int]:
        """What the router says, and how many requests are open at the same instant."""
        return self.door.in_flight(), sum(not task.done() for task in self.requests)

    @rule(uid=UIDS)
    def send(self, uid: str) -> None:
        self.requests.append(self.loop.create_task(self.door.generate(ask(uid=uid))))
        self.do()

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.do(seconds)

    @precondition(lambda self: self.requests)
    @rule(at=PICK, soon=st.booleans())
    def cancel(self, at: int, soon: bool) -> None:
        if soon:
            self.requests.append(self.loop.create_task(self.door.generate(ask(uid="soon"))))
            at = -1
        self.requests[at % len(self.requests)].cancel()
        self.do()

    @rule(uid=st.none() | UIDS)
    def abort(self, uid: str | None) -> None:
        self.loop.run_until_complete(self.door.abort(uid and f"{uid}/0"))
        self.do()

    @rule()
    def pause_or_resume(self) -> None:
        self.paused = not self.paused
        self.loop.run_until_complete(self.door.pause() if self.paused else self.door.resume())
        self.do()

    @rule(at=PICK)
    def kill_or_heal(self, at: int) -> None:
        if self.engines:
            engine = self.engines[at % len(self.engines)]
            engine.dead = None if engine.dead else "killed"

    @rule()
    def check_health(self) -> None:
        try:
            self.loop.run_until_complete(self.door.health())
        except EngineFailure:
            assert not any(state.healthy for state in self.door.snapshot())
        self.do()

    @rule()
    def update(self) -> None:
        if self.engines:
            self.version += 1
            self.loop.run_until_complete(self.door.update_weights(WeightUpdate(self.version, "sum", {})))
            assert self.door.version == self.version

    @rule(current=st.booleans())
    def add(self, current: bool) -> None:
        if len(self.engines) < 5:
            engine = self.make(self.made)
            engine.version = self.version if current else 0
            self.made += 1
            self.engines.append(engine)
            self.loop.run_until_complete(self.door.add(engine))

    @rule(at=PICK, seconds=SECONDS)
    def remove(self, at: int, seconds: float) -> None:
        if self.engines:
            engine = self.engines.pop(at % len(self.engines))
            self.removals.append(self.loop.create_task(self.door.remove(engine.name, timeout_s=seconds)))
            self.do()

    @invariant()
    def counts_are_exact(self) -> None:
        self.do()
        flights, running = self.loop.run_until_complete(self.look())
        assert len(flights) == running
        at_replicas = [flight for flight in flights if flight.replica]
        assert sum(state.in_flight for state in self.door.snapshot()) == len(at_replicas)
        for held in self.door._replicas.all:
            engine = held.engine
            assert isinstance(engine, BreakableEngine)
            assert len(held.in_flight) == len(engine._running), "what we count is what the engine works on"
        assert not (self.paused and at_replicas), "nothing runs during a pause"

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.door._affinity) <= 4
        assert all(home in self.door._replicas.all for home in self.door._affinity.values())

    @invariant()
    def only_current_weights_serve(self) -> None:
        assert all(state.version == self.door.version for state in self.door.snapshot() if state.healthy)

    def teardown(self) -> None:
        self.loop.run_until_complete(self.door.resume())
        self.do(1000.0)
        assert all(task.done() for task in self.requests), "every request ends"
        assert all(task.done() and task.exception() is None for task in self.removals), "every removal ends"
        assert sum(state.in_flight for state in self.door.snapshot()) == 0
        for task in self.requests:
            if not task.cancelled():
                assert isinstance(task.exception() or task.result(), EngineFailure | Completion)
        self.loop.run_until_complete(self.door.close())
        self.loop.close()


RouterMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestRouterMachine = RouterMachine.TestCase
