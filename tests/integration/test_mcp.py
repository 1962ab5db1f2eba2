"""Tools of real MCP servers: processes over standard input and output, and over HTTP on the loopback interface."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.config.rollout import MCPServerConfig, MultiTurnConfig
from treadle.errors import ConfigError, DeadlineError, RunError, ToolFailure
from treadle.rollout.tools import SessionTools, Toolbox
from treadle.types import Task, ToolCall, ToolResult, ToolStatus

pytest.importorskip("mcp")

SERVER = str(Path(__file__).parent / "mcp_server.py")
TASK = Task("t1", ())


def stdio(kind: str = "stdio", **more: Any) -> MCPServerConfig:
    return MCPServerConfig(command=(sys.executable, SERVER, kind), **more)


def config(server: MCPServerConfig, **more: Any) -> MultiTurnConfig:
    return MultiTurnConfig(mcp_servers={"tiny": server}, **more)


def use(multi_turn: MultiTurnConfig, work: Callable[[SessionTools], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(60):
            async with await Toolbox.create(multi_turn) as toolbox, toolbox.open(TASK) as tools:
                return await work(tools)

    return asyncio.run(main())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def http_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            break
        except OSError:
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp", process
    process.kill()
    process.wait(10)


async def normal_calls(tools: SessionTools) -> None:
    results = await tools.call_many([ToolCall("add", {"a": n, "b": 1}) for n in range(8)], max_parallel=4)
    assert [result.text for result in results] == [str(n + 1) for n in range(8)]
    assert results[0].extra == {"structured_content": {"result": 1}}
    refused = await tools.call(ToolCall("refuse", {"reason": "no such thing"}))
    assert (refused.status, refused.text) == (ToolStatus.ERROR, "Error executing tool refuse: no such thing")
    invalid = await tools.call(ToolCall("add", {"a": "x", "b": 1}))
    assert invalid.status is ToolStatus.INVALID
    assert invalid.text.startswith("add: a: must be a whole number")
    late = await tools.call(ToolCall("wait", {"seconds": 30}))
    assert late.status is ToolStatus.TIMEOUT
    assert (await tools.call(ToolCall("add", {"a": 1, "b": 1}))).text == "2"


def test_a_stdio_server_answers_refuses_and_is_stopped_at_the_end() -> None:
    async def work(tools: SessionTools) -> int:
        await normal_calls(tools)
        return int((await tools.call(ToolCall("pid", {}))).text)

    assert not is_alive(use(config(stdio(), tool_timeout_s=1.0), work))


def test_an_http_server_answers_and_refuses(http_server: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = http_server
    use(config(MCPServerConfig(url=url), tool_timeout_s=1.0), normal_calls)
    assert process.poll() is None


def test_the_schemas_of_a_server_are_offered_and_may_be_narrowed() -> None:
    async def main() -> None:
        async with await Toolbox.create(config(stdio(tools=("add",)))) as toolbox:
            (schema,) = toolbox.schemas()
            assert schema["function"]["name"] == "add"
            assert schema["function"]["description"] == "Add two numbers."
            assert schema["function"]["parameters"]["required"] == ["a", "b"]

    asyncio.run(main())
    with pytest.raises(ConfigError, match=r"mcp_servers\.tiny\.tools: the server has no tool 'ad'(.|\n)*'add'"):
        asyncio.run(Toolbox.create(config(stdio(tools=("ad",)))))


def test_an_error_of_the_protocol_is_a_fault_unless_it_refuses_the_arguments() -> None:
    async def work(tools: SessionTools) -> None:
        first = await tools.call(ToolCall("pid", {}))
        refused = await tools.call(ToolCall("protest", {"code": -32602}))
        assert (refused.status, refused.text) == (ToolStatus.INVALID, "protest: protest")
        with pytest.raises(ToolFailure, match=r"protest failed after 1 attempt:(.|\n)*MCPError: protest"):
            await tools.call(ToolCall("protest", {"code": -32603}))
        assert (await tools.call(ToolCall("pid", {}))).text == first.text

    use(config(stdio(), tool_retries=0), work)


def test_a_server_killed_in_every_call_fails_the_trajectory_and_serves_the_next_one() -> None:
    async def work(tools: SessionTools) -> None:
        first = await tools.call(ToolCall("pid", {}))
        with pytest.raises(ToolFailure, match=r"die failed after 2 attempts(.|\n)*'tiny'(.|\n)*last words"):
            await tools.call(ToolCall("die", {}))
        second = await tools.call(ToolCall("pid", {}))
        assert second.status is ToolStatus.OK
        assert first.text != second.text

    use(config(stdio(), tool_retries=1), work)


def test_a_server_killed_once_is_started_again_and_the_call_made_again() -> None:
    async def work(tools: SessionTools) -> ToolResult:
        pid = int((await tools.call(ToolCall("pid", {}))).text)
        waiting = asyncio.create_task(tools.call(ToolCall("wait", {"seconds": 0.3})))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        return await waiting

    result = use(config(stdio(), tool_retries=1), work)
    assert (result.text, result.status) == ("done", ToolStatus.OK)


def test_an_http_server_that_died_fails_the_trajectory(http_server: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, _ = http_server

    async def work(tools: SessionTools) -> None:
        with pytest.raises(ToolFailure, match=r"die failed after 2 attempts(.|\n)*MCP server 'tiny'"):
            await tools.call(ToolCall("die", {}))
        with pytest.raises(ToolFailure, match="add failed after 2 attempts"):
            await tools.call(ToolCall("add", {"a": 1, "b": 1}))

    use(config(MCPServerConfig(url=url), tool_retries=1), work)


def test_a_server_that_never_answers_is_given_up_at_its_deadline() -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"'tiny' (.|\n)*within 1 s \(.*startup_timeout_s\)(.|\n)*starting, slowly"):
        asyncio.run(Toolbox.create(config(stdio("mute", startup_timeout_s=1.0))))
    assert time.monotonic() - started < 15


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(RunError, match=r"'tiny' (.|\n)*could not start(.|\n)*no database"):
        asyncio.run(Toolbox.create(config(stdio("broken"))))
    with pytest.raises(RunError, match=r"could not start: FileNotFoundError"):
        asyncio.run(Toolbox.create(config(MCPServerConfig(command=("/no/such/program",)))))
    with pytest.raises(RunError, match="could not start"):
        asyncio.run(Toolbox.create(config(MCPServerConfig(url="http://127.0.0.1:9/mcp"))))


def test_when_one_server_cannot_start_the_others_are_stopped() -> None:
    async def main() -> None:
        servers = {"tiny": stdio(), "broken": stdio("broken")}
        with pytest.raises(RunError, match="'broken'"):
            await Toolbox.create(MultiTurnConfig(mcp_servers=servers))
        others = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        assert not others

    asyncio.run(main())


def test_names_shared_by_two_servers_are_refused_with_both_origins() -> None:
    servers = {"one": stdio(tools=("add",)), "two": stdio(tools=("add",))}
    with pytest.raises(ConfigError, match=r"'add': one from MCP server 'one', one from MCP server 'two'"):
        asyncio.run(Toolbox.create(MultiTurnConfig(mcp_servers=servers)))


def test_cancelling_the_start_leaves_nothing_behind() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await Toolbox.create(config(stdio("mute")))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
