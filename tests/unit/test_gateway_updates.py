"""Weight updates in the middle of a request: a turn behind the gateway goes on, and its tokens say which weights."""

import asyncio
from typing import Any

import pytest

from tests import virtual_time
from tests.gateways import Agent, agent, trained
from tests.rollouts import say
from tests.unit.test_gateway_fuzz import AFTER
from tests.unit.test_gateway_streams import BODIES
from treadle.engine.protocol import WeightUpdate
from treadle.gateway.request import TurnReply

TEXT = "One and two is three, and three and four is seven, as anybody can count on two hands."


async def update(it: Agent, version: int, how: str) -> None:
    """A push as it reaches an engine; `pause` and `abort` as a schedule that stops turns for it does."""
    if how == "pause":
        await it.engine.inner.pause()
    if how == "abort":
        await it.engine.inner.abort()
    await it.engine.inner.update_weights(WeightUpdate(version, "", {}))
    if how == "pause":
        await it.engine.inner.resume()


@pytest.mark.parametrize("how", ["continue", "pause", "abort"])
@pytest.mark.parametrize("dialect", BODIES)
def test_a_turn_that_updates_meet_has_a_version_for_each_token_and_its_agent_sees_one_answer(
    dialect: str, how: str
) -> None:
    async def ask(it: Agent, history: list[Any], updates: tuple[int, ...]) -> tuple[TurnReply, list[Any]]:
        given = "input" if dialect == "responses" else "messages"
        exchange = it.send({"model": "policy", "max_tokens": 500, given: history}, dialect)
        for version in updates:
            await asyncio.sleep(3.0)  # of the virtual clock
            assert not exchange.task.done(), "the update is to come in the middle of the turn"
            await update(it, version, how)
        answer = await it.receive(exchange, dialect)
        return exchange.turns[0].reply, [*history, *AFTER[dialect](answer, drops=False)]

    async def main() -> None:
        async with agent(say(TEXT), latency_s=12.0) as it:
            first, history = await ask(it, [{"role": "user", "content": "Go."}], (1, 2))
            second, _ = await ask(it, history, ())
            assert first.text == second.text == TEXT and not it.conversation.counters.engine_failures
            (row,) = await it.rows()
            one, other = ([*row.versions[turn.start : turn.sampled_end]] for turn in row.turns)
            assert {*one} == {0, 1, 2} and one == sorted(one) and {*other} == {2}
            assert trained([row]) == {pair: 1 for pair in it.engine.sampled}

    virtual_time.run(main())
