"""Where the router sends requests, and what it counts."""

import asyncio
from collections import Counter

import pytest

from tests import virtual_time
from tests.breakable import BreakableEngine, replica, router
from tests.letters import ask, decode, encode, go_on
from treadle.config.rollout import ScriptedConfig
from treadle.engine.router import Router
from treadle.errors import EngineFailure, MisuseError
from treadle.types import Completion, StopReason


def loads(door: Router) -> dict[str, int]:
    return {state.name: state.in_flight for state in door.snapshot()}


def send(door: Router, uid: str) -> "asyncio.Task[Completion]":
    return asyncio.ensure_future(door.generate(ask(uid=uid)))


async def start(door: Router, *uids: str) -> list["asyncio.Task[Completion]"]:
    tasks = [send(door, uid) for uid in uids]
    await asyncio.sleep(0)
    return tasks


def test_requests_go_where_the_fewest_are() -> None:
    async def main() -> None:
        door = router(replica("a"), replica("b"), replica("c"))
        tasks = await start(door, *(f"t{at}" for at in range(10)))
        assert sorted(loads(door).values()) == [3, 3, 4]
        await asyncio.gather(*tasks)
        assert set(loads(door).values()) == {0}

    virtual_time.run(main())


def test_ties_are_broken_at_random_and_by_seed() -> None:
    async def homes(seed: int) -> tuple[str, ...]:
        door = router(*(replica(name) for name in "abcd"), seed=seed)
        return tuple([(await door.generate(ask(uid=f"t{at}"))).replica for at in range(200)])

    first, other = virtual_time.run(homes(1)), virtual_time.run(homes(2))
    assert first == virtual_time.run(homes(1)) and first != other
    assert all(30 < count < 70 for count in Counter(first).values())


def test_a_session_stays_where_it_is() -> None:
    async def main() -> None:
        door = router(*(replica(name) for name in "abcd"))
        home = (await door.generate(ask(uid="me"))).replica
        crowd = await start(door, *(f"t{at}" for at in range(12)))
        assert {(await door.generate(ask(uid="me"))).replica for _ in range(10)} == {home}
        await asyncio.gather(*crowd)

    virtual_time.run(main())


def test_a_session_leaves_a_replica_that_is_busier_than_the_margin_allows() -> None:
    async def main(extra: int) -> bool:
        a, b = replica("a"), replica("b")
        door = router(a, overload_margin=4)
        await door.generate(ask(uid="me"))
        crowd = await start(door, *(f"t{at}" for at in range(4 + extra)))
        await door.add(b)
        task = send(door, "me")
        await asyncio.sleep(0)
        moved = loads(door)["b"] == 1
        await asyncio.gather(task, *crowd)
        return moved

    assert not virtual_time.run(main(extra=0))
    assert virtual_time.run(main(extra=1))


def test_a_moved_session_stays_at_its_new_home() -> None:
    async def main() -> None:
        a, b = replica("a"), replica("b")
        door = router(a, overload_margin=0)
        await door.generate(ask(uid="me"))
        crowd = await start(door, "x")
        await door.add(b)
        assert (await door.generate(ask(uid="me"))).replica == "b"
        await asyncio.gather(*crowd)
        assert {(await door.generate(ask(uid="me"))).replica for _ in range(8)} == {"b"}

    virtual_time.run(main())


class KeepingEngine(BreakableEngine):
    """Keeps something for its sessions, and holds a device's memory."""

    forgotten: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()

    def forget(self, session: str) -> None:
        self.forgotten += (session,)

    async def sleep(self, level: int = 1) -> None:
        self.levels += (level,)


def test_the_end_of_a_session_reaches_the_engine_that_kept_it() -> None:
    async def main() -> None:
        engine = KeepingEngine.create(ScriptedConfig(), name="a", encode=encode, decode=decode, seed=0)
        door = router(engine)
        await door.generate(ask(uid="me"))
        door.forget("me/0")
        door.forget("never/0")
        assert engine.forgotten == ("me/0",)

    virtual_time.run(main())


def test_those_that_can_sleep_are_told_to() -> None:
    async def main() -> None:
        engine = KeepingEngine.create(ScriptedConfig(), name="a", encode=encode, decode=decode, seed=0)
        await router(engine, replica("b")).sleep(level=2)
        assert engine.levels == (2,)

    virtual_time.run(main())


def test_the_memory_of_affinity_is_bounded_and_can_be_cleared() -> None:
    async def main() -> None:
        door = router(replica("a"), replica("b"), max_sessions=10)
        for uid in ("old friend", *"abcdefgh", "old friend", *"ijklmnop"):
            await door.generate(ask(uid=uid))
        assert len(door._affinity) == 10 and "old friend/0" in door._affinity and "h/0" in door._affinity
        door.forget("old friend/0")
        door.forget("a stranger")
        assert len(door._affinity) == 9

    virtual_time.run(main())


