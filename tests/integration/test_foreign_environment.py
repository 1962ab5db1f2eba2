"""Environments in a process of another interpreter: played, timed, killed, restarted and closed, without treadle."""

import ast
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.rollouts import engine, renderer, rollout, say
from treadle.config import ModelConfig, RolloutConfig
from treadle.config.rollout import ENVIRONMENT_SCHEMES
from treadle.errors import ConfigError, EnvironmentFailure
from treadle.process.foreign import SHIM, ForeignHandle, ForeignInterpreter, ForeignTarget
from treadle.rollout.environments.schemes import SCHEMES, ForeignEnvironments, find_environment
from treadle.rollout.protocol import Job
from treadle.rollout.worker import AgentLoopWorker
from treadle.types import SamplingParams, Task, Trajectory

DOORS = """
import os, sys, threading, time

class Doors:
    def __init__(self, door=2, log=None, slow=None):
        self.door, self.log, self.slow = door, log, slow
        self.thread = threading.get_ident()

    def reset(self, task):
        assert "treadle" not in sys.modules
        return {"messages": f"{task.uid} ({task.ground_truth}): which?", "tools": [
            {"type": "function", "function": {"name": "peek", "parameters": {"type": "object", "properties": {}}}}]}

    def step(self, action):
        assert threading.get_ident() == self.thread
        if action.text == "die":
            os._exit(9)
        if action.text == "wait":
            while not os.path.exists(self.slow):
                time.sleep(0.01)
        if action.text == "raise":
            raise ValueError("a bad door")
        if action.calls:
            return {"messages": [{"role": "tool", "tool_call_id": action.calls[0].id, "content": str(self.door)}]}
        if action.text == str(self.door):
            return {"reward": 1, "done": True, "info": {"pid": os.getpid(), "turns": len(action.messages)}}
        return {"messages": "no", "reward": -0.5}

    def close(self):
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"closed {self.door}\\n")


class AsyncDoors(Doors):
    async def step(self, action):
        return super().step(action)


class Short:
    def __init__(self, task, times=1):
        self.left = times

    async def step(self, messages):
        self.left -= 1
        return {"text": "Sure?" if self.left >= 0 else None, "reward": 0.5}


def short(task, **kwargs):
    return Short(task, **kwargs)


class Forger(Doors):
    def step(self, action):
        import gc, socket
        for one in gc.get_objects():
            if isinstance(one, socket.socket):
                one.sendall(b"\\0" * 7 + b"\\5" + b"[1,2]")
        return {"reward": 100, "done": True}
"""
CALL = '<tool_call>{"name": "peek", "arguments": {}}</tool_call>'


