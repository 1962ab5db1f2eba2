"""What the router does about replicas that fail, die, come back, or miss an update."""

import asyncio

import pytest

from tests import virtual_time
from tests.breakable import BreakableEngine, replica, router
from tests.letters import ask
from treadle.engine.protocol import WeightUpdate
from treadle.engine.router import Router
from treadle.errors import EngineFailure, RequestRefused
from treadle.types import Completion, StopReason

UPDATE = WeightUpdate(1, "sum", {})


def healthy(door: Router) -> dict[str, bool]:
    return {state.name: state.healthy for state in door.snapshot()}


async def send(door: Router, count: int, prefix: str = "t") -> list[Completion | BaseException]:
    requests = [ask(uid=f"{prefix}{at}") for at in range(count)]
    return await asyncio.gather(*(door.generate(request) for request in requests), return_exceptions=True)


def test_a_failed_request_is_answered_by_another_replica() -> None:
    async def main() -> None:
        a, b = replica("a"), replica("b")
        a.dead = "connection refused"
        door = router(a, b, retries=1)
        answers = await send(door, 50)
        assert {answer.replica for answer in answers if isinstance(answer, Completion)} == {"b"}
        assert len([answer for answer in answers if isinstance(answer, Completion)]) == 50
        assert healthy(door) == {"a": False, "b": True}

    virtual_time.run(main())


def test_retries_are_counted_and_the_last_error_lists_each_replica() -> None:
    async def main() -> None:
        engines = [replica(name) for name in "abcd"]
        for engine in engines:
            engine.dead = f"{engine.name} is on fire"
        door = router(*engines, retries=2)
        with pytest.raises(EngineFailure, match="session me/0 failed at all of 3 attempts") as caught:
            await door.generate(ask(uid="me"))
        assert sum(engine.served for engine in engines) == 3
        assert all((f"{engine.name} is on fire" in str(caught.value)) == bool(engine.served) for engine in engines)

    virtual_time.run(main())


def test_a_hanging_replica_costs_one_deadline_and_then_the_request_moves() -> None:
    async def main() -> None:
        door = router(replica("a", hang_rate=1.0), timeout_s=20.0)
        task = asyncio.ensure_future(door.generate(ask()))
        await asyncio.sleep(1)
        await door.add(replica("b"))
        assert (await task).replica == "b"
        assert asyncio.get_running_loop().time() == pytest.approx(30.0)

    virtual_time.run(main())


def test_a_refused_request_is_not_retried_and_nobody_is_blamed() -> None:
    class Refusing(BreakableEngine):
        async def generate(self, request: object) -> Completion:
            self.served += 1
            raise RequestRefused("prompt too long")

    async def main() -> None:
        engine = replica("a")
        engine.__class__ = Refusing
        door = router(engine)
        for _ in range(10):
            with pytest.raises(RequestRefused):
                await door.generate(ask())
        assert engine.served == 10 and healthy(door) == {"a": True}

    virtual_time.run(main())


def test_failures_in_a_row_set_a_replica_aside_and_a_success_between_them_does_not() -> None:
    async def main() -> None:
        a = replica("a", latency_s=0.0)
        door = router(a, retries=0, failures_in_row=3)
        for dead in ("x", "x", None, "x", "x"):
            a.dead = dead
            await send(door, 1)
        assert healthy(door) == {"a": True}
        a.dead = "x"
        await send(door, 1)
        assert healthy(door) == {"a": False}

    virtual_time.run(main())


def test_all_replicas_dead_is_said_at_once_with_each_reason() -> None:
    async def main() -> None:
        a, b = replica("a"), replica("b")
        a.dead, b.dead = "a lost its GPU", "b was killed"
        door = router(a, b)
        await send(door, 10)
        with pytest.raises(EngineFailure, match="no replica can serve: a: a lost its GPU; b: b was killed"):
            await door.generate(ask())
        with pytest.raises(EngineFailure, match="no replica can serve: a: a lost its GPU; b: b was killed"):
            await door.health()

    virtual_time.run(main())


def test_a_router_with_no_replica_says_so() -> None:
    async def main() -> None:
        with pytest.raises(EngineFailure, match="there is none"):
            await router().generate(ask())

    virtual_time.run(main())


def test_the_last_replica_is_looked_at_again_at_once_when_it_is_needed() -> None:
    async def main() -> None:
        a = replica("a", latency_s=0.0)
        a.dead = "x"
        door = router(a, retries=0)
        await send(door, 3)
        assert healthy(door) == {"a": False}
        a.dead = None
        assert (await door.generate(ask())).stop is StopReason.STOP
        assert asyncio.get_running_loop().time() == 0.0

    virtual_time.run(main())


def test_many_requests_share_one_probe() -> None:
    async def main() -> None:
        a = replica("a", latency_s=0.0)
        a.stuck = True
        door = router(a, retries=0)
        a.dead = "x"
        await send(door, 3)
        answers = await send(door, 100)
        assert all("no answer to a health check in 5 s" in str(answer) for answer in answers)
        assert a.probes == 1 and asyncio.get_running_loop().time() == pytest.approx(5.0)

    virtual_time.run(main())


