"""The built-in loops, and loops of one's own by name or import path."""

import asyncio
import contextlib

import pytest

from tests import virtual_time
from tests.rollouts import CALL, FINAL, engine, renderer, rollout, say, task, texts
from treadle.config import AgentLoopConfig, LimitsConfig, ModelConfig, RolloutConfig
from treadle.engine.scripted import ScriptedEngine
from treadle.errors import ConfigError
from treadle.rollout.agent_loop import AgentLoopBase
from treadle.rollout.environment import Reply
from treadle.rollout.protocol import Dropped, Job
from treadle.rollout.session import Session
from treadle.rollout.worker import AgentLoopWorker
from treadle.types import SamplingParams, Status, StopReason, ToolStatus, Trajectory

TOOLS = {"default_agent_loop": "tool_agent", "tools": ("tests.rollouts:add",)}


def attempt(config, script, item=None, run=asyncio.run) -> Trajectory:
    async def main():
        made = script if isinstance(script, ScriptedEngine) else engine(script)
        worker = await AgentLoopWorker.create(
            rollout=config, model=ModelConfig(path="unused"), engine=made, renderer=renderer()
        )
        try:
            sampling = SamplingParams(config.response_length, stop_token_ids=renderer().stop_token_ids)
            return await worker.run(Job(item or task(), 0, sampling))
        finally:
            await worker.close()

    return run(main())


def test_single_turn_is_one_prompt_and_one_answer():
    trajectory = attempt(rollout(), say(FINAL, "never asked"))
    assert texts(trajectory.messages) == ["user", "assistant"]
    assert trajectory.response_text == FINAL
    assert trajectory.outcome.status is Status.COMPLETED


def test_the_tool_loop_goes_on_until_the_model_asks_for_nothing():
    trajectory = attempt(rollout(**TOOLS), say(CALL, CALL, FINAL))
    assert texts(trajectory.messages) == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert trajectory.messages[2]["content"] == "3"
    (row,) = trajectory.rows
    assert [turn.results[0].status for turn in row.turns[:2]] == [ToolStatus.OK, ToolStatus.OK]
    assert trajectory.outcome.reason is StopReason.STOP


def test_the_ids_of_a_tool_conversation_are_those_of_the_full_template():
    trajectory = attempt(rollout(**TOOLS), say(CALL, FINAL))
    (row,) = trajectory.rows
    made = renderer()
    schemas = _schemas()
    full = made.prompt(trajectory.messages[:-1], schemas)
    answer_starts = row.turns[-1].start
    assert row.prompt_ids + row.ids[:answer_starts] == full


def test_some_conversations_are_compared_with_a_rendering_of_the_whole():
    assert attempt(rollout(**TOOLS), say(CALL, FINAL), task("m")).extra["drift"] == 0.0
    sampled = say(f"<|im_start|>{CALL}", FINAL)  # a token that only the model may write: as text it is other tokens
    assert attempt(rollout(**TOOLS), sampled, task("m")).extra["drift"] == 1.0
    assert "drift" not in attempt(rollout(**TOOLS), say(CALL, FINAL), task("one")).extra
    assert "drift" not in attempt(rollout(), say(FINAL), task("m")).extra


def _schemas():
    from treadle.rollout.tools import Toolbox

    async def main():
        async with await Toolbox.create(rollout(**TOOLS).multi_turn) as toolbox:
            return toolbox.schemas()

    return asyncio.run(main())


def test_parallel_calls_of_one_turn_are_answered_in_order():
    two = CALL + CALL.replace('"b": 2', '"b": 5')
    trajectory = attempt(rollout(**TOOLS), say(two, FINAL))
    assert [message["content"] for message in trajectory.messages if message["role"] == "tool"] == ["3", "6"]


def test_no_tool_runs_after_the_last_turn():
    trajectory = attempt(rollout(max_assistant_turns=2, **TOOLS), say(CALL))
    assert texts(trajectory.messages) == ["user", "assistant", "tool", "assistant"]
    assert trajectory.outcome.reason is StopReason.TURN_LIMIT