def test_a_request_past_its_deadline_names_replica_age_and_session() -> None:
    async def main() -> None:
        door = router(replica("a", hang_rate=1.0), timeout_s=20.0, retries=0)
        await asyncio.sleep(3)
        with pytest.raises(EngineFailure, match=r"a: session me/0, 20\.0 s old: no answer in 20 s"):
            await door.generate(ask(uid="me"))
        assert asyncio.get_running_loop().time() == pytest.approx(23.0)
        assert loads(door) == {"a": 0}

    virtual_time.run(main())


def test_a_request_past_its_deadline_keeps_the_tokens_it_has() -> None:
    async def main() -> None:
        door = router(replica("a", latency_s=100.0), timeout_s=20.0, retries=0)
        request = ask("0123456789" * 10, max_tokens=1000)
        part = await door.generate(request)
        assert asyncio.get_running_loop().time() == pytest.approx(20.0)
        assert part.stop is StopReason.ABORT
        assert 15 < len(part.ids) < 25
        rest = await door.generate(go_on(request, part.ids))
        assert decode(part.ids + rest.ids).startswith("0123456789" * 3)
        assert [state.healthy for state in door.snapshot()] == [True]

    virtual_time.run(main())


def test_a_replica_that_does_not_even_abort_loses_its_request_soon_after_the_deadline() -> None:
    async def main() -> None:
        deaf = replica("a", hang_rate=1.0)
        deaf.deaf = True
        door = router(deaf, replica("b", latency_s=0.0), timeout_s=20.0, retries=1)
        answers = await asyncio.gather(*(door.generate(ask(uid=f"t{at}")) for at in range(8)))
        assert {answer.replica for answer in answers} == {"b"}
        assert asyncio.get_running_loop().time() == pytest.approx(25.0, abs=0.01)

    virtual_time.run(main())


def test_each_request_has_its_own_deadline() -> None:
    async def main() -> None:
        door, ends = router(replica("a", hang_rate=1.0), timeout_s=20.0, retries=0), {}

        async def one(at: int) -> None:
            await asyncio.sleep(at)
            with pytest.raises(EngineFailure):
                await door.generate(ask(uid=f"t{at}"))
            ends[at] = asyncio.get_running_loop().time()

        await asyncio.gather(*(one(at) for at in (0, 7, 7, 13, 40)))
        assert ends == {at: pytest.approx(at + 20.0, abs=1e-3) for at in (0, 7, 13, 40)}

    virtual_time.run(main())


def test_a_slow_answer_just_in_time_is_an_answer() -> None:
    async def main() -> None:
        door = router(replica("a", latency_s=19.9), timeout_s=20.0, retries=0)
        assert (await door.generate(ask())).stop is StopReason.STOP
        await asyncio.sleep(100)
        assert (await door.generate(ask())).stop is StopReason.STOP

    virtual_time.run(main())


def test_a_deadline_does_not_look_like_a_cancelled_task() -> None:
    async def main() -> None:
        door = router(replica("a", hang_rate=1.0), timeout_s=20.0, retries=0)
        with pytest.raises(EngineFailure):
            await door.generate(ask())
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await door.generate(ask())
        assert task.cancelling() == 0
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(1))

    virtual_time.run(main())


def test_a_cancel_that_meets_the_deadline_stays_a_cancel() -> None:
    async def main() -> None:
        door = router(replica("a", hang_rate=1.0), timeout_s=20.0)
        task = send(door, "me")
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        loop.call_at(20.0, task.cancel)
        await asyncio.wait([task])
        assert task.cancelled() and loads(door) == {"a": 0}

    virtual_time.run(main())


def test_cancelled_requests_are_not_counted_and_end_in_the_engine() -> None:
    async def main() -> None:
        engines = [replica("a"), replica("b")]
        door = router(*engines)
        tasks = await start(door, *(f"t{at}" for at in range(6)))
        await asyncio.sleep(1)
        for task in tasks[:4]:
            task.cancel()
        await asyncio.wait(tasks[:4])
        assert sum(loads(door).values()) == 2 == sum(len(engine._running) for engine in engines)
        await asyncio.gather(*tasks[4:])

    virtual_time.run(main())


def test_a_bug_in_an_engine_is_not_retried_and_not_counted() -> None:
    async def main() -> None:
        def script(*_: object) -> str:
            raise KeyError("bug")

        engine = replica("a")
        engine._script = script
        door = router(engine, replica("b"))
        with pytest.raises(KeyError):
            while True:
                await door.generate(ask(uid=str(asyncio.get_running_loop().time())))
        assert engine.served == 1 and set(loads(door).values()) == {0}

    virtual_time.run(main())


def test_an_added_replica_serves_at_once() -> None:
    async def main() -> None:
        door = router(replica("a"))
        crowd = await start(door, "x", "y")
        await door.add(replica("b"))
        assert (await door.generate(ask(uid="z"))).replica == "b"
        await asyncio.gather(*crowd)

    virtual_time.run(main())


def test_two_replicas_of_one_name_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(MisuseError, match="'a' already"):
            router(replica("a"), replica("a"))
        door = router(replica("a"))
        with pytest.raises(MisuseError, match="'a' already"):
            await door.add(replica("a"))

    virtual_time.run(main())


