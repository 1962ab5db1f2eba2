"""What a config offers: import paths, names, subsets, injected arguments."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.config.rollout import MCPServerConfig, MultiTurnConfig
from treadle.errors import ConfigError, ToolFailure
from treadle.rollout.tools import Toolbox
from treadle.types import Task, ToolCall, ToolStatus

SOURCE = '''
from treadle.rollout.tools import Injected, tool

def add(a: int, b: int) -> int:
    """Add."""
    return a + b

async def lookup(key: str, table: Injected[dict], depth: Injected[int] = 1) -> str:
    """Look up."""
    return f"{table[key]}/{depth}"

@tool(name="add")
def plus(a: int) -> int:
    return a

class Memory:
    @tool
    def recall(self) -> str:
        return "nothing"

class Empty:
    pass

def untyped(a):
    pass

number = 7
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "offered.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import no_such_package")
    (tmp_path / "raising.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("offered", "broken", "raising"):
        sys.modules.pop(name, None)


def with_tools(*paths: str, **config: Any) -> MultiTurnConfig:
    return MultiTurnConfig(tools=paths, **config)


def refusal(multi_turn: MultiTurnConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        asyncio.run(Toolbox.create(multi_turn))
    return str(caught.value)


def test_functions_and_classes_come_by_import_path() -> None:
    async def main() -> None:
        async with await Toolbox.create(with_tools("offered:add", "offered:Memory")) as toolbox:
            assert toolbox.names == ("add", "recall")
            async with toolbox.open(Task("t", ())) as tools:
                assert (await tools.call(ToolCall("add", {"a": 1, "b": 2}))).text == "3"
                assert (await tools.call(ToolCall("recall", {}))).text == "nothing"

    asyncio.run(main())


def test_every_bad_path_is_reported_at_once_with_key_value_and_cause() -> None:
    text = refusal(
        with_tools(
            "offered:ad",
            "no_such_module:x",
            "broken:x",
            "raising:x",
            "offered:Empty",
            "offered:untyped",
            "offered:number",
        )
    )
    assert all(f"rollout.multi_turn.tools[{at}]: " in text for at in range(7))
    for words in (
        "'offered:ad': offered has no 'ad'",
        "did you mean 'add'",
        "'no_such_module:x': there is no module 'no_such_module'",
        "'broken:x': there is no module 'no_such_package'",
        "'raising:x': importing raising failed: ZeroDivisionError",
        "no method marked with @tool",
        "offered:untyped: parameter 'a' has no annotation",
        "'offered:number' is a int",
    ):
        assert words in text


def test_two_tools_of_one_name_are_refused_with_both_origins() -> None:
    text = refusal(with_tools("offered:add", "offered:plus"))
    assert "two tools are called 'add': one from offered:add, one from offered:plus" in text


def test_a_task_may_use_a_subset_and_knows_no_other() -> None:
    async def main() -> None:
        async with await Toolbox.create(with_tools("offered:add", "offered:Memory")) as toolbox:
            assert [schema["function"]["name"] for schema in toolbox.schemas()] == ["add", "recall"]
            assert [schema["function"]["name"] for schema in toolbox.schemas(("recall",))] == ["recall"]
            assert toolbox.schemas(("recall",)) is toolbox.schemas(("recall",))
            async with toolbox.open(Task("t", (), tools=("recall",))) as tools:
                result = await tools.call(ToolCall("add", {"a": 1, "b": 2}))
                assert result.status is ToolStatus.INVALID
                assert result.text == "there is no tool 'add'. Known tools: recall."
            with pytest.raises(ToolFailure, match="'recal', which does not exist; did you mean 'recall'"):
                toolbox.open(Task("t", (), tools=("recal",)))

    asyncio.run(main())


def test_a_task_fills_injected_parameters() -> None:
    async def main() -> None:
        async with await Toolbox.create(with_tools("offered:lookup")) as toolbox:
            task = Task("t", (), tool_kwargs={"lookup": {"table": {"a": 1}, "depth": 2}, "other": {"x": 1}})
            async with toolbox.open(task) as tools:
                assert (await tools.call(ToolCall("lookup", {"key": "a"}))).text == "1/2"
                forged = await tools.call(ToolCall("lookup", {"key": "a", "table": {"a": 9}}))
                assert forged.status is ToolStatus.INVALID

    asyncio.run(main())


@pytest.mark.parametrize(
    ("tool_kwargs", "words"),
    [({}, "does not give 'table'"), ({"lookup": {"table": {}, "tabel": {}}}, "gives unknown 'tabel'")],
)
def test_a_task_that_gives_too_little_or_too_much_fails_when_its_tools_open(
    tool_kwargs: dict[str, dict[str, Any]], words: str
) -> None:
    async def main() -> None:
        async with await Toolbox.create(with_tools("offered:lookup")) as toolbox:
            with pytest.raises(ToolFailure, match=f"task 't7': tool_kwargs of 'lookup' {words}"):
                toolbox.open(Task("t7", (), tool_kwargs=tool_kwargs))

    asyncio.run(main())


def test_a_missing_sdk_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    servers = {"files": MCPServerConfig(command=("true",))}
    text = refusal(MultiTurnConfig(mcp_servers=servers))
    assert "rollout.multi_turn.mcp_servers" in text
    assert "pip install 'treadle[mcp]'" in text


@pytest.mark.parametrize("given", [{}, {"command": ("true",), "url": "http://localhost"}])
def test_an_mcp_server_needs_a_command_or_a_url(given: dict[str, Any]) -> None:
    text = refusal(MultiTurnConfig(mcp_servers={"files": MCPServerConfig(**given)}))
    assert "rollout.multi_turn.mcp_servers.files: has" in text