@pytest.fixture
def doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "doors_of_another.py").write_text(DOORS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configured(name: str = "Doors", **fields: Any) -> RolloutConfig:
    given = {"environment": f"doors_of_another:{name}", "environment_python": sys.executable, **fields}
    return rollout(default_agent_loop="environment_agent", **given)


@asynccontextmanager
async def working(config: RolloutConfig, *answers: Any):
    """Plays tasks with a worker; and what its environments run in. `answers`, or one function that writes them."""
    script = answers[0] if callable(answers[0]) else say(*answers)
    worker = await AgentLoopWorker.create(
        rollout=config, model=ModelConfig(path="unused"), engine=engine(script), renderer=renderer()
    )
    sampling = SamplingParams(config.response_length, stop_token_ids=renderer().stop_token_ids)

    async def play(uid: str = "one", **kwargs: Any) -> Trajectory:
        item = Task(uid, ({"role": "user", "content": uid},), "truth", environment_kwargs=kwargs)
        played = await worker.run(Job(item, 0, sampling))
        assert isinstance(played, Trajectory)
        return played

    (part,) = worker._loops._parts.values()
    try:
        yield play, part.interpreter
    finally:
        await worker.close()


def played(config: RolloutConfig, *answers: Any, **kwargs: Any) -> Trajectory:
    async def main() -> Trajectory:
        async with working(config, *answers) as (play, _):
            return await play(**kwargs)

    return asyncio.run(main())


@pytest.mark.parametrize("name", ["Doors", "AsyncDoors"])
def test_an_environment_is_played_in_another_process_of_another_python(doors, name):
    one = played(configured(name), CALL, "1", "3", door=3, log="closed.log")
    assert [m["content"] for m in one.messages] == ["one (truth): which?", CALL, "3", "1", "no", "3"]
    assert [turn.reward for turn in one.rows[0].turns] == [None, -0.5, 1.0]
    assert one.extra["environment"]["pid"] != os.getpid() and one.extra["environment"]["turns"] == 6
    assert Path("closed.log").read_text() == "closed 3\n"


def test_one_process_serves_all_sessions_and_ends_with_the_worker(doors):
    async def main() -> None:
        async with working(configured(), "2") as (play, interpreter):
            found = await asyncio.gather(*(play(f"t{at}") for at in range(8)))
            pid = interpreter.pid
            assert {one.extra["environment"]["pid"] for one in found} == {pid}
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["Short", "short"])
def test_the_short_form_is_played_there_too(doors, name):
    one = played(configured(name), "a", "b", "c", times=2)
    assert [m["content"] for m in one.messages] == ["one", "a", "Sure?", "b", "Sure?", "c"]
    assert one.extra["turn_rewards"] == (0.5, 0.5, 0.5)


def test_what_it_raises_is_a_failure_with_its_place(doors):
    outcome = played(configured(), "raise").outcome
    assert outcome.boundary == "environment"
    assert "ValueError: a bad door" in outcome.detail and "doors_of_another.py:" in outcome.detail


def test_a_process_that_dies_fails_its_sessions_and_is_started_again(doors):
    async def main() -> None:
        async with working(configured(), "die") as (play, interpreter):
            first = interpreter.pid
            lost = await play()
            assert lost.outcome.boundary == "environment" and "exit status 9" in lost.outcome.detail
            again = await play(door="die")  # the new process plays this one to its first step
            assert again.outcome.boundary == "environment" and interpreter.pid != first

    asyncio.run(main())


def test_a_killed_process_is_replaced_for_the_next_session(doors):
    async def main() -> None:
        async with working(configured(), "2") as (play, interpreter):
            os.kill(interpreter.pid, signal.SIGKILL)
            results = [await play("a"), await play("b")]
            assert results[-1].outcome.ok
            assert all(one.outcome.ok or one.outcome.boundary == "environment" for one in results)

    asyncio.run(main())


def test_a_late_call_is_abandoned_and_its_object_closed_when_it_returns(doors):
    async def main() -> None:
        config = configured(environment_timeout_s=0.5)
        async with working(config, "wait") as (play, _):
            late = await play(door=7, slow=str(doors / "go"), log=str(doors / "log"))
            assert late.outcome.boundary == "environment" and "environment_timeout_s = 0.5" in late.outcome.detail
            (doors / "go").touch()
            await asyncio.to_thread(wait_for, doors / "log")
        assert (doors / "log").read_text() == "closed 7\n"

    asyncio.run(main())


BACKTRACKING = """
import os, pathlib, re

class Holder:
    def hold(self, mark):
        pathlib.Path(mark).touch()
        re.match(r"(a+)+$", "a" * 64 + "b")

    def wait(self, mark):
        pathlib.Path(mark).touch()
        while not os.path.exists("go"):
            pass

    def name(self):
        return os.getpid()
"""


