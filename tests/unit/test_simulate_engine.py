"""The timed engine keeps the time its model says, whatever is in flight, and every second of it is accounted for."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from treadle.engine.protocol import WeightUpdate
from treadle.simulate.clock import run
from treadle.simulate.engine import ReplicaSpeed, TimedEngine
from treadle.types import Completion, Request, SamplingParams, StopReason

SPEED = ReplicaSpeed(sequence=100.0, together=1000.0, prefill=1e12, max_num_seqs=4, prefix_caching=True)


def request(uid: str, tokens: int, context: int = 0) -> Request:
    return Request(uid, 0, (context,), SamplingParams(max_tokens=tokens))


def play(
    scene: Callable[[TimedEngine], Awaitable[object]],
    speed: ReplicaSpeed = SPEED,
    push_s: float = 0.0,
    overlap: float = 0.0,
):
    async def main() -> object:
        return await scene(TimedEngine("e", speed, push_s, overlap))

    return run(main())


async def timed(work: Awaitable[Completion]) -> tuple[float, Completion]:
    completion = await work
    return asyncio.get_running_loop().time(), completion


def test_a_sequence_alone_has_its_own_speed():
    ended, completion = play(lambda engine: timed(engine.generate(request("a", 500))))
    assert ended == pytest.approx(5.0)
    assert (completion.ids, completion.versions, completion.stop) == ((500,), (0,), StopReason.STOP)


def test_sequences_slow_each_other_down_while_they_overlap():
    async def scene(engine):
        return await asyncio.gather(*(timed(engine.generate(request(name, 100))) for name in "ab"))

    assert [ended for ended, _ in play(scene)] == pytest.approx([100 * (0.01 + 0.001)] * 2)


def test_a_sequence_that_is_left_alone_speeds_up_again():
    async def scene(engine):
        return await asyncio.gather(
            timed(engine.generate(request("a", 100))), timed(engine.generate(request("b", 300)))
        )

    (first, _), (second, _) = play(scene)
    assert first == pytest.approx(1.1)
    assert second == pytest.approx(1.1 + 2.0)


def test_a_short_sequence_that_comes_later_ends_first():
    async def scene(engine):
        long = asyncio.ensure_future(timed(engine.generate(request("a", 300))))
        await asyncio.sleep(0.5)
        short, _ = await timed(engine.generate(request("b", 50)))
        return short, (await long)[0]

    assert play(scene) == pytest.approx((0.5 + 0.55, 0.5 + 0.55 + 2.0))


def test_no_more_run_than_may_and_the_others_wait_in_order():
    async def scene(engine):
        return await asyncio.gather(*(timed(engine.generate(request(name, 100))) for name in "abcdef"))

    ended = [at for at, _ in play(scene)]
    assert ended[:4] == pytest.approx([1.3] * 4)
    assert ended[4:] == pytest.approx([1.3 + 1.1] * 2)


def test_reading_a_context_takes_the_time_of_everyone_once():
    speed = ReplicaSpeed(100.0, 1e12, 1000.0, 4, prefix_caching=True)

    async def scene(engine):
        first = asyncio.ensure_future(timed(engine.generate(request("a", 100))))
        await asyncio.sleep(0.5)
        second = await timed(engine.generate(request("b", 100, context=200)))
        again = await timed(engine.generate(request("b", 100, context=400)))
        return (await first)[0], second[0], again[0]

    first, second, again = play(scene, speed)
    assert first == pytest.approx(1.2)
    assert second == pytest.approx(1.7)
    assert again == pytest.approx(1.7 + 0.1 + 1.0), "300 of its tokens are known, 100 are new"


def test_contexts_are_read_again_after_new_weights_and_without_a_cache():
    async def scene(engine):
        await engine.generate(request("a", 100, context=1000))
        await engine.update_weights(WeightUpdate(1, "x", {}))
        return await timed(engine.generate(request("a", 100, context=1100)))

    caching = ReplicaSpeed(100.0, 1e12, 1000.0, 4, prefix_caching=True)
    assert play(scene, caching)[0] == pytest.approx(2.0 + 2.1)

    async def twice(engine):
        await engine.generate(request("a", 100, context=1000))
        return await timed(engine.generate(request("a", 100, context=1100)))

    assert play(twice, caching)[0] == pytest.approx(2.0 + 1.0)
    forgetful = ReplicaSpeed(100.0, 1e12, 1000.0, 4, prefix_caching=False)
    assert play(twice, forgetful)[0] == pytest.approx(2.0 + 2.1)


def test_an_update_stops_the_engine_and_splits_the_versions():
    async def scene(engine):
        sampling = asyncio.ensure_future(timed(engine.generate(request("a", 100))))
        await asyncio.sleep(0.25)
        assert (await engine.update_weights(WeightUpdate(3, "sum", {}))).checksum == "sum"
        return await sampling

    ended, completion = play(scene, push_s=2.0)
    assert ended == pytest.approx(3.0)
    assert (completion.ids, completion.versions) == ((25, 75), (0, 3))


def test_an_engine_goes_on_for_the_part_of_an_update_that_overlaps():
    async def scene(engine):
        sampling = asyncio.ensure_future(timed(engine.generate(request("a", 100))))
        await asyncio.sleep(0.25)
        await engine.update_weights(WeightUpdate(3, "sum", {}))
        updated = asyncio.get_running_loop().time()
        return updated, await sampling, engine.work()

    updated, (ended, completion), work = play(scene, push_s=0.5, overlap=0.8)
    assert (updated, ended) == (pytest.approx(0.75), pytest.approx(1.1))
    assert (completion.ids, completion.versions) == ((65, 35), (0, 3))
    assert (work.updating, work.decoding) == (pytest.approx(0.1), pytest.approx(1.0))


def test_a_pause_keeps_what_was_sampled_and_holds_back_the_rest():
    async def scene(engine):
        sampling = asyncio.ensure_future(engine.generate(request("a", 100)))
        await asyncio.sleep(0.405)
        await engine.pause()
        part = await sampling
        held = asyncio.ensure_future(timed(engine.generate(request("a", 60, context=40))))
        await asyncio.sleep(10)
        assert not held.done()
        await engine.resume()
        return part, await held

    part, (ended, rest) = play(scene)
    assert (part.ids, part.stop) == ((40,), StopReason.ABORT)
    assert ended == pytest.approx(0.405 + 10 + 0.6)
    assert rest.ids == (60,)


def test_a_sequence_whose_caller_has_gone_makes_room():
    async def scene(engine):
        calls = [asyncio.ensure_future(timed(engine.generate(request(name, 100)))) for name in "abcdef"]
        await asyncio.sleep(0.13)
        calls[0].cancel()
        calls[4].cancel()
        return await asyncio.gather(*calls, return_exceptions=True)

    found = play(scene)
    assert [isinstance(item, asyncio.CancelledError) for item in found] == [True, False, False, False, True, False]
    assert [item[0] for item in found[1:4]] == pytest.approx([1.3] * 3)
    assert found[5][0] == pytest.approx(1.3 + 0.1), "it began when the first left, and ran its last tenth alone"


def test_every_second_is_accounted_for():
    async def scene(engine):
        await asyncio.sleep(1.0)
        sampling = asyncio.ensure_future(engine.generate(request("a", 100, context=500)))
        await asyncio.sleep(1.0)
        await engine.update_weights(WeightUpdate(1, "x", {}))
        await sampling
        await asyncio.sleep(0.7)
        return engine.work(), asyncio.get_running_loop().time()

    speed = ReplicaSpeed(100.0, 1e12, 1000.0, 4, prefix_caching=True)
    work, now = play(scene, speed, push_s=3.0)
    assert (work.idle, work.prefilling, work.updating, work.decoding) == pytest.approx((1.7, 0.5, 3.0, 1.0))
    assert work.tokens == pytest.approx(100)
    assert work.seconds == pytest.approx(now)
