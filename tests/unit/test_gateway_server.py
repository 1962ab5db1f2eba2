"""The gateway over HTTP: keys, streams, lost connections; and clients that mean no good."""

import asyncio
import contextlib
import json
import resource
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.gateways import TOOLS, Agent, agent, trained
from tests.rollouts import CALL, renderer, rollout, say
from treadle.config.rollout import AgentConfig, GatewayConfig
from treadle.errors import ConfigError, EngineFailure
from treadle.gateway import agents, connection_limits, http_server, responses, server
from treadle.gateway.request import TurnRequest
from treadle.gateway.server import GatewayServer, GatewaySession
from treadle.rollout.trajectory_builder import SessionRecord
from treadle.types import Row

USER = {"role": "user", "content": "Add 1 and 2."}
BODY = {"model": "policy", "messages": [USER]}


async def until(holds: Callable[[], Any]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


class Served:
    def __init__(self, it: Agent, gateway: GatewayServer, opened: GatewaySession) -> None:
        self.it, self.gateway, self.opened = it, gateway, opened
        self.http = httpx.AsyncClient(base_url=gateway.url, headers={"authorization": f"Bearer {opened.key}"})

    async def chat(self, **changes: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={**BODY, **changes})

    @asynccontextmanager
    async def socket(self):
        port = int(self.gateway.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def raw(self, data: bytes) -> bytes:
        """All that comes back for some bytes."""
        async with self.socket() as (reader, writer):
            writer.write(data)
            return await asyncio.wait_for(reader.read(), 20)


def served(use: Callable[[Served], Coroutine[Any, Any, None]], max_body_mb: int = 1, **fields: Any) -> None:
    async def main() -> None:
        gateway = await GatewayServer.start(GatewayConfig(max_body_mb=max_body_mb))
        async with agent(**fields) as it:
            opened = gateway.open(it.conversation)
            one = Served(it, gateway, opened)
            try:
                await use(one)
            finally:
                await one.http.aclose()
                await gateway.close()
                await it.conversation.close()

    asyncio.run(main())


def rows_of(it: Agent) -> Sequence[Row]:
    """Rows of a session that is open."""
    return SessionRecord(it.session).rows()


def head(path: str, key: str = "", **headers: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, *([f"x-api-key: {key}"] if key else []), "", ""]).encode()


def test_a_key_is_taken_as_bearer_as_api_key_and_in_the_path() -> None:
    async def use(it: Served) -> None:
        assert (await it.chat()).status_code == 200
        async with httpx.AsyncClient(base_url=it.gateway.url) as bare:
            key = {"x-api-key": it.opened.key}
            assert (await bare.post("/v1/chat/completions", json=BODY, headers=key)).status_code == 200
            assert (await bare.post(f"/s/{it.opened.key}/v1/chat/completions", json=BODY)).status_code == 200
            assert (await bare.get("/health")).status_code == (await bare.head("/api/hello")).status_code == 200

    served(use)


def test_no_other_key_opens_anything_and_a_key_dies_with_its_session() -> None:
    async def use(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.gateway.url) as bare:
            for key in ("", "x", it.opened.key[:-1], it.opened.key.upper() + "0", "é", it.opened.notes_key):
                headers = {"x-api-key": key.encode()} if key else {}
                refused = await bare.post("/v1/messages", json=BODY, headers=headers)
                assert refused.status_code == (403 if key == it.opened.notes_key else 401)
                assert refused.json()["error"]["type"] == "authentication_error"
        it.gateway.close_session(it.opened)
        assert (await it.chat()).status_code == 401
        assert not it.it.engine.sampled

    served(use)


def test_the_second_key_gives_a_reward_and_the_first_does_not() -> None:
    async def use(it: Served) -> None:
        body = {"reward": 0.5, "notes": {"tests": 3}}
        assert (await it.http.post("/v1/notes", json=body)).status_code == 404
        assert it.opened.reward is None
        key = {"authorization": f"Bearer {it.opened.notes_key}"}
        for wrong in ({"reward": "1"}, {"reward": True}, {"notes": 3}, {"reward": 1e301}):
            assert (await it.http.post("/v1/notes", json=wrong, headers=key)).status_code == 400
        assert (await it.http.post("/v1/notes", json=body, headers=key)).status_code == 200
        assert it.opened.reward == 0.5 and it.opened.notes == {"tests": 3}
        later = await it.http.post("/v1/notes", json={"reward": 99.0, "notes": {"tests": 4}}, headers=key)
        assert later.status_code == 409 and "has the reward 0.5 already" in later.json()["error"]["message"]
        assert (await it.http.post("/v1/notes", json={"notes": {"more": 1}}, headers=key)).status_code == 200
        assert it.opened.reward == 0.5 and it.opened.notes == {"tests": 3, "more": 1}

    served(use)


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_ids_of_another_session_in_a_history_are_text_of_this_one_and_change_nothing_in_that(dialect: str) -> None:
    """Tool-call ids, signatures and encrypted reasoning: marks open a turn in the session that they were made for."""
    path = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}[dialect]
    started = {"input": [USER]} if dialect == "responses" else {"messages": [USER]}
    (tool,) = (tool["function"] for tool in TOOLS)
    tools = {
        "chat": TOOLS,
        "messages": [{"name": tool["name"], "input_schema": tool["parameters"]}],
        "responses": [{"type": "function", **tool}],
    }
    thinks = say(f"<think>\nHm.\n</think>\n\n{CALL}", "It is 3.")

    def go_on(answer: dict[str, Any]) -> dict[str, Any]:
        if dialect == "chat":
            message = {name: value for name, value in answer["choices"][0]["message"].items() if value is not None}
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
            return {"messages": [USER, message, result]}
        if dialect == "messages":
            (use,) = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
            result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use, "content": "3"}]}
            return {"messages": [USER, {"role": "assistant", "content": answer["content"]}, result]}
        (call,) = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        return {"input": [USER, *answer["output"], {"type": "function_call_output", "call_id": call, "output": "3"}]}

    async def use(one: Served) -> None:
        async with agent(thinks) as other:
            opened = one.gateway.open(other.conversation)
            shared: dict[str, Any] = {"model": "policy", "max_tokens": 200, "tools": tools[dialect]}
            first = (await one.http.post(path, json={**shared, **started})).json()
            rows = rows_of(one.it)
            headers = {"authorization": f"Bearer {opened.key}"}
            stolen = await one.http.post(path, json={**shared, **go_on(first)}, headers=headers)
            assert stolen.status_code == 200
            assert rows_of(one.it) == rows and one.it.conversation.counters.as_extra()["requests"] == {dialect: 1}
            assert trained(rows_of(other)) == Counter(other.engine.sampled), "of it, what it sampled trains alone"
            extra = other.conversation.counters.as_extra()
            assert extra["roots"] == 1 and "echoes" not in extra and len(other.engine.sampled) == 1
            await other.conversation.close()
        assert (await one.http.post(path, json={**shared, **go_on(first)})).status_code == 200
        extra = one.it.conversation.counters.as_extra()
        assert extra["echoes"] == {"exact": 1} and extra["roots"] == 1 and len(rows_of(one.it)) == 1

    served(use, script=thinks)


