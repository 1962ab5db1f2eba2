"""What a vLLM server does with requests while weights change, with a sampler that counts instead of vLLM."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest

from tests import virtual_time
from treadle.engine.vllm.protocol import SampleRequest, SampleResult
from treadle.engine.vllm.request_tracker import RequestTracker, Segment
from treadle.errors import EngineFailure
from treadle.types import StopReason


@dataclass(eq=False)
class Running:
    start: int
    tokens: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Counter:
    """Samples one token a second: the number of tokens before it. Whoever is told to end has what it has."""

    def __init__(self) -> None:
        self.running: set[Running] = set()
        self.loads: list[bytes] = []
        self.events: list[str] = []
        self.load_error: Exception | None = None
        self.deaf = False

    async def begin(self, sample: SampleRequest, kept: Sequence[int]) -> Running:
        await asyncio.sleep(0.01)
        segment = Running(len(kept), sample.max_tokens - len(kept))
        self.running.add(segment)
        return segment

    async def finish(self, segment: Running) -> Segment:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(segment.tokens):
                await segment.ended.wait()
            count, stop = int(loop.time() - began), StopReason.ABORT
        except TimeoutError:
            count, stop = segment.tokens, StopReason.LENGTH
        finally:
            self.running.discard(segment)
        ids = list(range(segment.start, segment.start + count))
        return Segment(ids, [-0.5] * count, stop)

    async def end(self, handles: Sequence[Running]) -> None:
        for handle in handles:
            if not self.deaf:
                handle.ended.set()

    async def load(self, transfer: bytes) -> str:
        assert not self.running, "nothing is sampled while weights change"
        await asyncio.sleep(2)
        if self.load_error:
            raise self.load_error
        self.loads.append(transfer)
        return transfer.decode()

    async def sleep(self, level: int) -> None:
        self.events.append(f"sleep {level}")

    async def wake(self) -> None:
        self.events.append("wake")

    async def serve_openai(self, served_as: str, host: str, port: int, api_key: str) -> str:
        return f"http://{host}:{port}/v1"

    async def check(self) -> None:
        return None


def sample(tokens: int = 10) -> SampleRequest:
    return SampleRequest((1, 2), tokens, 1.0, 1.0, -1, (), 5, 0)


def play(body: Callable[[RequestTracker[Running], Counter], Awaitable[None]]) -> None:
    async def main() -> None:
        counter = Counter()
        await body(RequestTracker(counter, timeout_s=30.0), counter)

    virtual_time.run(main())


def begin(serving: RequestTracker[Running], number: int, tokens: int = 10) -> "asyncio.Task[SampleResult]":
    return asyncio.ensure_future(serving.generate((0, number), sample(tokens)))


def test_an_update_splits_an_answer_exactly_where_the_version_changed() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        task = begin(serving, 1)
        await asyncio.sleep(4.5)
        assert (await serving.update(7, b"word", "word")).checksum == "word"
        result = await task
        assert result.ids == tuple(range(10)) and result.stop is StopReason.LENGTH
        assert result.versions() == (0,) * 4 + (7,) * 6

    play(body)


def test_an_update_tells_how_long_nothing_was_sampled() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        task = begin(serving, 1)
        await asyncio.sleep(4.5)
        assert (await serving.update(1, b"word", "word")).pause_s == pytest.approx(2.0)
        assert (await serving.update(2, None)).pause_s == pytest.approx(0.0)
        await task

    play(body)


def test_a_request_that_comes_during_an_update_has_the_new_version_only() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        updating = asyncio.ensure_future(serving.update(1, b"word", "word"))
        await asyncio.sleep(0.5)
        result = await begin(serving, 1, 3)
        assert result.versions() == (1, 1, 1) and updating.done()

    play(body)


def test_a_request_that_is_being_registered_is_not_missed_by_an_update() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        task = begin(serving, 1, 3)
        await asyncio.sleep(0.005)  # in the middle of `begin`
        await serving.update(1, b"word", "word")
        assert (await task).versions() == (1, 1, 1)

    play(body)


def test_many_updates_in_a_row_lose_no_token() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        tasks = [begin(serving, at, 20) for at in range(8)]
        for version in range(1, 6):
            await asyncio.sleep(2.5)
            await serving.update(version, b"word", "word")
        for task in tasks:
            result = await task
            assert result.ids == tuple(range(20))
            assert list(result.versions()) == sorted(result.versions()) and set(result.versions()) == set(range(6))

    play(body)


def test_an_abort_keeps_tokens_and_leaves_the_others() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        mine, other = begin(serving, 1), begin(serving, 2)
        await asyncio.sleep(3.5)
        await serving.abort([(0, 1), (0, 99)])
        assert mine.done() or await mine
        result = await mine
        assert result.stop is StopReason.ABORT and len(result.ids) == 3
        assert len((await other).ids) == 10

    play(body)


def test_an_abort_during_an_update_ends_the_request_after_it() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        task = begin(serving, 1)
        await asyncio.sleep(3.5)
        updating = asyncio.ensure_future(serving.update(1, b"word", "word"))
        await asyncio.sleep(0.5)
        await serving.abort([(0, 1)])
        result = await task
        assert result.stop is StopReason.ABORT and result.versions() == (0, 0, 0)
        await updating

    play(body)


def test_a_request_that_is_aborted_while_it_waits_never_begins() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        updating = asyncio.ensure_future(serving.update(1, b"word", "word"))
        await asyncio.sleep(0.5)
        aborting = asyncio.ensure_future(serving.abort([(0, 1)]))
        await asyncio.sleep(0.1)
        result = await begin(serving, 1)
        assert result.stop is StopReason.ABORT and result.ids == ()
        await asyncio.gather(updating, aborting)

    play(body)


def test_a_failed_load_serves_nothing_until_a_later_one_succeeds() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        counter.load_error = EngineFailure("no")
        task = begin(serving, 1)
        await asyncio.sleep(1.5)
        with pytest.raises(EngineFailure, match="no"):
            await serving.update(1, b"word", "word")
        with pytest.raises(EngineFailure, match="version 1 did not arrive as they were sent"):
            await task
        with pytest.raises(EngineFailure, match="version 1 did not arrive as they were sent"):
            await serving.health()
        counter.load_error = None
        await serving.update(2, b"word", "word")
        await serving.health()
        assert (await begin(serving, 2, 2)).versions() == (2, 2)

    play(body)


def test_weights_with_another_checksum_serve_nobody() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        task = begin(serving, 1)
        await asyncio.sleep(1.5)
        assert (await serving.update(1, b"other", "word")).checksum == "other", "whoever pushed compares, too"
        with pytest.raises(EngineFailure, match="version 1 did not arrive as they were sent"):
            await task
        await serving.update(2, b"word", "word")
        assert (await begin(serving, 2, 2)).versions() == (2, 2)

    play(body)


def test_an_update_without_tensors_only_counts() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        await serving.update(1, b"word", "word")
        assert (await serving.update(2, None)).checksum == "word" and counter.loads == [b"word"]

    play(body)


def test_a_sleeping_engine_serves_nothing_and_an_update_wakes_it() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        await serving.sleep(2)
        with pytest.raises(EngineFailure, match="given up in sleep"):
            await begin(serving, 1)
        await serving.health()
        await serving.update(1, b"word", "word")
        assert (await begin(serving, 2, 1)).versions() == (1,)
        await serving.sleep(1)
        with pytest.raises(EngineFailure, match="asleep"):
            await begin(serving, 3)
        await serving.wake()
        assert (await begin(serving, 4, 1)).versions() == (1,)
        assert counter.events == ["sleep 2", "sleep 1", "wake"]

    play(body)


def test_requests_that_do_not_end_are_named_within_the_deadline() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        counter.deaf = True
        task = begin(serving, 1, 100)
        await asyncio.sleep(1.5)
        with pytest.raises(EngineFailure, match="waited 30 s for running requests to end"):
            await serving.update(1, b"word", "word")
        task.cancel()

    play(body)


def test_logits_that_are_not_numbers_are_a_failure() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        async def finish(segment: Running) -> Segment:
            return Segment([1], [float("nan")], StopReason.LENGTH)

        counter.finish = finish  # type: ignore[method-assign]
        with pytest.raises(EngineFailure, match="not numbers"):
            await begin(serving, 1)

    play(body)


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    async def body(serving: RequestTracker[Running], counter: Counter) -> None:
        task = begin(serving, 1)
        await asyncio.sleep(1.5)
        task.cancel()
        await asyncio.wait([task])
        assert not counter.running
        await serving.update(1, b"word", "word")

    play(body)
