"""Whatever a loop, tool, environment or reward does to its task or thread: a failure, never a hang, never a loss."""

import asyncio
import json
import threading
from concurrent.futures import TimeoutError as Late

import pytest

from tests.attacks.hostile import CALLER, DEEDS, PLAIN, HangsOnce, Meeting
from tests.chaos import run_python
from tests.rollouts import engine, renderer, rollout, say, tasks, turns_of
from treadle.config import AgentLoopConfig, FailureConfig, LimitsConfig, ModelConfig, RewardConfig, RewardFunctionConfig
from treadle.config.reward import JudgeConfig, JudgeEngineConfig
from treadle.errors import ConfigError, RunError
from treadle.loop_thread import LoopThread
from treadle.rollout.manager import AgentLoopManager
from treadle.rollout.service import RolloutKind, RolloutParts
from treadle.types import Batch

HOSTILE = "tests.attacks.hostile"
ONCE = FailureConfig(max_failed_fraction=1.0, session_retries=0)
PATIENCE_S = 120


def run(config, script, reward=None, count=3) -> Batch:
    """A batch, or a failed test where it takes for ever."""
    parts = RolloutParts(engines=[engine(script) if callable(script) else script], renderer=renderer())
    made = AgentLoopManager.create_blocking(
        rollout=config, model=ModelConfig(path="unused"), reward=reward, parts=parts
    )
    with made:
        work = made._thread.submit(made._service.generate(tasks(count), RolloutKind.TRAINING))
        try:
            return work.result(PATIENCE_S)
        except Late:
            pytest.fail("the batch never ended")


def check_one_failed(batch: Batch, boundary: str, *says: str) -> None:
    outcomes = {trajectory.uid: trajectory.outcome for trajectory in batch.trajectories}
    assert set(outcomes) == {"task0", "task1", "task2"}
    assert [uid for uid, outcome in outcomes.items() if not outcome.ok] == ["task1"]
    assert outcomes["task1"].boundary == boundary
    for words in says:
        assert words in outcomes["task1"].detail


@pytest.mark.parametrize("deed", DEEDS)
def test_a_loop_can_end_its_own_attempt_and_nothing_else(deed):
    loops = {"hostile": AgentLoopConfig(path=f"{HOSTILE}:HostileLoop", kwargs={"deed": deed})}
    batch = run(rollout(default_agent_loop="hostile", loops=loops, failures=ONCE), say("x"))
    check_one_failed(batch, "loop", "hostile.py:")


def test_a_task_that_a_loop_started_cannot_end_the_event_loop():
    config = rollout(default_agent_loop=f"{HOSTILE}:ExitsInATask", failures=ONCE)
    check_one_failed(run(config, say("x")), "loop", "SystemExit", "hostile.py:")


def _calls(*deeds: str):
    """Task 1 does the deeds in one turn; the others call a tool that works."""

    def script(request, rng):
        if any(message["role"] == "assistant" for message in request.messages):
            return "done"
        wanted = [("hostile_tool", {"deed": deed}) for deed in deeds] if request.uid == "task1" else []
        calls = [*wanted, ("harmless", {"text": "a"})]
        return "".join(
            f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in calls
        )

    return script


@pytest.mark.parametrize("deeds", [*((deed,) for deed in DEEDS), ("cancel_task", "interrupt")])
def test_a_tool_can_fail_its_own_trajectory_and_nothing_else(deeds):
    tools = (f"{HOSTILE}:hostile_tool", f"{HOSTILE}:harmless")
    config = rollout(default_agent_loop="tool_agent", tools=tools, failures=ONCE, tool_retries=0, max_parallel_calls=1)
    check_one_failed(run(config, _calls(*deeds)), "tool")
    config = rollout(default_agent_loop="tool_agent", tools=tools, failures=ONCE, tool_retries=0)
    check_one_failed(run(config, _calls(*deeds)), "tool")


