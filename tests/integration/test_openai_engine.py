"""The OpenAI engine against a real HTTP server, in good and bad moods."""

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.fake_endpoint import DROP, HALF, FakeEndpoint, Reply
from tests.letters import ask, encode
from treadle.config.rollout import FailureConfig, LimitsConfig, OpenAIConfig, RolloutConfig
from treadle.engine.openai_client import OpenAIEngine
from treadle.errors import ConfigError, EngineFailure, RequestRefused
from treadle.types import Completion, Request, StopReason, ToolCall

Body = Callable[[OpenAIEngine], Awaitable[Any]]


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as running:
        yield running


def use(
    endpoint: FakeEndpoint,
    body: Body,
    *,
    timeout_s: float = 20.0,
    retries: int = 2,
    api_key: str | None = None,
    **keys: Any,
) -> Any:
    rollout = RolloutConfig(
        limits=LimitsConfig(request_timeout_s=timeout_s, launch_timeout_s=timeout_s),
        failures=FailureConfig(request_retries=retries),
    )
    openai = OpenAIConfig(**{"base_url": endpoint.base_url, **keys})

    async def main() -> Any:
        engine = await OpenAIEngine.create(openai, rollout, encode=encode, api_key=api_key)
        try:
            return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def generate(endpoint: FakeEndpoint, request: Request | None = None, **options: Any) -> Completion:
    completion = use(endpoint, lambda engine: engine.generate(request or ask()), **options)
    assert isinstance(completion, Completion)
    return completion


def test_the_request_says_what_the_session_asked(endpoint: FakeEndpoint) -> None:
    generate(endpoint, ask("what is 1 + 1?", max_tokens=5), api_key="secret", extra_body={"user": "me", "top_p": 0.5})
    (chat,), (headers,) = endpoint.chats, endpoint.headers
    seed = chat.pop("seed")
    assert chat == {
        "model": "first-model",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "what is 1 + 1?"},
        ],
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 0.5,
        "logprobs": True,
        "user": "me",
    }
    assert 0 <= seed < 2**31
    assert headers["authorization"] == "Bearer secret"


def test_without_a_key_none_is_sent(endpoint: FakeEndpoint) -> None:
    generate(endpoint)
    assert "authorization" not in endpoint.headers[0]


def test_the_named_model_is_asked_for(endpoint: FakeEndpoint) -> None:
    generate(endpoint, model="second-model")
    assert endpoint.chats[0]["model"] == "second-model"


def test_a_null_in_extra_body_leaves_a_field_out(endpoint: FakeEndpoint) -> None:
    generate(endpoint, ask(max_tokens=7), extra_body={"logprobs": None, "max_tokens": None, "seed": None})
    assert endpoint.chats[0].keys().isdisjoint({"logprobs", "max_tokens", "seed"})
    assert endpoint.chats[0]["max_completion_tokens"] == 7


def test_each_sample_and_position_asks_with_its_own_seed(endpoint: FakeEndpoint) -> None:
    requests = [ask(), ask(sample=1), ask(position=9), ask(uid="u"), ask(seed=1), ask()]
    use(endpoint, lambda engine: asyncio.gather(*(engine.generate(request) for request in requests)))
    assert len({chat["seed"] for chat in endpoint.chats}) == 5


def test_a_request_without_messages_is_refused(endpoint: FakeEndpoint) -> None:
    with pytest.raises(RequestRefused, match="takes messages"):
        generate(endpoint, Request("t", 0, (1, 2), ask().sampling))
    assert not endpoint.chats


def test_ids_and_logprobs_are_the_servers_where_it_gives_them(endpoint: FakeEndpoint) -> None:
    endpoint.token_ids = True
    completion = generate(endpoint)
    said = endpoint.answer(endpoint.chats[0])["choices"][0]
    assert list(completion.ids) == said["token_ids"]
    assert list(completion.logprobs) == [entry["logprob"] for entry in said["logprobs"]["content"]]
    assert set(completion.versions) == {0} and completion.replica == "openai"


