"""Sessions and connections that end while a request is on its way: nothing is sampled for them afterwards."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.gateways import agent
from tests.rollouts import rollout, say
from tests.unit.test_gateway_server import BODY, Served, head, served, until
from treadle.gateway import completions_server, responses
from treadle.gateway.completions_server import answer_completions
from treadle.rollout.trajectory_builder import SessionRecord

LARGE = {"model": "policy", "messages": [{"role": "user", "content": "word " * 25_000}]}
ROOMY = rollout(prompt_length=200_000, response_length=200_000)


class Gate:
    """A place in a request's way at which it waits."""

    def __init__(self) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self.reached.set()
        await self.open.wait()


@contextmanager
def held_at(owner: Any, name: str, gate: Gate) -> Iterator[None]:
    """Calls of a coroutine function wait at the gate, and go on when it is open."""
    real = getattr(owner, name)

    async def later(*given: Any) -> Any:
        found = await real(*given)
        await gate.wait()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, later)
        yield


def test_a_large_request_that_is_rendered_when_its_session_ends_is_not_sampled() -> None:
    async def use(it: Served) -> None:
        gate = Gate()
        with held_at(it.it.conversation, "render", gate):
            answer = asyncio.ensure_future(it.http.post("/v1/chat/completions", json=LARGE))
            await gate.reached.wait()
            await it.it.conversation.close()
            gate.open.set()
            refused = await answer
        assert refused.status_code == 403 and "the session has ended" in refused.text
        assert not it.it.engine.sampled and not SessionRecord(it.it.session).state.assistant_turns

    served(use, max_body_mb=2, config=ROOMY, script=say("Well."))


def test_a_request_that_comes_after_the_end_of_its_session_is_refused() -> None:
    async def use(it: Served) -> None:
        await it.it.conversation.close()
        assert (await it.chat()).status_code == 403 and not it.it.engine.sampled

    served(use)


def test_a_text_completion_ends_with_its_session_and_none_begins_after_it() -> None:
    class Connection:
        """An end of a connection that keeps what it is sent."""

        is_lost, on_lost = False, None

        async def respond(self, response: Any) -> None:
            self.response = response

    async def main() -> None:
        body = json.dumps({"model": "policy", "prompt": "One"}).encode()
        async with agent(say("Well.")) as it:
            it.engine.held = asyncio.Event()
            first, later = Connection(), Connection()
            work = asyncio.ensure_future(answer_completions(body, it.conversation, it.session, first))  # type: ignore[arg-type]
            await asyncio.wait_for(until(lambda: it.conversation.is_sampling), 60)
            await it.conversation.close()
            it.engine.held.set()
            await work
            assert first.response.status == 503 and "the session has ended" in str(first.response.body)
            await answer_completions(body, it.conversation, it.session, later)  # type: ignore[arg-type]
            assert later.response.status == 403 and not it.engine.sampled

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_before_its_request_is_placed_costs_no_tokens(stream: bool) -> None:
    async def use(it: Served) -> None:
        gate = Gate()
        body = json.dumps({**LARGE, "stream": stream}).encode()
        request = head("/v1/chat/completions", it.opened.key, content_length=str(len(body))) + body
        with held_at(it.it.conversation, "render", gate):
            async with it.socket() as (_, writer):
                writer.write(request)
                await writer.drain()
                await gate.reached.wait()
            await until(lambda: not it.gateway.num_connections)
            gate.open.set()
            again = await it.http.post("/v1/chat/completions", content=body)
        assert again.status_code == 200 and len(it.it.engine.sampled) == 1
        assert it.it.conversation.counters.requests == {"chat": 1}

    served(use, max_body_mb=2, config=ROOMY, script=say("Well."))


def test_a_connection_that_is_lost_already_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry that comes before the next sign of life gets the answer that is being sampled."""
    monkeypatch.setattr(responses, "KEEP_ALIVE_S", 3600.0)

    async def use(it: Served) -> None:
        it.it.engine.held = asyncio.Event()
        exchange = it.it.send(BODY)

        class Lost:
            is_lost, on_lost = True, None

        with pytest.raises(responses.ConnectionLost):
            await asyncio.wait_for(responses._wait(exchange, Lost(), None), 60)  # type: ignore[arg-type]
        it.it.conversation.lose(exchange)
        it.it.engine.held.set()
        assert (await it.chat()).status_code == 200
        assert len(it.it.engine.sampled) == 1 and it.it.conversation.counters.replayed == 1

    served(use)


def test_a_text_completion_is_not_sampled_for_a_connection_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions_server, "KEEP_ALIVE_S", 3600.0)

    class Lost:
        is_lost, on_lost = True, None

    async def main() -> None:
        body = json.dumps({"model": "policy", "prompt": "One"}).encode()
        async with agent(say("Well.")) as it:
            it.engine.held = asyncio.Event()
            with pytest.raises(responses.ConnectionLost):
                work = answer_completions(body, it.conversation, it.session, Lost())  # type: ignore[arg-type]
                await asyncio.wait_for(work, 60)
            assert not it.engine.sampled and not it.conversation.is_sampling
            await it.conversation.close()

    asyncio.run(main())
