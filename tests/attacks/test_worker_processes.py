"""Plain tools in worker processes: whatever they do there ends with their process, and the run goes on."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attacks.hostile import CALLER
from tests.rollouts import engine, rollout, save_model, say, tasks, turns_of
from treadle.config import AgentLoopConfig, FailureConfig, LimitsConfig
from treadle.process import guard
from treadle.rollout.manager import AgentLoopManager
from treadle.rollout.remote_worker import num_processes
from treadle.rollout.service import RolloutParts
from treadle.types import Batch

HOSTILE = "tests.attacks.hostile"
ONCE = FailureConfig(max_failed_fraction=1.0, session_retries=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def run(config, model, script, count=3, **parts) -> Batch:
    brought = RolloutParts(engines=[engine(script)], **parts)
    with AgentLoopManager.create_blocking(rollout=config, model=model, parts=brought) as made:
        return made.generate_sequences_blocking(tasks(count))


def call(name: str):
    """One call with the task's uid, then an answer."""

    def script(request, rng):
        if turns_of(request):
            return "done"
        return f"<tool_call>{json.dumps({'name': name, 'arguments': {'text': request.uid}})}</tool_call>"

    return script


def with_tool(name: str, **fields):
    return rollout(
        default_agent_loop="tool_agent", tools=(f"{HOSTILE}:{name}",), num_workers=None, failures=ONCE, **fields
    )


def outcomes(batch: Batch):
    return {trajectory.uid: trajectory.outcome for trajectory in batch.trajectories}


@pytest.mark.parametrize(
    ("fields", "processes"),
    [
        ({}, 0),
        ({"tools": ("treadle.recipes.calculator.tools:calculate",)}, 0),
        ({"tools": ("tests.rollouts:add",)}, 1),
        ({"tools": ("tests.attacks.dies_at_start:nothing",)}, 1),
        ({"tools": (f"{HOSTILE}:whose",)}, 1),
        ({"environment": f"{HOSTILE}:HostileEnvironment"}, 1),
        ({"environment": f"{HOSTILE}:HostileAsyncEnvironment"}, 1),
        ({"default_agent_loop": f"{HOSTILE}:HostileLoop"}, 1),
        ({"loops": {"mine": AgentLoopConfig(path=f"{HOSTILE}:HostileLoop")}}, 1),
        ({"loops": {"mine": AgentLoopConfig(path="tool_agent")}}, 0),
        ({"allow_imports_from_data": True}, 1),
        ({"format": "tests.rollouts:add"}, 1),
        ({"tools": (f"{HOSTILE}:whose",), "num_workers": 0}, 0),
        ({"num_workers": 3}, 3),
    ],
)
def test_code_of_the_user_runs_in_a_process_of_its_own_unless_told_otherwise(fields, processes):
    assert num_processes(rollout(**{"num_workers": None, **fields})) == processes


def test_a_tool_that_holds_the_interpreter_costs_its_own_trajectory_alone(model):
    batch = run(with_tool("hold_the_interpreter", tool_timeout_s=1.0), model, call("hold_the_interpreter"))
    found = outcomes(batch)
    assert set(found) == {"task0", "task1", "task2"}
    assert found["task1"].boundary == "tool"
    assert "held agent worker 0 up" in found["task1"].detail
    assert "hostile.py:" in found["task1"].detail


def test_an_async_tool_that_holds_the_interpreter_does_not_hold_the_driver(model):
    config = with_tool("hold_asynchronously", tool_timeout_s=1.0, max_concurrent_sessions=1)
    found = outcomes(run(config, model, call("hold_asynchronously")))
    assert found["task1"].boundary == "tool" and found["task0"].ok and found["task2"].ok


def test_a_loop_that_holds_the_interpreter_has_the_deadline_of_its_session(model):
    limits = LimitsConfig(session_timeout_s=2.0)
    config = rollout(
        default_agent_loop=f"{HOSTILE}:HoldsTheInterpreter",
        num_workers=None,
        max_concurrent_sessions=1,
        failures=ONCE,
        limits=limits,
    )
    found = outcomes(run(config, model, say("x")))
    assert found["task1"].boundary == "loop" and "hostile.py:" in found["task1"].detail
    assert found["task0"].ok and found["task2"].ok


def test_a_tool_that_leaves_with_status_0_is_a_failure(model):
    config = with_tool("leave", max_concurrent_sessions=1)
    found = outcomes(run(config, model, call("leave")))
    assert [uid for uid, outcome in found.items() if not outcome.ok] == ["task1"]
    assert "exit status 0" in found["task1"].detail


def test_what_a_tool_started_ends_with_the_run(model):
    (trajectory,) = run(with_tool("start_child"), model, call("start_child"), count=1).trajectories
    child = int(trajectory.messages[2]["content"])
    assert not Path(f"/proc/{child}").exists()


def test_what_an_async_tool_started_ends_with_the_run(model):
    (trajectory,) = run(
        with_tool("start_child_asynchronously"), model, call("start_child_asynchronously"), count=1
    ).trajectories
    assert not Path(f"/proc/{int(trajectory.messages[2]['content'])}").exists()


def test_what_an_mcp_server_started_in_a_session_of_its_own_ends_with_it():
    program = "import subprocess; print(subprocess.Popen(['sleep', '611'], start_new_session=True).pid, flush=True)"
    command = [sys.executable, guard.__file__, sys.executable, "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, start_new_session=True, check=False)
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_context_variables_of_the_caller_arrive_in_worker_processes(model):
    CALLER.set("the test")
    try:
        (trajectory,) = run(with_tool("whose"), model, call("whose"), count=1).trajectories
    finally:
        CALLER.set("nobody")
    assert trajectory.messages[2]["content"] == "the test"


def test_a_stall_in_a_worker_process_is_reported_with_its_exact_stage(model):
    reports = []
    config = with_tool("wait_long", limits=LimitsConfig(stall_report_s=0.5), tool_timeout_s=5.0)
    run(config, model, call("wait_long"), count=1, on_stall=reports.append)
    waits = [wait for report in reports for wait in report.waits]
    assert "tools" in {wait.stage for wait in waits}
    since = {wait.since for wait in waits if wait.stage == "tools"}
    assert len(since) == 1  # one wait, told once and again when its age has doubled
    assert waits[-1].last_event == "calling wait_long"


def test_a_worker_killed_while_its_replacement_starts_does_not_end_the_run(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loops = {"dies": AgentLoopConfig(path=f"{HOSTILE}:DiesThenDiesWhileStarting", kwargs={"folder": str(tmp_path)})}
    config = rollout(
        num_workers=1, default_agent_loop="dies", loops=loops, tools=("tests.attacks.dies_at_start:nothing",)
    )
    batch = run(config, model, say("x"))
    assert all(trajectory.outcome.ok for trajectory in batch.trajectories)
    assert {path.name for path in tmp_path.iterdir()} == {"died"}


def test_closing_does_not_wait_for_a_worker_that_does_not_listen(model):
    """What Ctrl-C does: the call is cancelled, and the manager closes."""

    async def main() -> None:
        config = with_tool("hold_the_interpreter", tool_timeout_s=6000.0, limits=LimitsConfig(close_timeout_s=3000.0))
        brought = RolloutParts(engines=[engine(call("hold_the_interpreter"))])
        async with await AgentLoopManager.create(rollout=config, model=model, parts=brought) as made:
            work = asyncio.ensure_future(made.generate_sequences(tasks(2)))
            await asyncio.sleep(8)
            work.cancel()
            await asyncio.wait({work})

    asyncio.run(asyncio.wait_for(main(), 1000))