def test_a_call_that_holds_the_interpreter_costs_its_process_and_no_later_session(doors, monkeypatch, capfd):
    monkeypatch.setattr("treadle.process.foreign.ANSWER_S", 1.0)
    (doors / "holder.py").write_text(BACKTRACKING)

    async def main() -> None:
        interpreter = await ForeignInterpreter.start(sys.executable, "key", 60)

        async def opened() -> ForeignHandle:
            return await interpreter.open(ForeignTarget("holder:Holder"), (), {}, EnvironmentFailure)

        beside, late, holding = await opened(), await opened(), await opened()
        first = interpreter.pid
        busy = asyncio.ensure_future(beside.call("wait", "busy"))
        waiting = asyncio.ensure_future(late.call("wait", "late"))
        await asyncio.to_thread(wait_until, lambda: os.path.exists("busy") and os.path.exists("late"))
        waiting.cancel()
        assert await (await opened()).call("name") == first, "a call that leaves others their turn costs nothing"

        held = asyncio.ensure_future(holding.call("hold", "held"))
        await asyncio.to_thread(wait_until, lambda: os.path.exists("held"))
        held.cancel()
        await asyncio.wait({held})
        after = await opened()
        assert await after.call("name") == interpreter.pid != first
        with pytest.raises(EnvironmentFailure, match="killed, because a call held its interpreter"):
            await busy
        await interpreter.close()

    asyncio.run(main())
    assert "a late call held its interpreter" in capfd.readouterr().err


def test_bytes_that_are_no_reply_end_the_process_and_are_no_reward(doors):
    one = played(configured("Forger"), "x")
    assert one.outcome.boundary == "environment" and not one.extra.get("turn_rewards")


def wait_for(path: Path) -> None:
    wait_until(lambda: path.exists() and path.read_text())


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


ORPHAN = """
import asyncio, sys
from pathlib import Path
from treadle.process.foreign import ForeignInterpreter

async def main():
    interpreter = await ForeignInterpreter.start(sys.executable, "key", 60)
    Path(sys.argv[1]).write_text(str(interpreter.pid))
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_it_dies_with_a_parent_that_was_killed(tmp_path):
    pid_file = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, str(pid_file)])
    try:
        wait_for(pid_file)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid_file.read_text()}/cmdline").is_file():
        if not Path(f"/proc/{pid_file.read_text()}/cmdline").read_bytes():
            return  # nothing has waited for it yet
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start(**fields: Any) -> str:
    async def main() -> None:
        await (await ForeignEnvironments.start(configured(**fields))).close()

    with pytest.raises(ConfigError) as caught:
        asyncio.run(main())
    return str(caught.value)


def test_mistakes_are_found_before_any_session(doors):
    assert "no module 'nowhere'" in start(environment="nowhere:Env")
    assert "has no attribute 'Door'" in start(environment="doors_of_another:Door")
    found = start(environment_python="/nowhere/bin/python")
    assert "rollout.multi_turn.environment_python" in found and "there is no such program" in found
    assert "does not start" in start(environment_python="/bin/false")
    found = start(environment="textarena:Wordle-v0")
    assert "no module 'textarena'" in found and "pip install" in found


def test_a_server_of_a_package_needs_an_interpreter_to_end_with():
    with pytest.raises(ConfigError, match=r"environment_python: to .*python"):
        find_environment("openenv:echo_env")


def test_a_directory_is_answered_with_its_interpreter(doors):
    (doors / "venv" / "bin").mkdir(parents=True)
    (doors / "venv" / "bin" / "python").symlink_to(sys.executable)
    assert "venv/bin/python" in start(environment_python=str(doors / "venv"))


def test_schemes_are_those_of_the_config():
    assert tuple(SCHEMES) == ENVIRONMENT_SCHEMES


def test_the_shim_and_the_adapters_are_plain_enough_for_old_interpreters():
    """Python 3.8 can read the shim; it and the adapters import the standard library alone."""
    ast.parse(SHIM.read_text(), feature_version=(3, 8))
    folder = Path(__file__).parents[2] / "treadle" / "rollout" / "environments"
    for file in [SHIM, *folder.glob("*_adapter.py")]:
        for node in ast.parse(file.read_text()).body:
            names = [item.name for item in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert all(name.partition(".")[0] in {*sys.stdlib_module_names, "__future__"} for name in names), file