def test_a_request_that_waits_for_a_replica_to_come_back_is_listed() -> None:
    async def main() -> None:
        a = replica("a", latency_s=0.0)
        a.dead, a.stuck = "x", True
        door = router(a, retries=0)
        await send(door, 3)
        task = asyncio.ensure_future(door.generate(ask(uid="me")))
        await asyncio.sleep(2)
        assert [(flight.session, flight.replica, flight.age_s) for flight in door.in_flight()] == [("me/0", "", 2.0)]
        await asyncio.wait([task])
        assert task.exception() is not None and door.in_flight() == ()

    virtual_time.run(main())


def test_a_replica_that_comes_back_is_used_again_after_its_backoff_and_not_before() -> None:
    async def main() -> None:
        a, b = replica("a", latency_s=0.0), replica("b", latency_s=0.0)
        a.dead = "x"
        door = router(a, b, first_probe_s=8.0)
        await send(door, 20)
        a.dead = None
        await asyncio.sleep(7.0)
        await send(door, 5, "early")
        assert a.probes == 0 and healthy(door) == {"a": False, "b": True}
        await asyncio.sleep(1.0)
        await send(door, 1, "due")
        await asyncio.sleep(0)
        assert a.probes == 1 and healthy(door) == {"a": True, "b": True}
        answers = await send(door, 50, "late")
        assert {answer.replica for answer in answers if isinstance(answer, Completion)} == {"a", "b"}

    virtual_time.run(main())


def test_probes_of_a_dead_replica_become_rarer_up_to_a_bound_and_delay_nobody() -> None:
    async def main() -> None:
        a, b = replica("a", latency_s=0.0), replica("b", latency_s=0.0)
        a.dead = "x"
        a.stuck = True
        door = router(a, b, first_probe_s=1.0, max_probe_s=60.0)
        loop = asyncio.get_running_loop()
        for at in range(1000):
            before = loop.time()
            assert (await door.generate(ask(uid=f"t{at}"))).replica == "b"
            assert loop.time() == before
            await asyncio.sleep(1)
        assert 15 < a.probes < 25

    virtual_time.run(main())


def test_a_failed_health_check_moves_the_requests_in_flight() -> None:
    async def main() -> None:
        a, b = replica("a", latency_s=100.0), replica("b", latency_s=100.0)
        door = router(a)
        tasks = [asyncio.ensure_future(door.generate(ask(uid=f"t{at}"))) for at in range(5)]
        await asyncio.sleep(50)
        await door.add(b)
        a.dead = "CUDA error"
        await door.health()
        assert {(await task).replica for task in tasks} == {"b"}
        assert asyncio.get_running_loop().time() == pytest.approx(150.0)
        assert [state.last_error for state in door.snapshot()] == ["CUDA error", None]

    virtual_time.run(main())


def test_a_slow_health_check_sets_aside_but_lets_requests_end() -> None:
    async def main() -> None:
        a, b = replica("a", latency_s=100.0), replica("b")
        door = router(a)
        task = asyncio.ensure_future(door.generate(ask()))
        await asyncio.sleep(1)
        await door.add(b)
        a.stuck = True
        await door.health()
        assert healthy(door) == {"a": False, "b": True}
        assert (await task).replica == "a"

    virtual_time.run(main())


def test_a_replica_that_cannot_pause_loses_its_requests_and_is_paused_when_it_comes_back() -> None:
    async def main() -> None:
        a, b = replica("a", latency_s=100.0), replica("b")
        door = router(a)
        task = asyncio.ensure_future(door.generate(ask()))
        await asyncio.sleep(1)
        await door.add(b)
        a.dead = "no route to host"
        await door.pause()
        await asyncio.sleep(0)
        assert healthy(door) == {"a": False, "b": True}
        assert not a._running and not task.done(), "the request waits at the gate"
        a.dead = None
        await door.health()
        assert a._gate.shut, "it is put into the state of the others"
        await door.resume()
        assert not a._gate.shut
        assert (await task).stop is StopReason.STOP

    virtual_time.run(main())


def test_a_probe_that_crashes_is_raised_by_the_next_request() -> None:
    class Buggy(BreakableEngine):
        async def health(self) -> None:
            raise ZeroDivisionError("bug in health")

    async def main() -> None:
        a, b = replica("a", latency_s=0.0), replica("b", latency_s=0.0)
        a.__class__ = Buggy
        a.dead = "x"
        door = router(a, b)
        await send(door, 20)
        await asyncio.sleep(2)
        await send(door, 1)
        await asyncio.sleep(0)
        with pytest.raises(ZeroDivisionError, match="bug in health"):
            await door.generate(ask())

    virtual_time.run(main())


