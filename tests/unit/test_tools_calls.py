"""One call of one tool: what the model reads, what fails the trajectory, and the limits in between."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import httpx
import pytest

from treadle.aio import Expired
from treadle.config.rollout import MultiTurnConfig
from treadle.errors import EngineFailure, ToolFailure
from treadle.rollout.tools import FunctionTool, SessionTools, Toolbox, tool
from treadle.rollout.tools import invoke as attempts_module
from treadle.rollout.tools.function import unique_by_name
from treadle.rollout.tools.thread_pool import DaemonThreadPool
from treadle.rollout.tools.validators import compile_validator
from treadle.types import Task, ToolCall, ToolResult, ToolStatus

TASK = Task("t1", ())
Use = Callable[[SessionTools], Awaitable[Any]]


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts_module, "FIRST_DELAY_S", 0.0001)


def use(functions: list[Callable[..., Any]], work: Use, task: Task = TASK, **config: Any) -> Any:
    async def main() -> Any:
        tools = unique_by_name([FunctionTool.of(function) for function in functions])
        async with Toolbox(MultiTurnConfig(**config), tools, ()) as toolbox, toolbox.open(task) as session_tools:
            return await work(session_tools)

    return asyncio.run(main())


def call(function: Callable[..., Any], arguments: dict[str, Any] | None = None, **config: Any) -> ToolResult:
    name = FunctionTool.of(function).spec.name
    result = use([function], lambda tools: tools.call(ToolCall(name, arguments or {})), **config)
    assert isinstance(result, ToolResult)
    return result


async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def test_async_inline_and_threaded_functions_answer() -> None:
    @tool(inline=True)
    def inline(a: int) -> str:
        return threading.current_thread().name

    def threaded(a: int) -> str:
        return threading.current_thread().name

    result = call(add, {"a": 1, "b": 2})
    assert (result.text, result.status) == ("3", ToolStatus.OK)
    assert result.seconds > 0
    assert call(inline, {"a": 1}).text == threading.current_thread().name
    assert call(threaded, {"a": 1}).text == "treadle-tool"


@pytest.mark.parametrize(
    ("value", "text"),
    [("é", "é"), (1.5, "1.5"), ({"a": ["é"]}, '{"a": ["é"]}'), (None, "null"), (True, "true"), ("\udcff", "?")],
)
def test_what_a_tool_returns_becomes_text(value: object, text: str) -> None:
    async def f() -> object:
        return value

    assert call(f).text == text


def test_a_tool_result_keeps_reward_status_and_extra() -> None:
    async def f() -> ToolResult:
        return ToolResult("no", ToolStatus.ERROR, reward=-0.5, extra={"seen": 1})

    result = call(f)
    assert (result.text, result.status, result.reward, result.extra) == ("no", ToolStatus.ERROR, -0.5, {"seen": 1})


def test_a_return_value_without_a_text_form_is_a_failure() -> None:
    async def f() -> object:
        return object()

    with pytest.raises(ToolFailure, match="f returned a object"):
        call(f)


def test_json_arguments_become_the_annotated_types() -> None:
    class Unit(Enum):
        C = "celsius"

    @dataclass
    class Place:
        city: str
        unit: Unit = Unit.C

    seen: list[Any] = []

    async def f(place: Place, units: list[Unit], ratio: float, pair: tuple[int, ...], other: Unit | int) -> str:
        seen.extend([place, units, ratio, pair, other])
        return ""

    arguments = {
        "place": {"city": "Oslo", "unit": "celsius"},
        "units": ["celsius"],
        "ratio": 2,
        "pair": [1, 2],
        "other": "celsius",
    }
    f.__annotations__ |= {"place": Place, "units": list[Unit], "other": Unit | int}
    assert call(f, arguments).status is ToolStatus.OK
    assert seen == [Place("Oslo", Unit.C), [Unit.C], 2.0, (1, 2), Unit.C]
    assert type(seen[2]) is float


def test_unknown_tools_and_wrong_arguments_are_invalid() -> None:
    async def work(tools: SessionTools) -> list[ToolResult]:
        calls = [
            ToolCall("ad", {}),
            ToolCall("add", {"a": 1}),
            ToolCall("add", {"a": 1, "b": 2, "c": 3}),
            ToolCall("add", {"a": "1", "b": 2}),
            ToolCall("", {}, problem="not JSON"),
        ]
        return [await tools.call(item) for item in calls]

    results = use([add], work)
    assert {result.status for result in results} == {ToolStatus.INVALID}
    assert [result.text for result in results] == [
        "there is no tool 'ad'. Known tools: add.",
        "add: missing: b. It takes: a, b.",
        "add: there is no 'c'; known: a, b. It takes: a, b.",
        "add: a: must be a whole number, got '1'. It takes: a, b.",
        "not JSON. Known tools: add.",
    ]


def test_arguments_nested_beyond_the_stack_are_invalid() -> None:
    async def f(a: Any) -> str:
        return ""

    items = {"type": "array", "items": {"$ref": "#/$defs/items"}}
    schema = {"type": "object", "properties": {"a": items}, "$defs": {"items": items}}
    plain = FunctionTool.of(f)
    nesting = replace(plain, spec=replace(plain.spec, validate=compile_validator(schema)))
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]

    async def main() -> ToolResult:
        async with Toolbox(MultiTurnConfig(), {"f": nesting}, ()) as toolbox, toolbox.open(TASK) as tools:
            return await tools.call(ToolCall("f", {"a": nested}))

    result = asyncio.run(main())
    assert result.status is ToolStatus.INVALID
    assert "nested too deeply" in result.text


@pytest.mark.parametrize(
    "error",
    [ValueError("no such city"), KeyError("x"), FileNotFoundError("a.txt"), PermissionError("b")],
)
def test_an_error_of_the_tools_own_logic_is_read_by_the_model(error: BaseException) -> None:
    async def awaited() -> str:
        raise error

    def threaded() -> str:
        raise error

    for function in (awaited, threaded):
        result = call(function)
        assert result.status is ToolStatus.ERROR
        assert result.text == f"{type(error).__name__}: {error}"


def test_a_thread_that_raises_stop_iteration_is_an_error_like_any_other() -> None:
    def f() -> int:
        return next(iter([]))

    assert call(f).status is ToolStatus.ERROR


class Custom(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("gone"),
        OSError(28, "disk full"),
        TimeoutError("upstream"),
        ToolFailure("sandbox lost"),
        httpx.ConnectError("refused"),
        MemoryError(),
        Custom("named by the author"),
        asyncio.CancelledError(),
    ],
)
def test_infrastructure_faults_are_retried_then_fail_the_trajectory(error: BaseException) -> None:
    tries: list[int] = []

    @tool(infrastructure=(Custom,))
    async def f() -> str:
        tries.append(1)
        raise error

    with pytest.raises(ToolFailure, match=r"^f failed after 3 attempts: ") as caught:
        call(f, tool_retries=2)
    assert len(tries) == 3
    assert caught.value.__cause__ is error


def test_a_fault_that_passes_is_not_noticed() -> None:
    tries: list[int] = []

    def f() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("flaky")
        return "fine"

    result = call(f, tool_retries=2)
    assert (result.text, result.status) == ("fine", ToolStatus.OK)


def test_a_failure_of_another_boundary_passes_through() -> None:
    tries: list[int] = []

    async def f() -> str:
        tries.append(1)
        raise EngineFailure("judge is down")

    with pytest.raises(EngineFailure, match="judge is down"):
        call(f)
    assert len(tries) == 1


def test_a_stuck_tool_is_a_typed_result() -> None:
    async def awaited() -> str:
        await asyncio.Event().wait()
        return ""

    released = threading.Event()

    def threaded() -> str:
        released.wait(10)
        return ""

    try:
        for function in (awaited, threaded):
            started = time.perf_counter()
            result = call(function, tool_timeout_s=0.05)
            assert result.status is ToolStatus.TIMEOUT
            assert result.text == f"{function.__name__} gave no answer within 0.05 s"
            assert time.perf_counter() - started < 10, "it waited for the tool"
    finally:
        released.set()


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("left", "[7 characters cut]\nhij"),
        ("right", "abc\n[7 characters cut]"),
        ("middle", "ab\n[7 characters cut]\nj"),
    ],
)
def test_a_long_answer_is_cut_and_says_so(side: str, text: str) -> None:
    async def f() -> str:
        return "abcdefghij"

    result = call(f, max_tool_response_length=3, tool_response_truncate_side=side)
    assert (result.text, result.truncated) == (text, True)
    whole = call(f, max_tool_response_length=10)
    assert (whole.text, whole.truncated) == ("abcdefghij", False)


def test_calls_of_a_turn_run_side_by_side_and_keep_their_order() -> None:
    running = 0
    most = 0

    async def f(a: int) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01 * (6 - a))
        running -= 1
        return str(a)

    calls = [ToolCall("f", {"a": a}) for a in range(6)]
    results = use([f], lambda tools: tools.call_many(calls, max_parallel=3))
    assert [result.text for result in results] == list("012345")
    assert most == 3
    assert use([f], lambda tools: tools.call_many([], max_parallel=3)) == ()


def test_a_failed_call_cancels_its_siblings_and_is_raised_itself() -> None:
    cancelled: list[str] = []

    async def broken() -> str:
        raise ToolFailure("down")

    async def slow() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("slow")
            raise
        return ""

    calls = [ToolCall("slow", {}), ToolCall("broken", {})]
    with pytest.raises(ToolFailure, match="down"):
        use([broken, slow], lambda tools: tools.call_many(calls, 2), tool_retries=0)
    assert cancelled == ["slow"]


where: ContextVar[str] = ContextVar("where", default="nowhere")


def test_context_variables_arrive_also_in_threads() -> None:
    async def awaited() -> str:
        return where.get()

    def threaded() -> str:
        return where.get()

    async def work(tools: SessionTools) -> tuple[ToolResult, ...]:
        where.set("here")
        return await tools.call_many([ToolCall("awaited", {}), ToolCall("threaded", {})], 2)

    assert [result.text for result in use([awaited, threaded], work)] == ["here", "here"]


def test_a_busy_threaded_tool_does_not_stall_the_loop() -> None:
    def busy() -> str:
        time.sleep(0.2)
        return ""

    async def work(tools: SessionTools) -> int:
        turns = 0
        running = asyncio.ensure_future(tools.call(ToolCall("busy", {})))
        while not running.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    assert use([busy], work) > 2, "a loop that stalls turns once before the tool runs, and once after"


def test_cancelling_a_call_cancels_the_tool() -> None:
    ended: list[str] = []

    async def slow() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("slow")
        return ""

    async def work(tools: SessionTools) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await tools.call(ToolCall("slow", {}))

    use([slow], work)
    assert ended == ["slow"]


def test_waiting_for_a_thread_is_not_a_slow_tool() -> None:
    async def main() -> None:
        threads = DaemonThreadPool(max_threads=1)
        first = asyncio.ensure_future(threads.run(lambda: time.sleep(0.1), 5))
        await asyncio.sleep(0)
        assert await threads.run(lambda: "ran", 5) == "ran"
        await first
        blocked = asyncio.ensure_future(threads.run(lambda: time.sleep(0.2), 5))
        await asyncio.sleep(0)
        with pytest.raises(ToolFailure, match="no thread became free"):
            await threads.run(lambda: "never", 0.02)
        await blocked
        threads.close()

    asyncio.run(main())


def test_stuck_threads_are_replaced_up_to_a_limit_and_come_back() -> None:
    release = threading.Event()

    async def main() -> None:
        threads = DaemonThreadPool(max_threads=1, max_stuck=2)
        for _ in range(2):
            with pytest.raises(Expired):
                await threads.run(lambda: release.wait(10), 0.01)
        with pytest.raises(ToolFailure, match="2 threads are stuck"):
            await threads.run(lambda: "never", 1)
        release.set()
        for _ in range(100):
            await asyncio.sleep(0.01)
            if threads.num_stuck == 0:
                break
        assert await threads.run(lambda: "again", 1) == "again"
        threads.close()

    asyncio.run(main())
