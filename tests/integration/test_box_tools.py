"""The tools python, bash, edit and submit: one box, one interpreter and one shell for each session."""

import asyncio
import os
import re
import sys
import venv

import pytest

from tests.boxes import each_provider, why_not
from treadle.config import loads
from treadle.errors import ConfigError, RunError, ToolFailure
from treadle.gateway.agents import ProgramAgentLoop
from treadle.process.tree import list_children
from treadle.rollout.tools import Toolbox
from treadle.rollout.tools.toolbox import SessionTools
from treadle.types import Task, ToolCall, ToolResult, ToolStatus

TEXT = """
model: {path: unused}
rollout:
  multi_turn: {tools: [python, bash, edit, submit], tool_timeout_s: 20}
"""


def in_session(provider, work, *words, **fields):
    if why_not(provider) is not None:
        pytest.skip(f"{provider}: {why_not(provider)}")
    rollout = loads(TEXT, "test.yaml", (f"rollout.sandbox.provider={provider}", *words)).rollout

    async def run():
        async with await Toolbox.create(rollout.multi_turn, rollout.sandbox) as toolbox:
            task = Task(uid="a", messages=({"role": "user", "content": "go"},), **fields)
            async with toolbox.open(task) as tools:
                return await work(tools)

    return asyncio.run(run())


async def call(tools: SessionTools, name: str, **arguments: object) -> ToolResult:
    return await tools.call(ToolCall(name, arguments))


@each_provider
def test_python_keeps_its_variables_and_prints_the_last_value(provider):
    async def work(tools):
        assert (await call(tools, "python", code="x = 20\nx + 1")).text == "21"
        assert (await call(tools, "python", code="print(x)")).text == "20"
        broken = await call(tools, "python", code="x / 0")
        assert broken.status is ToolStatus.ERROR and broken.text.endswith("ZeroDivisionError: division by zero")
        assert (await call(tools, "python", code="import sys; sys.exit(3)")).status is ToolStatus.ERROR
        assert (await call(tools, "python", code="x")).text == "20"
        gone = await call(tools, "python", code="import os; os._exit(5)")
        assert gone.text == "[python ended with 5, and starts anew]"
        assert "NameError" in (await call(tools, "python", code="x")).text

    in_session(provider, work)


@each_provider
def test_tools_that_cannot_be_had_leave_no_warm_box(provider):
    if why_not(provider) is not None:
        pytest.skip(f"{provider}: {why_not(provider)}")
    words = (f"rollout.sandbox.provider={provider}", "rollout.sandbox.warm=2")
    server = 'rollout.multi_turn.mcp_servers={broken: {command: [python, -c, "raise SystemExit(3)"]}}'
    rollout = loads(TEXT, "test.yaml", (*words, server)).rollout

    async def main() -> None:
        with pytest.raises(RunError, match="broken"):
            await Toolbox.create(rollout.multi_turn, rollout.sandbox)
        left = {task.get_coro().__qualname__ for task in asyncio.all_tasks() - {asyncio.current_task()}}
        assert not left and not list_children(os.getpid())

    asyncio.run(main())


@each_provider
def test_bash_keeps_its_directory_and_variables(provider):
    async def work(tools):
        await call(tools, "bash", command="mkdir a; cd a; export MOOD=good")
        answer = await call(tools, "bash", command="basename $PWD; echo $MOOD; echo error >&2; false")
        assert (answer.text, answer.status) == ("a\ngood\nerror\n[exit status 1]", ToolStatus.ERROR)
        assert (await call(tools, "bash", command="cat")).text == ""

    in_session(provider, work)


@each_provider
def test_a_late_command_is_read_as_far_as_it_came(provider):
    async def work(tools):
        late = await call(tools, "bash", command="echo begun; sleep 100")
        assert late.status is ToolStatus.TIMEOUT
        assert late.text == "begun\n[ended after 1 s; bash starts anew]"
        assert (await call(tools, "bash", command="echo again")).text == "again"

    in_session(provider, work, "rollout.sandbox.timeout_s=1")