def test_models_and_tokens_are_counted() -> None:
    async def use(it: Served) -> None:
        assert (await it.http.get("/v1/models")).json()["data"][0]["id"] == "policy"
        counted = (await it.http.post("/v1/messages/count_tokens", json=BODY)).json()["input_tokens"]
        used = (await it.http.post("/v1/messages", json={**BODY, "max_tokens": 99})).json()["usage"]["input_tokens"]
        assert counted == used > 5

    served(use)


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_a_stream_starts_at_once_lives_on_and_ends_after_the_turn_is_committed(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "KEEP_ALIVE_S", 0.01)
    path = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}[dialect]
    alive = b": keep-alive" if dialect != "messages" else b"event: ping"

    async def use(it: Served) -> None:
        it.it.engine.held = asyncio.Event()
        body = {"model": "policy", "messages": [USER], "input": "Add.", "stream": True, "max_tokens": 99}
        async with it.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, "before the answer is there"
            pieces = response.aiter_raw()
            assert alive in await anext(pieces)
            it.it.engine.held.set()
            rest = b"".join([piece async for piece in pieces])
            assert it.it.conversation._tree.turns[0].reply.text.strip().encode()[:5] in rest
        await asyncio.sleep(0)
        events = [line for line in rest.decode().split("\n\n") if line and not line.startswith((":", "event: ping"))]
        ends = {"chat": "data: [DONE]", "messages": "event: message_stop", "responses": "event: response.completed"}
        assert events[-1].startswith(ends[dialect]) and len(it.it.conversation._tree.turns) == 1

    served(use)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_and_comes_back_gets_the_same_answer(stream: bool, later: bool) -> None:
    async def use(it: Served) -> None:
        it.it.engine.held = asyncio.Event()
        body = json.dumps({**BODY, "stream": stream}).encode()
        request = head("/v1/chat/completions", it.opened.key, content_length=str(len(body))) + body
        async with it.socket() as (_, writer):
            writer.write(request)
            await until(lambda: it.it.conversation._exchanges)
        (exchange,) = next(iter(it.it.conversation._exchanges.values()))
        await until(lambda: not exchange.is_awaited)
        it.it.engine.held.set()
        again = {**dict(reversed(json.loads(body).items())), "stream": later}  # maps of programs need have no order
        answer = await it.http.post("/v1/chat/completions", json=again)
        assert exchange.turns[0].reply.mark in answer.text
        assert len(it.it.engine.sampled) == 1 and it.it.conversation.counters.replayed == 1

    served(use)


