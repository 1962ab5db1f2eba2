"""MCP servers of scope session: a real stateful server for each session, closed with it, on cancel and on kill."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_mcp import is_alive
from treadle.config.rollout import MCPServerConfig, MultiTurnConfig
from treadle.errors import ToolFailure
from treadle.rollout.tools import SessionTools, Toolbox
from treadle.types import Task, ToolCall, ToolStatus

pytest.importorskip("mcp")

SERVER = str(Path(__file__).parent / "mcp_server.py")
KILLED = """
import asyncio, sys
from pathlib import Path
from tests.integration.test_mcp_sessions import multi_turn, say
from treadle.rollout.tools import Toolbox
from treadle.types import Task

async def main():
    async with await Toolbox.create(multi_turn()) as toolbox, toolbox.open(Task("a", ())) as tools:
        Path(sys.argv[1]).write_text(await say(tools, "pid"))
        await asyncio.sleep(600)

asyncio.run(main())
"""


def multi_turn(**more: Any) -> MultiTurnConfig:
    server = MCPServerConfig(command=(sys.executable, SERVER, "stdio"), **{"scope": "session", "warm": 1, **more})
    return MultiTurnConfig(mcp_servers={"tiny": server}, tool_timeout_s=60.0, tool_retries=1)


async def say(tools: SessionTools, name: str, **arguments: Any) -> str:
    result = await tools.call(ToolCall(name, arguments))
    assert result.status is ToolStatus.OK, result.text
    return result.text


def use(work: Any, **more: Any) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(120):
            async with await Toolbox.create(multi_turn(**more)) as toolbox:
                return await work(toolbox)

    return asyncio.run(main())


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sessions_keep_their_own_state_and_share_none():
    async def work(toolbox: Toolbox) -> None:
        async with toolbox.open(Task("a", ())) as a, toolbox.open(Task("b", ())) as b:
            assert await say(a, "note", text="one") == "one"
            assert await say(b, "note", text="two") == "two"
            assert await say(a, "note", text="three") == "one three"
            assert await say(a, "pid") != await say(b, "pid")
        async with toolbox.open(Task("c", ())) as c:
            assert await say(c, "note", text="four") == "four"

    use(work)


def test_a_server_of_scope_run_is_shared():
    async def work(toolbox: Toolbox) -> None:
        async with toolbox.open(Task("a", ())) as a, toolbox.open(Task("b", ())) as b:
            await say(a, "note", text="one")
            assert await say(b, "note", text="two") == "one two"

    use(work, scope="run")


def test_calls_of_one_turn_that_begin_together_share_the_server():
    async def work(toolbox: Toolbox) -> None:
        async with toolbox.open(Task("a", ())) as tools:
            results = await tools.call_many([ToolCall("pid", {}) for _ in range(4)], max_parallel=4)
            assert len({result.text for result in results}) == 1

    use(work)


def test_a_server_ends_with_its_session_and_by_cancellation():
    async def work(toolbox: Toolbox) -> None:
        pids = []

        async def session(hold: asyncio.Event) -> None:
            async with toolbox.open(Task("a", ())) as tools:
                pids.append(int(await say(tools, "pid")))
                hold.set()
                await say(tools, "wait", seconds=50 if len(pids) == 2 else 0)

        await session(asyncio.Event())
        assert not is_alive(pids[0])
        holding = asyncio.Event()
        running = asyncio.ensure_future(session(holding))
        await holding.wait()
        assert is_alive(pids[1])
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled() and not is_alive(pids[1])

    use(work)


def test_servers_are_started_ahead_and_all_end_with_the_toolbox():
    async def work(toolbox: Toolbox) -> list[int]:
        (pool,) = toolbox._servers
        pids = []
        for uid in ("a", "b"):
            async with toolbox.open(Task(uid, ())) as tools:
                ready = list(pool._ready)
                pids.append(int(await say(tools, "pid")))
                assert ready and ready[0] not in pool._ready, "the session took one that was there"
            await asyncio.gather(*pool._starts)
            assert len(pool._ready) == 2
        return pids

    for pid in use(work, warm=2):
        assert not is_alive(pid)


def test_a_session_whose_server_died_fails_and_does_not_go_on_without_its_state():
    async def work(toolbox: Toolbox) -> None:
        async with toolbox.open(Task("a", ())) as tools:
            await say(tools, "note", text="one")
            with pytest.raises(ToolFailure):
                await tools.call(ToolCall("die", {}))
            with pytest.raises(ToolFailure, match="of this session has ended, and its state"):
                await tools.call(ToolCall("note", {"text": "two"}))
        async with toolbox.open(Task("b", ())) as tools:
            assert await say(tools, "note", text="three") == "three"

    use(work)


def test_servers_of_a_killed_run_are_gone(tmp_path):
    pid_file = tmp_path / "pid"
    run = subprocess.Popen([sys.executable, "-c", KILLED, str(pid_file)], env={**os.environ, "PYTHONPATH": os.getcwd()})
    deadline = time.monotonic() + 120
    try:
        while not pid_file.exists() or not pid_file.read_text():
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        run.kill()
        run.wait()
    wait_until_gone(int(pid_file.read_text()))