def test_without_ids_from_the_server_logprobs_are_not_numbers(endpoint: FakeEndpoint) -> None:
    completion = generate(endpoint)
    assert completion.ids == tuple(encode(completion.text)) and completion.ids
    assert all(math.isnan(logprob) for logprob in completion.logprobs)
    assert len(completion.logprobs) == len(completion.ids) == len(completion.versions)


def test_ids_written_into_the_tokens_are_understood(endpoint: FakeEndpoint) -> None:
    entries = [{"token": "token_id:72", "logprob": -0.5}, {"token": "token_id:105", "logprob": -0.25}]
    choice = {"message": {"content": "Hi"}, "finish_reason": "stop", "logprobs": {"content": entries}}
    endpoint.script.append(Reply(200, json.dumps({"choices": [choice]})))
    completion = generate(endpoint)
    assert completion.ids == (72, 105) and completion.logprobs == (-0.5, -0.25) and completion.text == "Hi"


@pytest.mark.parametrize(
    ("finish", "stop"),
    [
        ("stop", StopReason.STOP),
        ("length", StopReason.LENGTH),
        ("tool_calls", StopReason.STOP),
        ("abort", StopReason.ABORT),
    ],
)
def test_finish_reasons_become_stop_reasons(endpoint: FakeEndpoint, finish: str, stop: StopReason) -> None:
    endpoint.finish = finish
    assert generate(endpoint).stop is stop


def test_an_unknown_finish_reason_is_a_failure(endpoint: FakeEndpoint) -> None:
    endpoint.finish = "error"
    with pytest.raises(EngineFailure, match=r"v1/chat/completions: answered with finish_reason 'error'"):
        generate(endpoint)
    endpoint.finish = "content_filter"
    with pytest.raises(RequestRefused, match="content filter"):
        generate(endpoint)


def test_tools_are_offered_and_calls_the_server_parsed_come_back(endpoint: FakeEndpoint) -> None:
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{broken"}},
        {"id": "c3", "type": "function", "function": {"name": "add", "arguments": "[1]"}},
        {"type": "function", "function": {"name": "now", "arguments": ""}},
    ]
    endpoint.message, endpoint.finish = {"content": None, "tool_calls": calls}, "tool_calls"
    completion = generate(endpoint, replace(ask(max_tokens=1000), tools=(schema,)))
    assert endpoint.chats[0]["tools"] == [schema]
    assert completion.text == "" and completion.stop is StopReason.STOP
    assert completion.calls[0] == ToolCall("add", {"a": 1}, "c1")
    assert [call.problem is None for call in completion.calls] == [True, False, False, True]
    assert completion.calls[3] == ToolCall("now", {})
    assert len(completion.ids) > 100, "what the model wrote to make them counts"


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
def test_a_passing_error_is_tried_again(endpoint: FakeEndpoint, status: int) -> None:
    endpoint.script.append(Reply(status, "try later"))
    assert generate(endpoint).stop is StopReason.STOP
    assert len(endpoint.chats) == 2


@pytest.mark.parametrize("how", [DROP, HALF])
def test_a_dropped_connection_is_tried_again(endpoint: FakeEndpoint, how: str) -> None:
    endpoint.script.append(how)
    assert generate(endpoint).stop is StopReason.STOP
    assert len(endpoint.chats) == 2


def test_an_answer_that_is_not_json_is_tried_again(endpoint: FakeEndpoint) -> None:
    endpoint.script.append(Reply(200, "<html>\nnginx</html>"))
    assert generate(endpoint).stop is StopReason.STOP


def test_retries_are_bounded_and_back_off(endpoint: FakeEndpoint) -> None:
    endpoint.script.extend([Reply(500, '{"error": {"message": "out of memory\\nat line 3"}}')] * 9)
    with pytest.raises(EngineFailure) as caught:
        generate(endpoint, retries=2)
    address = f"{endpoint.base_url}/chat/completions"
    assert str(caught.value) == f"{address}: 500 Internal Server Error: out of memory (attempt 3)"
    assert len(endpoint.chats) == 3
    first, second = endpoint.times[1] - endpoint.times[0], endpoint.times[2] - endpoint.times[1]
    assert 0.2 < first < 0.9 and 0.45 < second < 1.5


