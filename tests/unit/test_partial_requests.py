"""Requests in slices: saved tokens and the rest are the whole answer, and an order from outside ends a request."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.letters import ask, decode, encode
from tests.ray_engines import LettersEngine, letters
from treadle.config.rollout import ScriptedConfig
from treadle.engine.requests import PartialRequests
from treadle.types import Completion, Request, StopReason


def run(main: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def engine(latency_s: float = 0.6, kind: type = LettersEngine, script=letters):
    scripted = ScriptedConfig(latency_s=latency_s)
    return kind.create(scripted, name="r", encode=encode, decode=decode, seed=7, script=script)


def test_saved_tokens_and_the_answer_are_the_whole_answer():
    async def main() -> None:
        request, saved, made = ask(max_tokens=500), list[Completion](), engine()

        async def keep(part: Completion) -> None:
            saved.append(part)

        last = await PartialRequests(0.2, asyncio.ensure_future).generate(made, request, keep)
        whole = await engine(0.0).generate(request)
        assert saved, "it ran for longer than it takes to save"
        assert tuple(token for part in (*saved, last) for token in part.ids) == whole.ids
        assert tuple(value for part in (*saved, last) for value in part.logprobs) == whole.logprobs
        assert last.stop is StopReason.STOP

    run(main())


@pytest.mark.parametrize("session", ["task/0", None])
def test_an_order_ends_a_request_also_when_it_comes_between_two_slices(session):
    """The order is given in the very moment in which tokens are on their way to safety."""

    async def main() -> None:
        requests, saved, made = PartialRequests(0.1, asyncio.ensure_future), list[Completion](), engine()

        async def keep(part: Completion) -> None:
            saved.append(part)
            requests.end(session)
            await made.abort(session)

        completion = await requests.generate(made, ask(max_tokens=500), keep)
        assert completion.stop is StopReason.ABORT and len(saved) == 1
        assert completion.ids == (), "nothing is sampled after the order"

    run(main())


def test_a_request_that_waits_in_the_queue_is_not_sent_to_its_end_for_ever():
    """Interruptions without a token come ever more seldom."""

    class Slow(LettersEngine):
        calls = 0

        async def generate(self, request: Request) -> Completion:
            Slow.calls += 1
            return await super().generate(request)

    async def main() -> None:
        made = engine(0.5, Slow, lambda request, rng: (65,))
        keep: Callable[[Completion], Awaitable[None]] = _keep_nothing
        completion = await PartialRequests(0.02, asyncio.ensure_future).generate(
            made, ask(max_tokens=500, stops=()), keep
        )
        assert completion.ids == (65,)
        assert Slow.calls <= 6

    run(main())


async def _keep_nothing(part: Completion) -> None:
    raise AssertionError(f"there is nothing to keep: {part}")
