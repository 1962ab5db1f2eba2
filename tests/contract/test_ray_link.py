"""What crosses the socket between driver and actor: only for who has the key, and tokens ahead of their answer.

Needs no Ray: both ends run here.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.letters import ask, decode, encode
from tests.ray_engines import LettersEngine, letters
from treadle.cluster.ray.guard import descendants, guarded
from treadle.cluster.ray.link import Door, Link
from treadle.cluster.ray.messages import Call, Generate, Saved
from treadle.cluster.ray.station import Station
from treadle.config.rollout import ScriptedConfig
from treadle.engine.channel import ChannelClosed, Peer
from treadle.errors import DeadlineError, EngineFailure, TreadleError
from treadle.types import Completion, Request, StopReason


def run(main: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


async def refuse(question: object) -> None:
    raise AssertionError(f"nobody asks here: {question}")


def test_a_visitor_without_the_key_is_turned_away_and_the_right_one_admitted():
    async def main() -> None:
        door = Door("127.0.0.1")
        admitting = asyncio.ensure_future(door.admit(10))
        stranger = await Link.connect(replace(door.address, key=bytes(32)))
        with pytest.raises(ChannelClosed):
            await stranger.receive()
        stranger.close()
        link = await Link.connect(door.address)
        there = await Link.open(await admitting)
        there.send("welcome")
        assert await link.receive() == "welcome"
        link.close()
        with pytest.raises(ChannelClosed):
            await there.receive()
        there.close()

    run(main())


def test_a_door_nobody_comes_to_says_so_and_shuts():
    async def main() -> None:
        door = Door("127.0.0.1")
        with pytest.raises(DeadlineError, match=r"nobody came to 127[.]0[.]0[.]1"):
            await door.admit(0.05)
        with pytest.raises(ConnectionRefusedError):
            await Link.connect(door.address)

    run(main())


def test_the_key_is_in_no_log():
    door = Door("127.0.0.1")
    assert str(door.address.key) not in repr(door.address)
    run(_shut(door))


async def _shut(door: Door) -> None:
    with pytest.raises(DeadlineError):
        await door.admit(0.01)


class Kept(dict[int, list[Completion]]):
    """Saved tokens by the number of their request."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Callable[[], Awaitable[None]] | None = None
        """What the driver does before it confirms that it has them."""


async def with_station(engine, save_s, body: Callable[[Peer, Kept], Awaitable[None]]) -> None:
    """An engine's station at one end of a link; `body` at the other, with the tokens that were saved."""
    door, saved = Door("127.0.0.1"), Kept()
    admitting = asyncio.ensure_future(door.admit(10))
    ours = await Link.connect(door.address)
    theirs = await Link.open(await admitting)

    async def keep(message: Saved) -> None:
        saved.setdefault(message.number, []).append(message.part)
        if saved.first is not None:
            await saved.first()

    async with asyncio.TaskGroup() as tasks:
        station = Station(engine, save_s, tasks)
        station.peer = Peer(theirs, station.answer, TreadleError)
        driver = Peer(ours, keep, TreadleError)
        serving = [tasks.create_task(peer.serve()) for peer in (station.peer, driver)]
        watching = tasks.create_task(station.watch())
        try:
            await body(driver, saved)
        finally:
            ours.close()
            theirs.close()
        await asyncio.wait(serving)
        watching.cancel()


def engine(latency_s: float = 0.6, kind: type = LettersEngine):
    scripted = ScriptedConfig(latency_s=latency_s)
    return kind.create(scripted, name="r", encode=encode, decode=decode, seed=7, script=letters)


def test_saved_tokens_and_the_answer_are_the_whole_answer():
    async def body(driver: Peer, saved: Kept) -> None:
        request = ask(max_tokens=500)
        last = await driver.ask(Generate(1, request))
        whole = await engine(0.0).generate(request)
        assert saved[1], "it ran for longer than it takes to save"
        parts = [*saved[1], last]
        assert tuple(token for part in parts for token in part.ids) == whole.ids
        assert tuple(value for part in parts for value in part.logprobs) == whole.logprobs
        assert last.stop is StopReason.STOP

    run(with_station(engine(), 0.2, body))


@pytest.mark.parametrize("order", [Call("abort", ("task/0",)), Call("abort", (None,)), Call("pause")], ids=str)
def test_an_order_ends_a_request_also_when_it_comes_between_two_parts(order):
    """The order is given in the very moment in which tokens are on their way to safety."""

    async def body(driver: Peer, saved: Kept) -> None:
        saved.first = lambda: driver.ask(order)
        completion = await driver.ask(Generate(1, ask(max_tokens=500)))
        assert completion.stop is StopReason.ABORT and len(saved[1]) == 1
        assert completion.ids == (), "nothing is sampled after the order"

    run(with_station(engine(), 0.1, body))


def test_a_request_that_waits_in_the_queue_is_not_sent_to_its_end_for_ever():
    """Interruptions without a token come ever more seldom."""

    class Slow(LettersEngine):
        calls = 0

        async def generate(self, request: Request) -> Completion:
            Slow.calls += 1
            return await super().generate(request)

    async def body(driver: Peer, saved: Kept) -> None:
        slow = ask(max_tokens=500, stops=())
        completion = await driver.ask(Generate(1, slow))
        assert completion.ids == (65,) and not saved
        assert Slow.calls <= 6

    made = Slow.create(
        ScriptedConfig(latency_s=0.5), name="r", encode=encode, decode=decode, script=lambda request, rng: (65,)
    )
    run(with_station(made, 0.02, body))


def test_an_engine_that_cannot_serve_any_more_ends_its_process():
    class Broken(LettersEngine):
        async def generate(self, request: Request) -> Completion:
            raise EngineFailure("out of memory")

        async def health(self) -> None:
            raise EngineFailure("out of memory")

    async def body(driver: Peer, saved: Kept) -> None:
        with pytest.raises(EngineFailure, match="out of memory"):
            await driver.ask(Generate(1, ask()))
        await asyncio.sleep(5)
        raise AssertionError("the station did not give up")

    with pytest.raises(ExceptionGroup) as caught:
        run(with_station(engine(kind=Broken), None, body))
    assert "the engine can serve no more: out of memory" in str(caught.value.exceptions)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the guard is for Linux")
def test_a_guard_ends_those_it_was_given_and_no_others():
    def sleeper() -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    with sleeper() as mine, sleeper() as other:
        try:
            assert {mine.pid, other.pid} <= set(descendants(os.getpid()))
            with guarded([mine.pid]):
                assert mine.poll() is None
            assert mine.wait(10) == -9
            assert other.poll() is None
        finally:
            other.kill()
            mine.kill()