def test_retry_after_is_honoured(endpoint: FakeEndpoint) -> None:
    endpoint.script.append(Reply(429, "slow down", {"retry-after": "1"}))
    endpoint.script.append(Reply(429, "slow down", {"retry-after-ms": "300"}))
    assert generate(endpoint, retries=0).stop is StopReason.STOP
    first, second = endpoint.times[1] - endpoint.times[0], endpoint.times[2] - endpoint.times[1]
    assert 1.0 <= first < 1.6 and 0.3 <= second < 0.9


def test_a_busy_server_is_waited_for_beyond_the_retries_but_not_beyond_the_deadline(endpoint: FakeEndpoint) -> None:
    endpoint.script.extend([Reply(429, "slow down", {"retry-after-ms": "20"})] * 4)
    assert generate(endpoint, retries=0).stop is StopReason.STOP
    endpoint.script.append(Reply(429, "slow down", {"retry-after": "3600"}))
    began = time.monotonic()
    with pytest.raises(EngineFailure, match="no answer within 20 s; before that: 429 Too Many Requests: slow down"):
        generate(endpoint)
    assert time.monotonic() - began < 2, "no use to wait for what comes too late"


def test_a_retry_after_that_cannot_be_read_is_ignored(endpoint: FakeEndpoint) -> None:
    endpoint.script.append(Reply(503, "", {"retry-after": "soon"}))
    endpoint.script.append(Reply(503, "", {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}))
    assert generate(endpoint).stop is StopReason.STOP


def test_a_slow_answer_meets_the_deadline_and_is_given_up_in_the_server(endpoint: FakeEndpoint) -> None:
    endpoint.delay_s = lambda body: 60.0
    began = time.monotonic()
    with pytest.raises(EngineFailure, match=r"chat/completions: no answer within 0\.5 s"):
        generate(endpoint, timeout_s=0.5)
    assert time.monotonic() - began < 3
    endpoint.wait_for_hang_ups(1)


@pytest.mark.parametrize(
    ("status", "fix"),
    [
        (307, "rollout.openai.base_url"),
        (400, "rollout.openai.extra_body"),
        (401, "set the environment variable MY_KEY"),
        (403, "MY_KEY"),
        (404, "rollout.openai.base_url"),
        (422, "rollout.openai.extra_body"),
    ],
)
def test_a_lasting_error_is_not_tried_again_and_says_what_to_do(endpoint: FakeEndpoint, status: int, fix: str) -> None:
    endpoint.script.append(Reply(status, '{"error": {"message": "you may not\\nreally"}}'))
    with pytest.raises(RequestRefused) as caught:
        generate(endpoint, api_key="sk-secret", api_key_env="MY_KEY")
    message = str(caught.value)
    assert message.startswith(f"{endpoint.base_url}/chat/completions: {status} ")
    assert ": you may not (" in message and fix in message and "sk-secret" not in message
    assert len(endpoint.chats) == 1


def test_a_password_in_the_address_is_not_shown(endpoint: FakeEndpoint) -> None:
    endpoint.script.append(Reply(404, "nothing here"))
    with pytest.raises(RequestRefused) as caught:
        generate(endpoint, base_url=endpoint.base_url.replace("//", "//me:hunter2@"))
    assert "hunter2" not in str(caught.value) and endpoint.base_url in str(caught.value)


def test_a_key_is_trimmed_and_one_that_cannot_be_sent_is_a_config_error(endpoint: FakeEndpoint) -> None:
    generate(endpoint, api_key=" sk-1\n")
    assert endpoint.headers[0]["authorization"] == "Bearer sk-1"
    for key in ("sk-ü", "sk\n1"):
        with pytest.raises(ConfigError, match=r"rollout\.openai\.api_key_env") as caught:
            generate(endpoint, api_key=key)
        assert key not in str(caught.value)


