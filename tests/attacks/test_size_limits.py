"""Small inputs that would take all memory are refused, by name."""

import asyncio
import gzip
import tracemalloc

import pytest

from tests.configs import rollout_config
from tests.fake_endpoint import FakeEndpoint, Reply
from tests.letters import ask, encode
from treadle.config.rollout import FailureConfig, OpenAIConfig, RolloutConfig
from treadle.engine import http_client as endpoint_module
from treadle.engine.openai_client import OpenAIEngine
from treadle.errors import ConfigError, EngineFailure
from treadle.rollout.tools import mcp_tools


def test_an_mcp_result_that_is_too_large_is_named_and_not_kept(monkeypatch):
    types = pytest.importorskip("mcp.types")
    monkeypatch.setattr(mcp_tools, "MAX_RESULT_CHARS", 1000)
    small = types.CallToolResult(content=[types.TextContent(type="text", text="x" * 1000)])
    assert mcp_tools._result(small).text == "x" * 1000
    large = types.CallToolResult(content=[types.TextContent(type="text", text="x" * 1001)])
    hidden = types.CallToolResult(content=[], structured_content={"a": "x" * 1001})
    for answer in (large, hidden):
        result = mcp_tools._result(answer)
        assert len(result.text) < 100 and "characters; at most 1,000 are read" in result.text
        assert result.status == "error" and not result.extra


LEVELS = 40
LIMIT = 1 << 20
"""For answers, in these tests; the true one is 32 times that."""


@pytest.fixture
def limit(monkeypatch):
    monkeypatch.setattr(endpoint_module, "MAX_ANSWER_BYTES", LIMIT)


def texts(level: int) -> str:
    """Text that holds the level before it twice."""
    return f"${{rollout.openai.extra_body.k{level - 1}}}" * 2 if level else "x" * 10


def lists(level: int) -> str:
    return (
        f"['${{rollout.openai.extra_body.k{level - 1}}}', '${{rollout.openai.extra_body.k{level - 1}}}']"
        if level
        else "[1]"
    )


@pytest.mark.parametrize("write", [texts, lists])
def test_references_that_double_each_other_are_one_mistake_and_little_memory(write):
    words = [f"rollout.openai.extra_body.k{level}={write(level)}" for level in range(LEVELS)]
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as caught:
            rollout_config(*words)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (mistake,) = [item for item in caught.value.mistakes if "1,000,000 characters" in item.problem]
    assert mistake.key.startswith("rollout.openai.extra_body.k")
    assert most < 200e6


def test_many_references_to_one_value_are_fine():
    words = [f"rollout.openai.extra_body.k{number}=${{model.path}}" for number in range(1000)]
    config = rollout_config(*words)
    assert config.rollout.openai.extra_body["k999"] == "somewhere"


def answer_to(endpoint: FakeEndpoint) -> None:
    rollout = RolloutConfig(failures=FailureConfig(request_retries=2))

    async def main() -> None:
        engine = await OpenAIEngine.create(OpenAIConfig(base_url=endpoint.base_url), rollout, encode=encode)
        try:
            await engine.generate(ask())
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_without_end_is_a_failure_that_names_the_endpoint(status, limit):
    with FakeEndpoint() as endpoint:
        endpoint.script.append(Reply(status, "x" * (LIMIT + 1)))
        with pytest.raises(EngineFailure, match=r"/v1/chat/completions: \d+ with more than 1 MiB"):
            answer_to(endpoint)
        assert len(endpoint.chats) == 1, "what has no end is not asked for again"


def test_a_compressed_answer_counts_as_what_it_unpacks_to(limit):
    body = gzip.compress(b" " * (LIMIT + 1)).decode("latin-1")
    with FakeEndpoint() as endpoint:
        endpoint.encoding = "latin-1"
        endpoint.script.append(Reply(200, body, {"content-encoding": "gzip"}))
        with pytest.raises(EngineFailure, match="more than 1 MiB"):
            answer_to(endpoint)


def test_an_answer_nested_without_end_is_no_crash():
    with FakeEndpoint() as endpoint:
        endpoint.script += [Reply(200, "[" * 100_000)] * 3
        with pytest.raises(EngineFailure, match="not JSON"):
            answer_to(endpoint)