def test_a_single_call_that_cancels_its_task_is_the_tools_failure():
    def script(request, rng):
        if request.uid != "task1" or any(message["role"] == "assistant" for message in request.messages):
            return "done"
        return '<tool_call>{"name": "hostile_tool", "arguments": {"deed": "cancel_task"}}</tool_call>'

    config = rollout(default_agent_loop="tool_agent", tools=(f"{HOSTILE}:hostile_tool",), failures=ONCE)
    check_one_failed(run(config, script), "tool", "cancelled its own task", "hostile.py:")


@pytest.mark.parametrize("deed", PLAIN)
@pytest.mark.parametrize("at", ["open", "step"])
def test_a_plain_environment_can_fail_its_own_trajectory_and_nothing_else(deed, at):
    config = rollout(
        default_agent_loop="environment_agent",
        environment=f"{HOSTILE}:HostileEnvironment",
        environment_kwargs={"deed": deed, "at": at},
        failures=ONCE,
    )
    check_one_failed(run(config, say("x")), "environment", "hostile.py:")


@pytest.mark.parametrize("deed", DEEDS)
def test_an_async_environment_can_fail_its_own_trajectory_and_nothing_else(deed):
    config = rollout(
        default_agent_loop="environment_agent",
        environment=f"{HOSTILE}:HostileAsyncEnvironment",
        environment_kwargs={"deed": deed},
        failures=ONCE,
    )
    check_one_failed(run(config, say("x")), "environment", "hostile.py:")


def test_an_environment_that_breaks_while_it_closes_is_logged_and_the_result_stands(caplog):
    config = rollout(
        default_agent_loop="environment_agent",
        environment=f"{HOSTILE}:HostileEnvironment",
        environment_kwargs={"deed": "exit", "at": "close"},
        failures=ONCE,
    )
    batch = run(config, say("x"))
    assert all(trajectory.outcome.ok for trajectory in batch.trajectories)
    assert "HostileEnvironment.close() failed" in caplog.text


def test_plain_environments_run_side_by_side():
    Meeting.barrier.reset()  # each wait ends only when all sixteen are at it at once
    config = rollout(default_agent_loop="environment_agent", environment=f"{HOSTILE}:Meeting", failures=ONCE)
    batch = run(config, say("x"), count=16)
    assert all(trajectory.outcome.ok for trajectory in batch.trajectories)
    assert {trajectory.num_turns for trajectory in batch.trajectories} == {2}


@pytest.mark.parametrize("limit", ["step", "session"])
def test_a_step_that_hangs_is_abandoned_and_its_trajectory_replaced(limit):
    """R10, R7: a limit that is not the model's doing is a failure, and the trajectory is sampled again."""
    HangsOnce.hung.clear()
    HangsOnce.release.clear()
    limits = LimitsConfig(session_timeout_s=0.3) if limit == "session" else LimitsConfig()
    config = rollout(
        default_agent_loop="environment_agent",
        environment=f"{HOSTILE}:HangsOnce",
        environment_timeout_s=0.1 if limit == "step" else 600.0,
        failures=FailureConfig(max_failed_fraction=1.0, session_retries=1),
        limits=limits,
    )
    try:
        (trajectory,) = run(config, say("x"), count=1).trajectories
    finally:
        HangsOnce.release.set()
    assert trajectory.outcome.ok
    assert (trajectory.attempt, trajectory.rows[0].turns[0].reward) == (1, 1.0)


def test_an_engine_that_hangs_on_a_later_turn_is_a_failure_of_the_engine():
    made = engine(say('<tool_call>{"name": "harmless", "arguments": {"text": "a"}}</tool_call>'))
    answer = made.generate

    async def hang_later(request):
        return await (asyncio.sleep(600) if turns_of(request) else answer(request))

    made.generate = hang_later
    config = rollout(
        default_agent_loop="tool_agent",
        tools=(f"{HOSTILE}:harmless",),
        failures=ONCE,
        limits=LimitsConfig(session_timeout_s=0.5),
    )
    (trajectory,) = run(config, made, count=1).trajectories
    assert trajectory.outcome.boundary == "engine"
    assert "turn 2 had no answer" in trajectory.outcome.detail