def test_a_spent_account_is_not_waited_for(endpoint: FakeEndpoint) -> None:
    endpoint.script.append(Reply(429, '{"error": {"message": "no credit", "code": "insufficient_quota"}}'))
    with pytest.raises(RequestRefused, match="no credit"):
        generate(endpoint)


@pytest.mark.parametrize("body", ["{}", "[]", '{"choices": []}', '{"choices": [{"message": null}]}', "null", "3"])
def test_json_that_is_no_completion_is_a_failure(endpoint: FakeEndpoint, body: str) -> None:
    endpoint.script.append(Reply(200, body))
    with pytest.raises(EngineFailure, match="no chat completion"):
        generate(endpoint)


def test_creation_fails_where_nothing_listens() -> None:
    with FakeEndpoint() as endpoint:
        address = endpoint.base_url
    with pytest.raises(EngineFailure, match=f"{address}/models: ConnectError"):
        asyncio.run(OpenAIEngine.create(OpenAIConfig(base_url=address), RolloutConfig(), encode=encode))


def test_creation_fails_with_a_wrong_key(endpoint: FakeEndpoint) -> None:
    endpoint.models = Reply(401, "who are you?")
    with pytest.raises(RequestRefused, match=r"models: 401 Unauthorized: who are you\? \(set the environment variable"):
        generate(endpoint)


def test_a_server_without_a_list_of_models_needs_the_name(endpoint: FakeEndpoint) -> None:
    endpoint.models = Reply(404, "no such address")
    assert generate(endpoint, model="mine").stop is StopReason.STOP
    with pytest.raises(EngineFailure, match=r"names no model: .*rollout\.openai\.model"):
        generate(endpoint)


def test_models_that_are_no_list_are_a_failure(endpoint: FakeEndpoint) -> None:
    endpoint.models = Reply(200, '{"hello": "world"}')
    with pytest.raises(EngineFailure, match="no list of models"):
        generate(endpoint)


@pytest.mark.parametrize("address", [None, "localhost:8000/v1"])
def test_an_address_that_is_none_is_a_config_error(address: str | None) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.openai\.base_url"):
        asyncio.run(OpenAIEngine.create(OpenAIConfig(base_url=address), RolloutConfig(), encode=encode))


def test_health_says_what_is_wrong(endpoint: FakeEndpoint) -> None:
    async def body(engine: OpenAIEngine) -> None:
        await engine.health()
        endpoint.models = Reply(503, "loading")
        with pytest.raises(EngineFailure, match="503 Service Unavailable: loading"):
            await engine.health()

    use(endpoint, body)


def test_cancelled_requests_are_given_up_in_the_server_and_their_connections_are_free_again(
    endpoint: FakeEndpoint,
) -> None:
    async def body(engine: OpenAIEngine) -> None:
        endpoint.delay_s = lambda body: 60.0
        tasks = [asyncio.ensure_future(engine.generate(ask(uid=f"t{at}"))) for at in range(30)]
        await asyncio.to_thread(endpoint.wait_for_chats, 30)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        endpoint.delay_s = lambda body: 0.0
        answers = await asyncio.gather(*(engine.generate(ask(uid=f"u{at}")) for at in range(30)))
        assert all(answer.stop is StopReason.STOP for answer in answers)
        endpoint.wait_for_hang_ups(30)

    use(endpoint, body)


def test_many_requests_share_a_bounded_number_of_connections(endpoint: FakeEndpoint) -> None:
    rollout = RolloutConfig(max_num_seqs=4)
    endpoint.delay_s = lambda body: 0.02

    async def main() -> None:
        engine = await OpenAIEngine.create(OpenAIConfig(base_url=endpoint.base_url), rollout, encode=encode)
        answers = await asyncio.gather(*(engine.generate(ask(uid=f"t{at}")) for at in range(40)))
        await engine.close()
        assert len({answer.text for answer in answers}) == 40

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began > 40 / 4 * 0.02


def test_httpx_is_imported_only_when_an_endpoint_is_used() -> None:
    program = "import sys, treadle.engine.openai_client, treadle.engine.router; sys.exit('httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