def test_malformed_calls_in_a_row_end_the_trajectory_with_that_reason():
    trajectory = attempt(rollout(max_invalid_calls=2, **TOOLS), say("<tool_call>{not json</tool_call>"))
    assert trajectory.outcome.reason is StopReason.INVALID_CALLS
    assert trajectory.num_turns == 2


def test_a_task_names_its_own_loop_and_tools():
    trajectory = attempt(rollout(**TOOLS), say(CALL, FINAL), task(agent="single_turn_agent"))
    assert trajectory.num_turns == 1
    trajectory = attempt(rollout(**TOOLS), say(CALL, FINAL), task(tools=()))
    assert "no tool" in trajectory.messages[2]["content"]


class Twice(AgentLoopBase):
    """Asks, then asks for a second thought."""

    def __init__(self, rollout, doubt: str = "Sure?") -> None:
        super().__init__(rollout)
        self.doubt = doubt

    async def run(self, session: Session) -> None:
        await session.generate()
        await session.observe(self.doubt)
        if not session.done:
            await session.generate()
        session.extra["doubted"] = True


def test_a_loop_of_ones_own_by_import_path_and_by_name_with_arguments():
    trajectory = attempt(rollout(default_agent_loop=f"{__name__}:Twice"), say("A", "B"))
    assert [message["content"] for message in trajectory.messages[1:]] == ["A", "Sure?", "B"]
    assert trajectory.extra == {"doubted": True}
    loops = {"careful": AgentLoopConfig(path=f"{__name__}:Twice", kwargs={"doubt": "Really?"})}
    trajectory = attempt(rollout(default_agent_loop="careful", loops=loops), say("A", "B"))
    assert trajectory.messages[2]["content"] == "Really?"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("tool_agnt", "did you mean 'tool_agent'"),
        ("no.such:Loop", "no module"),
        ("tests.rollouts:add", "not a subclass of AgentLoopBase"),
        ("tests.rollouts:Nothing", "has no 'Nothing'"),
    ],
)
def test_a_loop_that_cannot_be_found_is_a_mistake_before_anything_starts(path, says):
    with pytest.raises(ConfigError, match=says):
        attempt(rollout(default_agent_loop=path), say(FINAL))


def test_a_row_imports_nothing_that_the_config_does_not_name():
    path = f"{__name__}:Twice"
    failed = attempt(rollout(), say("A"), task(agent=path))
    assert failed.outcome.boundary == "loop"
    assert "rollout.agent.loops" in failed.outcome.detail
    assert attempt(rollout(allow_imports_from_data=True), say("A", "B"), task(agent=path)).num_turns == 2
    named = rollout(loops={"twice": AgentLoopConfig(path=path)})
    assert attempt(named, say("A", "B"), task(agent="twice")).num_turns == 2


class Broken(AgentLoopBase):
    async def run(self, session: Session) -> None:
        await session.generate()
        raise KeyError("a bug of the loop")


def test_a_loop_that_breaks_fails_its_trajectory_at_its_own_boundary_and_keeps_the_tokens():
    trajectory = attempt(rollout(default_agent_loop=f"{__name__}:Broken"), say(FINAL))
    assert (trajectory.outcome.boundary, trajectory.num_turns) == ("loop", 1)
    assert "a bug of the loop" in trajectory.outcome.detail
    assert "test_agent_loops.py" in trajectory.outcome.detail


class Guess:
    """Thinks of a number; scores every guess."""

    closed = 0

    def __init__(self, task, number: int = 3) -> None:
        self.number = number

    async def step(self, messages):
        guess = int(messages[-1]["content"])
        return (
            Reply(None, 1.0) if guess == self.number else Reply("too low" if guess < self.number else "too high", 0.0)
        )

    def close(self) -> None:
        Guess.closed += 1


def test_an_environment_answers_scores_turns_and_is_always_closed():
    Guess.closed = 0
    config = rollout(default_agent_loop="environment_agent", environment=f"{__name__}:Guess")
    trajectory = attempt(config, say("1", "5", "3"))
    assert [message["content"] for message in trajectory.messages[1:]] == ["1", "too low", "5", "too high", "3"]
    assert trajectory.extra["turn_rewards"] == (0.0, 0.0, 1.0)
    assert [turn.reward for turn in trajectory.rows[0].turns] == [0.0, 0.0, 1.0]
    assert trajectory.outcome.reason is StopReason.STOP
    failed = attempt(config, say("not a number"))
    assert failed.outcome.boundary == "environment"
    assert Guess.closed == 2