@each_provider
def test_the_tools_of_a_session_share_one_box(provider):
    async def work(tools):
        await call(tools, "edit", path="f.py", old="", new="def f():\n    return 1\n")
        await call(tools, "edit", path="f.py", old="return 1", new="return 2")
        assert "2 times" in (await call(tools, "edit", path="f.py", old="f", new="g")).text
        assert (await call(tools, "bash", command="python3 -c 'import f; print(f.f())'")).text == "2"
        assert "No such file" in (await call(tools, "submit", files=["g.py"])).text
        handed = await call(tools, "submit", files=["f.py"])
        assert handed.extra == {"submitted": True, "files": {"f.py": "def f():\n    return 2\n"}}

    in_session(provider, work)


@each_provider
def test_what_edit_cannot_write_is_for_the_model_to_read(provider):
    async def work(tools):
        await call(tools, "bash", command="mkdir folder; head -c 100 /dev/urandom > noise; echo text > file")
        assert (await call(tools, "edit", path="odd\ud800", old="", new="a")).status is ToolStatus.OK
        for wrong in (
            {"path": "/etc/planted", "old": "", "new": "a"},
            {"path": "/solution.py", "old": "", "new": "a"},
            {"path": "folder", "old": "", "new": "a"},
            {"path": "file/below", "old": "", "new": "a"},
            {"path": "a\0b", "old": "", "new": "a"},
            {"path": "large", "old": "", "new": "a" * 3_000_000},
            {"path": "file", "old": "text", "new": "a" * 3_000_000},
            {"path": "nothing", "old": "a", "new": "b"},
            {"path": "folder", "old": "a", "new": "b"},
            {"path": "noise", "old": "a", "new": "b"},
        ):
            answer = await call(tools, "edit", **wrong)
            assert answer.status is ToolStatus.ERROR and answer.text.startswith("ValueError: "), wrong["path"]
        for wrong in ("folder", "a\0b", "noise", "/etc/shadow"):
            assert (await call(tools, "submit", files=[wrong])).status is ToolStatus.ERROR
        assert (await call(tools, "bash", command="ls /etc/planted /solution.py")).status is ToolStatus.ERROR

    in_session(provider, work, "rollout.sandbox.disk_mb=1")


@each_provider
def test_a_box_full_of_processes_is_for_the_model_to_read(provider):
    async def work(tools):
        hold = "import subprocess, time\nfor _ in range(30):\n    try: subprocess.Popen(['sleep', '500'])\n"
        hold += "    except OSError: break\nopen('full', 'w')\ntime.sleep(500)"
        await call(tools, "edit", path="hold.py", old="", new=hold)
        await call(tools, "bash", command="python3 hold.py > /dev/null 2>&1 &\nuntil [ -e full ]; do :; done")
        for name, arguments in (("python", {"code": "1"}), ("edit", {"path": "a", "old": "", "new": "b"})):
            answer = await call(tools, name, **arguments)
            assert answer.status is ToolStatus.ERROR
            assert answer.text.endswith("unavailable; end what runs in the background first")
        await call(tools, "bash", command="kill -9 -- %1; exit")
        await call(tools, "bash", command="true")
        assert (await call(tools, "python", code="1 + 1")).text.startswith("2")

    in_session(provider, work, "rollout.sandbox.processes=12")


@each_provider
def test_code_that_writes_to_the_status_descriptor_costs_its_interpreter_alone(provider):
    async def work(tools):
        write = "import os\nfor number in range(3, 20):\n    try: os.write(number, b'{}\\n')\n    except OSError: pass"
        for junk in ("junk", "1 0", "2 0", "3 0 0"):
            answer = await call(tools, "python", code=write.format(junk))
            assert answer.status in (ToolStatus.ERROR, ToolStatus.OK)
            for _ in range(3):
                last = await call(tools, "python", code="x = 1\nx + 1")
            assert last.text == "2"
        await call(tools, "bash", command="echo junk > /proc/$$/fd/3")
        await call(tools, "bash", command="true")
        assert (await call(tools, "bash", command="echo next")).text == "next"

    in_session(provider, work)


@each_provider
def test_a_task_lays_files_into_its_box_and_sets_it_up(provider):
    async def work(tools):
        assert (await call(tools, "bash", command="cat src/add.py made")).text == "def add(a, b): return a - b\nready"
        await call(tools, "edit", path="src/add.py", old="a - b", new="a + b")
        assert (await call(tools, "python", code="from src.add import add; add(1, 2)")).text == "3"

    box = {"files": {"src/add.py": "def add(a, b): return a - b\n"}, "setup": "echo ready > made"}
    in_session(provider, work, tool_kwargs={"box": box})