def test_every_replica_gets_the_weights() -> None:
    async def main() -> None:
        engines = [replica("a"), replica("b")]
        door = router(*engines)
        assert (await door.update_weights(UPDATE)).checksum == "sum"
        assert [engine.version for engine in engines] == [1, 1] and door.version == 1

    virtual_time.run(main())


def test_a_replica_that_misses_an_update_serves_again_after_the_next() -> None:
    async def main() -> None:
        a, b = replica("a", latency_s=0.0), replica("b", latency_s=0.0)
        a.drops_weights = True
        door = router(a, b)
        assert (await door.update_weights(UPDATE)).checksum == "sum"
        assert healthy(door) == {"a": False, "b": True} and door.version == 1
        await door.health()
        (state, _) = door.snapshot()
        assert not state.healthy, "healthy, but with old weights"
        assert state.last_error == "has version 0, the others version 1: waits for the next update"
        await asyncio.sleep(100)
        assert {answer.replica for answer in await send(door, 20) if isinstance(answer, Completion)} == {"b"}
        a.drops_weights = False
        await door.update_weights(WeightUpdate(2, "sum", {}))
        await send(door, 1)
        await asyncio.sleep(0)
        assert healthy(door) == {"a": True, "b": True}

    virtual_time.run(main())


def test_a_replica_that_joins_during_an_update_serves_after_the_next() -> None:
    async def main() -> None:
        a, b = replica("a", latency_s=0.0), replica("b", latency_s=0.0)
        door = router(a)
        a.weights_take_s = 5.0
        update = asyncio.ensure_future(door.update_weights(UPDATE))
        await asyncio.sleep(1)
        await door.add(b)
        await update
        assert healthy(door) == {"a": True, "b": False}
        assert {answer.replica for answer in await send(door, 20) if isinstance(answer, Completion)} == {"a"}
        await door.update_weights(WeightUpdate(2, "sum", {}))
        await send(door, 1)
        await asyncio.sleep(0)
        assert healthy(door) == {"a": True, "b": True}

    virtual_time.run(main())


def test_an_update_that_reaches_nobody_is_an_error() -> None:
    async def main() -> None:
        a = replica("a")
        a.drops_weights = True
        door = router(a)
        with pytest.raises(EngineFailure, match="weights of version 1 did not arrive: a: out of memory"):
            await door.update_weights(UPDATE)
        assert door.version == 0
        with pytest.raises(EngineFailure, match="there is no replica"):
            await router().update_weights(UPDATE)

    virtual_time.run(main())


def test_damaged_weights_are_an_error_and_that_replica_serves_no_more() -> None:
    async def main() -> None:
        a, b = replica("a", latency_s=0.0), replica("b", latency_s=0.0)
        a.damages_weights = True
        door = router(a, b)
        with pytest.raises(EngineFailure, match="a: sent checksum sum, arrived not sum"):
            await door.update_weights(UPDATE)
        await door.health()
        assert healthy(door) == {"a": False, "b": True}
        a.damages_weights = False
        await door.update_weights(WeightUpdate(2, "sum", {}))
        await door.health()
        assert healthy(door) == {"a": True, "b": True}

    virtual_time.run(main())


def test_a_replica_with_damaged_weights_does_not_serve_even_if_it_is_the_last() -> None:
    async def main() -> None:
        a = replica("a", latency_s=0.0)
        a.damages_weights = True
        door = router(a)
        with pytest.raises(EngineFailure, match="did not arrive"):
            await door.update_weights(UPDATE)
        with pytest.raises(EngineFailure, match="a: has damaged weights"):
            await door.generate(ask())
        assert a.served == 0

    virtual_time.run(main())


def test_a_replica_with_other_weights_waits_for_the_next_update() -> None:
    async def main() -> None:
        door = router(replica("a", version=3), replica("b", version=2))
        await door.add(replica("c", version=0))
        assert healthy(door) == {"a": True, "b": False, "c": False} and door.version == 3
        await door.update_weights(WeightUpdate(4, "sum", {}))
        await door.health()
        assert set(healthy(door).values()) == {True}

    virtual_time.run(main())


def test_half_of_all_requests_failing_still_gives_every_answer_in_the_end() -> None:
    async def main() -> None:
        engines = [replica(name, latency_s=1.0, failure_rate=0.5, latency_tail=3.0) for name in "abc"]
        door = router(*engines, retries=30)
        answers = await send(door, 300)
        assert all(isinstance(answer, Completion) for answer in answers)
        assert {state.in_flight for state in door.snapshot()} == {0}

    virtual_time.run(main())


def test_a_replica_that_somebody_vouches_for_serves_only_the_weights_of_the_others() -> None:
    async def main() -> None:
        door = router(replica("a"), replica("b"))
        await door.update_weights(WeightUpdate(1, "checksum", {}))
        door.mark_synced("a", 2)
        assert healthy(door) == {"a": False, "b": True}
        door.mark_synced("a", 1)
        await door.health()
        assert healthy(door) == {"a": True, "b": True}

    virtual_time.run(main())