def test_a_loop_that_swallows_cancellation_is_given_up_after_its_deadline(monkeypatch):
    monkeypatch.setattr("treadle.rollout.worker.GIVE_UP_S", 0.2)
    config = rollout(
        default_agent_loop=f"{HOSTILE}:SwallowsCancellation",
        failures=ONCE,
        limits=LimitsConfig(session_timeout_s=0.2, close_timeout_s=1.0),
    )
    check_one_failed(run(config, say("x")), "loop", "was abandoned", "hostile.py:")


@pytest.mark.parametrize("deed", DEEDS)
def test_a_reward_in_this_process_can_fail_its_own_score_and_nothing_else(deed):
    function = RewardFunctionConfig(path=f"{HOSTILE}:hostile_reward", kwargs={"deed": deed})
    reward = RewardConfig(functions={"hostile": function}, num_workers=0, retries=0)
    check_one_failed(run(rollout(failures=ONCE), say("x"), reward), "reward", "hostile")


def judged(parser: str, num_workers: int, prompt: str = "?", **keys) -> RewardConfig:
    """A judge that repeats its question, and a parser of its answers."""
    engine = JudgeEngineConfig(name="scripted")
    judge = JudgeConfig(prompt=prompt, parser=f"{HOSTILE}:{parser}", engine=engine, retries=0, **keys)
    return RewardConfig(judges={"fair": judge}, num_workers=num_workers, retries=0)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("deed", DEEDS)
def test_a_judges_parser_can_fail_its_own_score_and_nothing_else(deed, num_workers):
    batch = run(rollout(failures=ONCE), say("x"), judged("hostile_parser", num_workers, deed))
    check_one_failed(batch, "reward", "reward model 'fair'", "parser")


def test_a_judges_parser_that_holds_the_interpreter_holds_its_worker_alone():
    reward = judged("parser_that_holds", 1, timeout_s=60.0)
    reward = RewardConfig(**{**reward.values(), "timeout_s": 5.0})
    check_one_failed(
        run(rollout(failures=ONCE), say("x"), reward), "reward", "a parser that ran past reward.timeout_s=5"
    )


def test_a_parser_that_its_worker_cannot_load_is_a_mistake_of_its_key():
    with pytest.raises(ConfigError) as caught:
        run(rollout(), say("x"), judged("hostile_reward", 1))
    assert {mistake.key for mistake in caught.value.mistakes} == {"reward.judges.fair.parser"}


def test_whoever_waits_for_a_thread_that_dies_hears_why():
    thread = LoopThread("test")
    begun = threading.Event()

    async def wait():
        begun.set()
        await asyncio.sleep(600)

    waiting = thread.submit(wait())
    assert begun.wait(PATIENCE_S)
    thread._loop.call_soon_threadsafe(thread._loop.stop)  # behind its back: the thread runs it again
    assert not waiting.done()

    def die():
        raise MemoryError("all gone")

    thread._run = die  # type: ignore[method-assign]
    thread._loop.call_soon_threadsafe(thread._loop.stop)
    with pytest.raises(RunError, match="all gone"):
        waiting.result(PATIENCE_S)
    thread._thread.join(PATIENCE_S)
    with pytest.raises(RunError, match="all gone"):
        thread.submit(asyncio.sleep(0))


CLOSES_ALL = """
import asyncio, os
from treadle.loop_thread import LoopThread

async def close_all():
    os.closerange(3, 200)
    await asyncio.sleep(600)

LoopThread("test").submit(close_all()).result(100)
"""


def test_whoever_waits_hears_why_when_a_tool_closes_all_descriptors():
    done = run_python(CLOSES_ALL)
    assert "treadle.errors.RunError: thread test died: OSError" in done.stderr


def score_of_caller(response):
    return 1.0 if CALLER.get() == "the test" else 0.0


def test_context_variables_of_the_caller_arrive_in_reward_workers():
    reward = RewardConfig(functions={"caller": RewardFunctionConfig(path=f"{__name__}:score_of_caller")}, num_workers=1)
    token = CALLER.set("the test")
    try:
        (trajectory,) = run(rollout(), say("x"), reward, count=1).trajectories
    finally:
        CALLER.reset(token)
    assert trajectory.reward.value == 1.0