def test_a_client_that_closes_with_an_answer_unread_gets_it_again() -> None:
    async def use(it: Served) -> None:
        body = json.dumps(BODY).encode()
        port = int(it.gateway.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head("/v1/chat/completions", it.opened.key, content_length=str(len(body))) + body)
            await until(lambda: it.it.engine.sampled and not it.it.conversation._exchanges)
        await until(lambda: it.it.conversation._exchanges)
        await it.http.post("/v1/chat/completions", content=body)
        assert len(it.it.engine.sampled) == 1 and it.it.conversation.counters.replayed == 1

    served(use)


def read_stream(port: int, request: bytes, size: int) -> bytes:
    """What a client reads of a stream that it leaves right behind the terminal event, `size` bytes at a time."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(request)
        got = b""
        while b"[DONE]\n\n" not in got:
            got += (piece := client.recv(size))
            assert piece, got
    return got


def test_a_stream_that_is_left_behind_its_last_event_trains_and_is_still_given_again() -> None:
    async def use(it: Served) -> None:
        body = json.dumps({**BODY, "stream": True}).encode()
        request = head("/v1/chat/completions", it.opened.key, content_length=str(len(body))) + body
        port = int(it.gateway.url.rpartition(":")[2])
        first = await asyncio.to_thread(read_stream, port, request, 1)  # the end of the body stays unread
        await until(lambda: it.gateway.num_connections == 0)
        again = await it.http.post("/v1/chat/completions", content=body)
        assert it.it.conversation._tree.turns[0].reply.mark.encode() in first
        assert it.it.conversation._tree.turns[0].reply.mark in again.text and len(it.it.engine.sampled) == 1
        assert it.it.conversation.counters.replayed == 1
        await asyncio.to_thread(read_stream, port, request.replace(b"Add", b"Sum"), 1)
        await until(lambda: it.gateway.num_connections == 1)
        assert len(await it.it.rows()) == 2 and "untrained" not in it.it.session.extra["gateway"]

    served(use, train="main")


def test_the_last_event_of_a_stream_and_the_end_of_its_body_are_sent_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = http_server.HttpConnection._write

    def note(self: Any, *events: Any) -> None:
        written.append(b" ".join(type(event).__name__.encode() for event in events))
        write(self, *events)

    monkeypatch.setattr(http_server.HttpConnection, "_write", note)

    async def use(it: Served) -> None:
        await it.chat(stream=True)
        await it.chat()
        assert written == [b"Response", b"Data EndOfMessage", b"Response Data EndOfMessage"]

    served(use)


@pytest.mark.parametrize(
    ("dialect", "status", "words"),
    [("chat/completions", 503, "server_is_overloaded"), ("messages", 529, "overloaded_error"), ("responses", 503, "")],
)
def test_an_engine_that_fails_is_a_status_to_try_again_on(dialect: str, status: int, words: str) -> None:
    async def use(it: Served) -> None:
        body = {**BODY, "input": "Add.", "max_tokens": 9}
        refused = await it.http.post(f"/v1/{dialect}", json=body)
        assert refused.status_code == status and refused.headers["retry-after"] == "1" and words in refused.text

    served(use, failure_rate=1.0)


def test_an_engine_that_fails_in_a_stream_is_said_in_the_stream() -> None:
    async def use(it: Served) -> None:
        answered = await it.http.post("/v1/messages", json={**BODY, "max_tokens": 9, "stream": True})
        assert "event: error" in answered.text and "overloaded_error" in answered.text
        answered = await it.http.post("/v1/responses", json={"model": "policy", "input": "Add.", "stream": True})
        assert "event: response.failed" in answered.text

    served(use, failure_rate=1.0)


def test_a_refused_option_is_named_and_counted() -> None:
    async def use(it: Served) -> None:
        refused = await it.chat(response_format={"type": "json_object"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "response_format"
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
        assert "messages[1].content[0].type" in (await it.chat(messages=[USER, image])).text
        await it.chat(messages=[image])
        assert it.it.conversation.counters.refused == {"response_format": 1, "messages[].content[].type": 2}

    served(use)


def test_context_that_is_exhausted_has_the_status_of_the_dialect() -> None:
    async def use(it: Served) -> None:
        long = [{"role": "user", "content": "word " * 400}]
        assert (await it.chat(messages=long)).json()["error"]["code"] == "context_length_exceeded"
        refused = await it.http.post("/v1/messages", json={**BODY, "messages": long, "max_tokens": 9})
        assert refused.status_code == 400 and "prompt is too long" in refused.text
        streamed = await it.http.post("/v1/responses", json={"model": "policy", "input": "word " * 400, "stream": True})
        assert streamed.status_code == 200 and "context_length_exceeded" in streamed.text

    served(use, config=rollout(prompt_length=100, response_length=100))


HOSTILE = {
    "binary": b"\x00\xff\xfe\x80" * 400,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no path": b"POST  HTTP/1.1\r\nhost: x\r\n\r\n",
    "long head": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    "two lengths": b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcd",
    "negative length": b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: -4\r\n\r\nabcd",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_http_gets_a_status_and_a_closed_connection(name: str) -> None:
    async def use(it: Served) -> None:
        answer = await it.raw(HOSTILE[name])
        assert answer.startswith(b"HTTP/1.1 4") and b"Traceback" not in answer
        assert (await it.chat()).status_code == 200

    served(use)


@pytest.mark.parametrize(
    "path",
    ["/v1/../v1/messages", "//v1/messages", "/v1/messages/", "/v1/messages%2f", "/s//v1/messages", "/v2/x", "/s/", "*"],
)
def test_a_path_that_is_no_route_is_no_route(path: str) -> None:
    async def use(it: Served) -> None:
        answer = await it.raw(head(path, it.opened.key, content_length="0", connection="close"))
        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 401", b"HTTP/1.1 400"))

    served(use)


BAD_BODIES = [
    b"",
    b"\xff",
    b"[]",
    b"3",
    b"{" * 100_000,
    b"[" * 500_000,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": NaN}',
    b'{"messages": [{"role": "user", "content": ' + b"9" * 10_000 + b"}]}",
    b'{"messages":' + b'[{"a":' * 800 + b"1" + b"}]" * 800 + b"}",
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_a_body_that_is_no_request_is_an_error_in_words(body: bytes) -> None:
    async def use(it: Served) -> None:
        refused = await it.http.post("/v1/chat/completions", content=body)
        assert refused.status_code == 400 and refused.json()["error"]["message"]

    served(use)


def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    async def use(it: Served) -> None:
        key = it.opened.key
        declared = await it.raw(head("/v1/messages", key, content_length=str(100_000_000)))
        assert declared.startswith(b"HTTP/1.1 413") and b"rollout.gateway.max_body_mb" in declared
        chunk = b"10000\r\n" + b"a" * 65_536 + b"\r\n"
        sent = await it.raw(head("/v1/messages", key, transfer_encoding="chunked") + chunk * 16)
        assert sent.startswith(b"HTTP/1.1 413")
        unknown = await it.raw(head("/v1/messages", "wrong", content_length=str(100_000_000)))
        assert unknown.startswith(b"HTTP/1.1 401")

    served(use)


def long_text(num_words: int) -> dict[str, Any]:
    return {"role": "user", "content": "word " * num_words}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
def test_a_large_request_is_read_and_rendered_in_threads(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[bool]] = {"parse": set(), "keys": set(), "prompt": set()}

    def noting(name: str, call: Any) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            threads[name].add(threading.current_thread() is threading.main_thread())
            return call(*given, **named)

        return noted

    dialect = server.dialect_of(path)
    monkeypatch.setattr(dialect, "parse_request", noting("parse", dialect.parse_request))
    monkeypatch.setattr(TurnRequest, "keys", noting("keys", TurnRequest.keys))
    kind = type(renderer())
    monkeypatch.setattr(kind, "prompt", noting("prompt", kind.prompt))
    monkeypatch.setattr(kind, "observation", noting("prompt", kind.observation))

    async def use(it: Served) -> None:
        threads["prompt"].clear()  # of the task's own prompt
        history = [long_text(25_000)]
        for _ in range(2):
            answer = await it.http.post(path, json={**BODY, "messages": history})
            assert answer.status_code == 200, answer.text
            if "count_tokens" not in path:
                history += [answer.json()["choices"][0]["message"], long_text(25_000)]
        assert threads["parse"] == {False} and threads["prompt"] == {False} and threads["keys"] <= {False}
        if "count_tokens" not in path:
            (row,) = await it.it.rows()
            assert trained([row]) == {pair: 1 for pair in it.it.engine.sampled} and len(row.turns) == 2

    config = rollout(prompt_length=200_000, response_length=200_000)
    served(use, max_body_mb=2, config=config, script=say("Well."))


def test_a_request_that_cannot_fit_any_row_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(it: Served) -> None:
        monkeypatch.setattr(type(renderer()), "prompt", None)
        refused = await it.chat(messages=[long_text(180_000)])
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        assert it.it.conversation.has_run_out

    served(use, max_body_mb=2)


def test_a_body_of_too_many_values_is_refused_before_it_is_read() -> None:
    async def use(it: Served) -> None:
        refused = await it.http.post("/v1/chat/completions", content=b"[" + b"[]," * 300_000 + b"0]")
        assert refused.status_code == 413 and "brackets" in refused.text

    served(use, max_body_mb=2)


def test_two_large_requests_at_once_are_siblings_and_each_trains_once() -> None:
    async def use(it: Served) -> None:
        answers = await asyncio.gather(*(it.chat(messages=[long_text(25_000)]) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        rows = await it.it.rows()
        assert len(rows) == 3 and trained(rows) == {pair: 1 for pair in it.it.engine.sampled}

    served(use, max_body_mb=2, config=rollout(prompt_length=200_000, response_length=200_000))


def test_a_client_that_sends_its_head_or_its_body_slowly_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 0.1)

    async def use(it: Served) -> None:
        assert b"408" in await it.raw(b"POST /v1/mess")
        assert b"408" in await it.raw(head("/v1/messages", it.opened.key, content_length="100") + b"{")
        assert await it.raw(b"") == b""
        assert it.gateway.num_connections == 0

    served(use)


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """What is answered to a byte now and then, which never ends a line."""
    answer = asyncio.ensure_future(reader.read())
    async with asyncio.timeout(60):
        while not answer.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"x")
                await writer.drain()
            await asyncio.wait({answer}, timeout=0.02)
    return answer.result()


def test_a_byte_now_and_then_does_not_give_a_head_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(it: Served) -> None:
        async with it.socket() as (reader, writer):
            await until(lambda: it.gateway.num_connections == 1)
            monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.3)
            writer.write(b"GET /")
            assert (await drip(reader, writer)).startswith(b"HTTP/1.1 408")

    served(use)


def test_the_time_of_a_head_that_came_ahead_begins_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(it: Served) -> None:
        it.it.engine.held = asyncio.Event()
        body = json.dumps(BODY).encode()
        async with it.socket() as (reader, writer):
            writer.write(head("/v1/chat/completions", it.opened.key, content_length=str(len(body))) + body + b"GET /")
            await until(lambda: it.it.conversation.is_sampling)
            monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.3)
            it.it.engine.held.set()
            answers = await drip(reader, writer)
        assert answers.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answers

    served(use)


def test_connections_without_a_key_give_way_to_new_ones() -> None:
    async def use(it: Served) -> None:
        it.gateway._http.connections.max_connections = 20  # type: ignore[union-attr]
        assert (await it.chat()).status_code == 200
        port = int(it.gateway.url.rpartition(":")[2])
        connect = lambda: [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]  # noqa: E731
        idle = await asyncio.to_thread(connect)
        assert (await it.chat()).status_code == 200, "on the connection that it has"
        async with httpx.AsyncClient(base_url=it.gateway.url) as other:
            key = {"x-api-key": it.opened.key}
            assert (await other.post("/v1/chat/completions", json=BODY, headers=key)).status_code == 200
        assert it.gateway.num_connections <= 20
        for one in idle:
            one.close()

    served(use)


def test_connections_between_two_requests_give_way_to_other_sessions() -> None:
    async def use(it: Served) -> None:
        it.gateway._http.connections.max_connections = 20  # type: ignore[union-attr]
        key = {"x-api-key": it.opened.key}
        clients = [httpx.AsyncClient(base_url=it.gateway.url, headers=key) for _ in range(60)]
        for client in clients:
            assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200, "and stays connected"
        assert it.gateway.num_connections <= 20
        for client in clients:
            await client.aclose()

    served(use)


def half_sent(port: int, count: int, request: bytes) -> list[socket.socket]:
    """Connections that have all sent the same beginning of a request."""
    made = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for one in made:
        one.sendall(request)
    return made


def test_requests_that_never_come_whole_count_for_their_session_and_leave_room_for_others() -> None:
    async def use(it: Served) -> None:
        it.gateway._http.connections.max_connections = 20  # type: ignore[union-attr]
        port = int(it.gateway.url.rpartition(":")[2])
        request = head("/v1/messages", it.opened.key, content_length="100")
        held = await asyncio.to_thread(half_sent, port, 25, request)
        async with agent() as other:
            opened = it.gateway.open(other.conversation)
            async with httpx.AsyncClient(base_url=it.gateway.url, headers={"x-api-key": opened.key}) as client:
                assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
        assert it.opened.share.num_connections == 4, "and the others were refused"
        for one in held:
            one.close()
        await until(lambda: it.opened.share.num_connections == 0)
        assert (await it.chat()).status_code == 200

    served(use)


def test_bodies_of_one_session_are_bounded_together() -> None:
    async def use(it: Served) -> None:
        port = int(it.gateway.url.rpartition(":")[2])
        request = head("/v1/messages", it.opened.key, content_length="900000") + b" " * 800_000
        held = await asyncio.to_thread(half_sent, port, 2, request)
        await until(lambda: it.opened.share.num_bytes == 1_600_000)
        refused = await it.raw(request)
        assert refused.startswith(b"HTTP/1.1 429") and b"bytes" in refused and b"x-should-retry" not in refused
        for one in held:
            one.close()
        await until(lambda: it.opened.share.num_bytes == 0 == it.opened.share.num_connections)
        nobody = await it.raw(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n" + b" " * 90_000)
        assert nobody.startswith(b"HTTP/1.1 413"), "without a key there is no body to send"
        assert b"without a key" in nobody, "no larger limit would help"

    served(use, max_body_mb=1)


def test_a_server_asks_for_all_files_it_may_have() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:

        async def use(it: Served) -> None:
            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            assert files == min(hard, 65_536) and it.gateway.max_connections == files // 4

        served(use)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_worker_with_more_sessions_than_connections_says_so(caplog: pytest.LogCaptureFixture) -> None:
    agents._warn_of_few_files(rollout(agent=AgentConfig(max_concurrent_sessions=600, num_workers=2)), 256)
    assert "300 sessions" in caplog.text and "rollout.agent.num_workers to 3" in caplog.text
    caplog.clear()
    agents._warn_of_few_files(rollout(agent=AgentConfig(max_concurrent_sessions=500, num_workers=2)), 256)
    assert not caplog.text


def test_one_session_cannot_hold_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "MAX_SESSION_CONNECTIONS", 3)

    async def use(it: Served) -> None:
        it.it.engine.held = asyncio.Event()
        waiting = [asyncio.ensure_future(it.chat()) for _ in range(3)]
        await until(lambda: it.opened.share.num_connections == 3)
        refused = await it.chat()
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert "x-should-retry" not in refused.headers, "SDKs give up on it"
        it.it.engine.held.set()
        assert [(await one).status_code for one in waiting] == [200, 200, 200]

    served(use)


def test_requests_that_are_sent_ahead_are_answered_in_order() -> None:
    async def use(it: Served) -> None:
        body = json.dumps(BODY).encode()
        one = head("/v1/chat/completions", it.opened.key, content_length=str(len(body))) + body
        last = head("/v1/chat/completions", it.opened.key, content_length=str(len(body)), connection="close") + body
        assert (await it.raw(one + last)).count(b"HTTP/1.1 200") == 2

    served(use)


def test_a_stream_that_is_cut_in_the_middle_changes_nothing_for_others() -> None:
    async def use(it: Served) -> None:
        async with it.http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
            assert response.status_code == 200
        assert (await it.chat(tools=TOOLS)).json()["choices"][0]["message"]["tool_calls"][0]["id"].startswith("call_")

    served(use, script=say(CALL))


def test_an_address_of_ipv6_is_a_url() -> None:
    async def main() -> None:
        try:
            one = await GatewayServer.start(GatewayConfig(host="::1"))
        except ConfigError:
            pytest.skip("this machine has no IPv6")
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{one.url}/health")).status_code == 200
        await one.close()

    asyncio.run(main())


def test_a_port_that_is_taken_is_a_mistake_in_the_config() -> None:
    async def main() -> None:
        one = await GatewayServer.start(GatewayConfig())
        with pytest.raises(ConfigError, match="gateway"):
            await GatewayServer.start(GatewayConfig(port=int(one.url.rpartition(":")[2])))
        await one.close()

    asyncio.run(main())


def test_a_bug_behind_a_request_is_a_500_and_ends_the_session(caplog: pytest.LogCaptureFixture) -> None:
    async def use(it: Served) -> None:
        class Odd:
            async def generate(self, request: Any) -> Any:
                raise ZeroDivisionError("a bug")

        it.it.engine.inner = Odd()
        answer = await it.chat()
        assert answer.status_code == 500 and "ZeroDivision" not in answer.text
        assert isinstance(it.it.conversation.failure, ZeroDivisionError) and not isinstance(
            it.it.conversation.failure, EngineFailure
        )

    served(use)


@pytest.mark.parametrize("escape", ["\\ud83d", "\\uDE00", "\\n\\\\ud\\udc00"])
def test_half_of_a_surrogate_pair_is_an_error_in_words_and_a_whole_one_is_text(escape: str) -> None:
    async def use(it: Served) -> None:
        whole = b'{"model": "policy", "messages": [{"role": "user", "content": "a\\ud83d\\ude00 \\n \\\\u"}]}'
        assert (await it.http.post("/v1/chat/completions", content=whole)).status_code == 200
        half = whole.replace(b"\\ud83d\\ude00", escape.encode())
        refused = await it.http.post("/v1/chat/completions", content=half)
        assert refused.status_code == 400 and "half of a surrogate pair" in refused.json()["error"]["message"]

    served(use)
