"""Requests in slices: saved tokens and the rest are the whole answer, and an order from outside ends a request."""

import asyncio
from collections.abc import Awaitable

import pytest

from tests.letters import ask, decode, encode
from tests.ray_engines import LettersEngine, letters
from treadle.config.rollout import ScriptedConfig
from treadle.engine.replica_supervisor import ReplicaSupervisor
from treadle.engine.restarting_engine import RestartingEngine
from treadle.types import Completion, Request, StopReason


def run(main: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


class Process(LettersEngine):
    """An engine in a process that never dies; counts the requests it gets."""

    calls = 0

    async def generate(self, request: Request) -> Completion:
        self.calls += 1
        return await super().generate(request)

    async def gone(self) -> str:
        await asyncio.Event().wait()
        return ""


def process(latency_s: float = 0.6, kind: type = Process, script=letters):
    scripted = ScriptedConfig(latency_s=latency_s)
    return kind.create(scripted, name="r", encode=encode, decode=decode, seed=7, script=script)


async def sliced(made: Process, save_s: float) -> RestartingEngine:
    async def start() -> Process:
        return made

    return await ReplicaSupervisor(1, save_s=save_s).add("r", start)


def test_saved_tokens_and_the_answer_are_the_whole_answer():
    async def main() -> None:
        request, made = ask(max_tokens=500), process()
        engine = await sliced(made, 0.2)
        completion = await engine.generate(request)
        whole = await process(0.0).generate(request)
        assert made.calls > 1, "it ran for longer than it takes to save"
        assert (completion.ids, completion.logprobs) == (whole.ids, whole.logprobs)
        assert completion.stop is StopReason.STOP
        await engine.close()

    run(main())


@pytest.mark.parametrize("session", ["task/0", None])
def test_an_order_ends_a_request_also_when_it_comes_between_two_slices(session):
    """The order is given in the very moment in which a slice has been interrupted to save its tokens."""

    class Ordered(Process):
        engine: RestartingEngine

        async def generate(self, request: Request) -> Completion:
            part = await super().generate(request)
            await self.engine.abort(session)
            return part

    async def main() -> None:
        made = process(kind=Ordered)
        made.engine = engine = await sliced(made, 0.1)
        completion = await engine.generate(ask(max_tokens=500))
        assert completion.stop is StopReason.ABORT and completion.ids, "it keeps the tokens of its slice"
        assert made.calls == 1, "nothing is sampled after the order"
        await engine.close()

    run(main())


def test_a_request_that_waits_in_the_queue_is_not_sent_to_its_end_for_ever():
    """Interruptions without a token come ever more seldom."""

    async def main() -> None:
        made = process(0.5, script=lambda request, rng: (65,))
        engine = await sliced(made, 0.02)
        completion = await engine.generate(ask(max_tokens=500, stops=()))
        assert completion.ids == (65,)
        assert made.calls <= 6
        await engine.close()

    run(main())