@pytest.mark.parametrize(
    ("box", "why"),
    [
        ({"setup": "echo no such package >&2; exit 3"}, "setup ended with 3: no such package"),
        ({"files": {"/etc/a": "x"}}, "'/etc/a' is not a path inside the box"),
        ({"files": {"../a": "x"}}, "'../a' is not a path inside the box"),
        ({"files": {"a": 3}}, "box.files: 'int' object has no attribute 'encode'"),
        ({"file": {}}, "unexpected keyword argument 'file'"),
    ],
)
def test_a_box_that_cannot_be_set_up_fails_the_task_with_the_reason(box, why):
    async def work(tools):
        with pytest.raises(ToolFailure, match=re.escape(why)):
            await call(tools, "bash", command="true")

    in_session("bubblewrap", work, tool_kwargs={"box": box})


@each_provider
def test_programs_of_a_virtual_environment_come_first(provider, tmp_path):
    venv.create(tmp_path / "venv")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (tmp_path / "venv" / "lib" / version / "site-packages" / "own_package.py").write_text("here = True\n")

    async def work(tools):
        assert (await call(tools, "python", code="import own_package; own_package.here")).text == "True"
        assert (await call(tools, "bash", command="python3 -c 'import own_package; print(1)'")).text == "1"

    words = (f"rollout.sandbox.read_only=[{tmp_path}/venv]", f"rollout.sandbox.path=[{tmp_path}/venv/bin]")
    in_session(provider, work, *words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("rollout.sandbox.read_only=[/no/such]",), r"rollout\.sandbox\.read_only: there is no /no/such"),
        (("rollout.sandbox.path=[/no/such]",), r"rollout\.sandbox\.path: there is no directory /no/such"),
        (("rollout.sandbox.path=[/var]",), r"rollout\.sandbox\.path: boxes cannot read /var"),
        (("rollout.sandbox.provider=tests.boxes:HalfABox",), r"has no alive, stop, exec, launch"),
    ],
)
def test_places_and_classes_that_a_box_cannot_have_are_mistakes_of_the_config(words, why):
    rollout = loads(TEXT, "test.yaml", words).rollout
    with pytest.raises(ConfigError, match=why):
        asyncio.run(Toolbox.create(rollout.multi_turn, rollout.sandbox))


def test_a_class_by_import_path_is_a_provider():
    async def work(tools):
        assert (await call(tools, "bash", command="echo $OWN")).text == "mine"
        assert (await call(tools, "python", code="1 + 1")).text == "2"
        await call(tools, "edit", path="f.py", old="", new="x = 1")
        assert (await call(tools, "submit", files=["f.py"])).extra["files"] == {"f.py": "x = 1"}

    in_session("bubblewrap", work, "rollout.sandbox.provider=tests.boxes:OwnBox")


def test_agent_programs_in_boxes_without_a_way_to_the_gateway_are_refused():
    text = (
        "model: {path: unused}\nrollout: {agent: {default_agent_loop: program_agent, loops: {program_agent: {kwargs: "
    )
    text += "{argv: [python], sandbox: true}}}}, sandbox: {provider: landlock}}\n"
    rollout = loads(text, "test.yaml").rollout
    with pytest.raises(ConfigError, match=r"rollout\.sandbox\.provider: .*no way to a service of this machine"):
        asyncio.run(ProgramAgentLoop.open_worker(rollout))


@each_provider
def test_a_box_that_breaks_fails_the_trajectory_at_the_tool_boundary(provider):
    async def work(tools):
        await call(tools, "bash", command="true")
        (instance,) = tools._instances.values()
        await instance._made._box.stop()
        with pytest.raises(ToolFailure, match="bash failed after 3 attempts: bash: the box was stopped"):
            await call(tools, "bash", command="true")
        with pytest.raises(ToolFailure, match="edit failed after 3 attempts: edit: the box was stopped"):
            await call(tools, "edit", path="a", old="", new="b")

    in_session(provider, work)


def test_a_provider_that_cannot_be_had_is_a_mistake_of_the_config():
    words = ("rollout.sandbox.provider=podman", "rollout.sandbox.image=localhost/no-such-image")
    rollout = loads(TEXT, "test.yaml", words).rollout
    with pytest.raises(ConfigError, match=r"rollout\.sandbox\.provider: podman cannot be had"):
        asyncio.run(Toolbox.create(rollout.multi_turn, rollout.sandbox))