class Turns(AgentLoopBase):
    """Turns without end, and seconds of the loop's own before and after each of them."""

    def __init__(self, rollout: RolloutConfig, before_s: float = 0.0, after_s: float = 0.0) -> None:
        super().__init__(rollout)
        self.before_s, self.after_s = before_s, after_s

    async def run(self, session: Session) -> None:
        while not session.done:
            await asyncio.sleep(self.before_s)
            await session.generate()
            await asyncio.sleep(self.after_s)
            await session.observe("go on")


def turns(engine_s: float, **kwargs: float) -> Trajectory:
    """What a minute of such turns comes to; an answer takes `engine_s`. No clock but a virtual one."""
    loops = {"turns": AgentLoopConfig(path=f"{__name__}:Turns", kwargs=kwargs)}
    config = rollout(default_agent_loop="turns", loops=loops, limits=LimitsConfig(session_timeout_s=60))
    return attempt(config, engine(say("x"), latency_s=engine_s), run=virtual_time.run)


def test_a_session_past_its_deadline_is_truncated_and_keeps_its_tokens():
    trajectory = turns(engine_s=7.0, after_s=3.0)
    assert (trajectory.outcome.status, trajectory.outcome.reason) == (Status.TRUNCATED, StopReason.DEADLINE)
    assert trajectory.num_turns == 6 and trajectory.num_sampled > 0


@pytest.mark.parametrize("kwargs", [{"after_s": 3600.0}, {"after_s": 7.0}, {"before_s": 3600.0}])
def test_a_deadline_that_passed_in_the_loops_own_code_is_the_loops_failure(kwargs):
    outcome = turns(engine_s=3.0, **kwargs).outcome
    assert outcome.boundary == "loop"
    assert "the loop's own code took" in outcome.detail and "session_timeout_s = 60" in outcome.detail
    assert "test_agent_loops.py:" in outcome.detail


def test_a_loop_that_does_not_say_that_it_was_cut_off_has_failed_too():
    class Swallows(AgentLoopBase):
        async def run(self, session: Session) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    globals()["Swallows"] = Swallows
    config = rollout(default_agent_loop=f"{__name__}:Swallows", limits=LimitsConfig(session_timeout_s=60))
    assert attempt(config, say(FINAL), run=virtual_time.run).outcome.boundary == "loop"


def test_a_deadline_before_the_first_token_is_the_engines_failure():
    assert turns(engine_s=3600.0).outcome.boundary == "engine"


def test_a_draft_that_waits_for_the_engine_is_not_the_loops_doing():
    class Drafts(AgentLoopBase):
        async def run(self, session: Session) -> None:
            first, second = (session.fork(session.messages) for _ in range(2))
            await first.generate()
            await asyncio.gather(second.generate(), asyncio.sleep(1))

    globals()["Drafts"] = Drafts
    config = rollout(default_agent_loop=f"{__name__}:Drafts", limits=LimitsConfig(session_timeout_s=60))
    made = engine(say("x"))
    answer = made.generate

    async def late(request):
        await asyncio.sleep(3600 if request.row == 2 else 0)
        return await answer(request)

    made.generate = late
    assert attempt(config, made, run=virtual_time.run).outcome.boundary == "engine"


@pytest.mark.parametrize("choice", ["error", "drop", "truncate_left", "truncate_right", "truncate_middle"])
def test_an_overlong_prompt_is_handled_as_the_config_says(choice):
    result = attempt(rollout(prompt_length=5, overlong_prompts=choice), say(FINAL))
    if choice == "drop":
        assert isinstance(result, Dropped)
    elif choice == "error":
        assert result.outcome.boundary == "prompt"
        assert "rollout.prompt_length is 5" in result.outcome.detail
    else:
        assert len(result.rows[0].prompt_ids) == 5
        assert result.extra["prompt_tokens_cut"] > 0