def test_a_removed_replica_ends_its_requests_in_peace_and_gets_no_more() -> None:
    async def main() -> None:
        a, b = replica("a"), replica("b")
        door = router(a, b)
        tasks = await start(door, "x", "y", "z")
        removal = asyncio.ensure_future(door.remove("a"))
        await asyncio.sleep(0)
        assert {state.name: state.healthy for state in door.snapshot()} == {"a": False, "b": True}
        assert (await door.generate(ask(uid="late"))).replica == "b"
        assert await removal is a
        assert all(task.result().stop is StopReason.STOP for task in tasks if task.done())
        assert set(loads(door)) == {"b"}
        await asyncio.gather(*tasks)

    virtual_time.run(main())


def test_removal_aborts_what_does_not_end_in_time() -> None:
    async def main() -> None:
        door = router(replica("a", latency_s=1000.0))
        (task,) = await start(door, "x")
        removal = asyncio.ensure_future(door.remove("a", timeout_s=50.0))
        completion = await task
        assert completion.stop is StopReason.ABORT
        await removal
        assert asyncio.get_running_loop().time() == pytest.approx(50.0)

    virtual_time.run(main())


def test_removal_of_a_deaf_replica_moves_its_requests() -> None:
    async def main() -> None:
        a, b = replica("a", hang_rate=1.0), replica("b")
        a.deaf = True
        door = router(a)
        (task,) = await start(door, "x")
        await door.add(b)
        await door.remove("a", timeout_s=50.0)
        assert (await task).replica == "b"

    virtual_time.run(main())


def test_a_pause_reaches_a_replica_that_is_leaving() -> None:
    async def main() -> None:
        door = router(replica("a"), replica("b"))
        tasks = await start(door, "x", "y")
        removal = asyncio.ensure_future(door.remove("a"))
        await asyncio.sleep(1)
        await door.pause()
        assert [(await task).stop for task in tasks] == [StopReason.ABORT] * 2
        await removal

    virtual_time.run(main())


def test_removing_a_stranger_names_those_who_are_there() -> None:
    async def main() -> None:
        with pytest.raises(MisuseError, match="no replica named 'zz'; there are: alpha"):
            await router(replica("alpha")).remove("zz")

    virtual_time.run(main())


def test_the_router_holds_requests_itself_while_paused_and_blames_nobody() -> None:
    async def main() -> None:
        door = router(replica("a"), timeout_s=20.0)
        await door.pause()
        with pytest.raises(EngineFailure, match="session me/0 was held back by a pause for 20 s"):
            await door.generate(ask(uid="me"))
        (state,) = door.snapshot()
        assert state.healthy and state.last_error is None
        await door.resume()
        assert (await door.generate(ask(uid="me"))).stop is StopReason.STOP

    virtual_time.run(main())


def test_a_replica_added_during_a_pause_is_paused_too() -> None:
    async def main() -> None:
        b = replica("b")
        door = router(replica("a"))
        await door.pause()
        await door.add(b)
        assert b._gate.shut
        await door.resume()
        assert not b._gate.shut

    virtual_time.run(main())


def test_abort_reaches_a_session_on_every_replica() -> None:
    async def main() -> None:
        door = router(replica("a"), replica("b"), overload_margin=0)
        twins = [asyncio.ensure_future(door.generate(ask(text, uid="me"))) for text in ("left", "right")]
        others = await start(door, "x", "y")
        await asyncio.sleep(1)
        assert loads(door) == {"a": 2, "b": 2}
        await door.abort("me/0")
        assert [(await twin).stop for twin in twins] == [StopReason.ABORT] * 2
        assert [task.done() for task in others] == [False, False]
        await asyncio.gather(*others)

    virtual_time.run(main())


def test_flights_say_who_waits_for_whom_and_how_long() -> None:
    async def main() -> None:
        door = router(replica("a"))
        first = await start(door, "x")
        await asyncio.sleep(2)
        second = await start(door, "y")
        await asyncio.sleep(1)
        assert [(flight.session, flight.replica, flight.age_s) for flight in door.in_flight()] == [
            ("x/0", "a", 3.0),
            ("y/0", "a", 1.0),
        ]
        await door.pause()
        await asyncio.gather(*first, *second)
        held = await start(door, "z")
        await asyncio.sleep(4)
        assert [(flight.session, flight.replica, flight.age_s) for flight in door.in_flight()] == [("z/0", "", 4.0)]
        await door.resume()
        await asyncio.gather(*held)

    virtual_time.run(main())


def test_closing_names_a_replica_that_does_not_close() -> None:
    class Stubborn(BreakableEngine):
        async def close(self) -> None:
            await asyncio.sleep(1e4)

    async def main() -> None:
        engine = replica("a")
        engine.__class__ = Stubborn
        door = router(engine, replica("b"))
        with pytest.raises(EngineFailure, match="a did not close: no answer in 30 s"):
            await door.close()

    virtual_time.run(main())
