"""Stateful tools: one instance a session, always released."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from treadle.config.rollout import MultiTurnConfig
from treadle.errors import MisuseError, ToolFailure
from treadle.rollout.tools import Toolbox, tool
from treadle.rollout.tools import function as stateful_module
from treadle.rollout.tools import invoke as attempts_module
from treadle.rollout.tools.function import tools_of_class, unique_by_name
from treadle.types import Task, ToolCall, ToolStatus

events: list[str] = []


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    events.clear()
    monkeypatch.setattr(attempts_module, "FIRST_DELAY_S", 0.0001)


class Counter:
    """Counts."""

    def __init__(self, start: int = 0) -> None:
        self.value = start
        events.append(f"built {start}")

    async def open(self) -> None:
        await asyncio.sleep(0)
        events.append("opened")

    @tool
    async def more(self, by: int = 1) -> int:
        """Count up.

        Args:
            by: step
        """
        self.value += by
        return self.value

    @tool(name="read_count")
    def read(self) -> int:
        """Read it."""
        return self.value

    def helper(self) -> None: ...

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        events.append(f"closed {self.value}")


def toolbox(*classes: type, **config: Any) -> Toolbox:
    tools = [made for cls in classes for made in tools_of_class(cls, f"here:{cls.__name__}")]
    return Toolbox(MultiTurnConfig(**config), unique_by_name(tools), ())


def task(**tool_kwargs: Mapping[str, Any]) -> Task:
    return Task("t1", (), tool_kwargs=tool_kwargs)


def test_marked_methods_are_the_tools_in_the_order_they_are_written() -> None:
    specs = [made.spec for made in tools_of_class(Counter, "here:Counter")]
    assert [spec.name for spec in specs] == ["more", "read_count"]
    assert specs[0].parameters["properties"] == {"by": {"type": "integer", "description": "step", "default": 1}}


def test_a_class_with_a_call_method_is_one_tool() -> None:
    class WebSearch:
        """Search the web."""

        async def __call__(self, query: str) -> str:
            return query

    (made,) = tools_of_class(WebSearch, "here:WebSearch")
    assert (made.spec.name, made.spec.description) == ("web_search", "Search the web.")


def test_a_class_without_tools_is_an_error() -> None:
    with pytest.raises(ValueError, match="class Task has no method marked"):
        tools_of_class(Task, "here:Task")


def test_an_instance_lives_as_long_as_its_session() -> None:
    async def main() -> None:
        async with toolbox(Counter) as box:
            async with box.open(task(Counter={"start": 5})) as one, box.open(task()) as two:
                assert not events
                await one.call_many([ToolCall("more", {}), ToolCall("more", {"by": 2})], 2)
                assert (await one.call(ToolCall("read_count", {}))).text == "8"
                assert (await two.call(ToolCall("more", {}))).text == "1"
                assert events == ["built 5", "opened", "built 0", "opened"]
            assert events[4:] == ["closed 1", "closed 8"]

    asyncio.run(main())


def test_a_session_that_calls_nothing_builds_nothing() -> None:
    async def main() -> None:
        async with toolbox(Counter) as box, box.open(task()):
            pass

    asyncio.run(main())
    assert not events


def test_close_is_called_under_cancellation_and_seen_through() -> None:
    async def session(box: Toolbox, started: asyncio.Event) -> None:
        async with box.open(task()) as tools:
            await tools.call(ToolCall("more", {}))
            started.set()
            await asyncio.Event().wait()

    async def main() -> None:
        async with toolbox(Counter) as box:
            started = asyncio.Event()
            running = asyncio.create_task(session(box, started))
            await started.wait()
            running.cancel()
            await asyncio.sleep(0.002)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert events[-1] == "closed 1"

    asyncio.run(main())


def test_a_cancellation_that_comes_while_closing_is_delivered_after_it() -> None:
    async def session(box: Toolbox, closing: asyncio.Event) -> None:
        async with box.open(task()) as tools:
            await tools.call(ToolCall("more", {}))
            closing.set()

    async def main() -> None:
        async with toolbox(Counter) as box:
            closing = asyncio.Event()
            running = asyncio.create_task(session(box, closing))
            await closing.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert events[-1] == "closed 1"

    asyncio.run(main())


def test_a_close_that_breaks_or_hangs_is_logged_and_the_others_still_close(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks:
        async def __call__(self) -> str:
            return ""

        def close(self) -> None:
            raise RuntimeError("cannot close")

    class Hangs:
        async def __call__(self) -> str:
            return ""

        async def close(self) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        async with toolbox(Breaks, Hangs, Counter) as box, box.open(task()) as tools:
            for name in ("breaks", "hangs", "more"):
                assert (await tools.call(ToolCall(name, {}))).status is ToolStatus.OK

    monkeypatch.setattr(stateful_module, "CLOSE_S", 0.05)
    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert {"Breaks.close() failed", "Hangs.close() failed"} <= {record.getMessage() for record in caplog.records}
    assert "closed 1" in events


def test_a_class_that_cannot_be_set_up_is_a_fault_and_is_closed_each_time() -> None:
    class Sandbox:
        def open(self) -> None:
            events.append("open")
            raise RuntimeError("no sandbox left")

        async def __call__(self) -> str:
            return ""

        def close(self) -> None:
            events.append("close")

    async def main() -> None:
        async with toolbox(Sandbox, tool_retries=1) as box, box.open(task()) as tools:
            with pytest.raises(ToolFailure, match=r"Sandbox could not be set up: RuntimeError: no sandbox left"):
                await tools.call(ToolCall("sandbox", {}))

    asyncio.run(main())
    assert events == ["open", "close", "open", "close"]


def test_an_open_that_hangs_is_a_fault_and_not_a_slow_tool() -> None:
    class Slow:
        async def open(self) -> None:
            await asyncio.Event().wait()

        async def __call__(self) -> str:
            return ""

    async def main() -> None:
        async with toolbox(Slow, tool_retries=0, tool_timeout_s=0.02) as box, box.open(task()) as tools:
            with pytest.raises(ToolFailure, match=r"Slow\.open\(\) took longer than 0\.02 s"):
                await tools.call(ToolCall("slow", {}))

    asyncio.run(main())


def test_wrong_constructor_arguments_in_a_task_are_named() -> None:
    async def main() -> None:
        async with toolbox(Counter, tool_retries=0) as box, box.open(task(Counter={"begin": 1})) as tools:
            with pytest.raises(ToolFailure, match=r"Counter could not be set up: TypeError.*begin"):
                await tools.call(ToolCall("more", {}))

    asyncio.run(main())


def test_tools_cannot_be_called_after_their_session() -> None:
    async def main() -> None:
        async with toolbox(Counter) as box:
            async with box.open(task()) as tools:
                await tools.call(ToolCall("more", {}))
            with pytest.raises(MisuseError, match="after it has ended"):
                await tools.call(ToolCall("more", {}))

    asyncio.run(main())
