"""Environments of the full protocol: prompt, tools, rewards by turn, the end of the episode, deadlines, failures."""

import asyncio
import threading
from typing import Any

import pytest

from tests.rollouts import engine, renderer, rollout, say, task
from treadle.config import ModelConfig
from treadle.config.reward import RewardConfig
from treadle.errors import EnvironmentFailure
from treadle.reward.scorer import Scorer
from treadle.rollout import Action, Opening, Reply, Step
from treadle.rollout.environment import read_opening, read_step
from treadle.rollout.environments.gymnasium_adapter import compile_names
from treadle.rollout.protocol import Dropped, Job
from treadle.rollout.worker import AgentLoopWorker
from treadle.types import SamplingParams, StopReason, Task, ToolResult, ToolStatus, Trajectory

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look into a direction.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
    },
}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def play(environment: str, script: Any, item: Task | None = None, **fields: Any) -> Trajectory | Dropped:
    config = rollout(default_agent_loop="environment_agent", environment=f"{__name__}:{environment}", **fields)

    async def main() -> Trajectory | Dropped:
        worker = await AgentLoopWorker.create(
            rollout=config, model=ModelConfig(path="unused"), engine=engine(script), renderer=renderer()
        )
        try:
            sampling = SamplingParams(config.response_length, stop_token_ids=renderer().stop_token_ids)
            return await worker.run(Job(item or task(), 0, sampling))
        finally:
            await worker.close()

    return asyncio.run(main())


class Doors:
    """Three doors; writes its own prompt and counts what is left of it."""

    closed = 0

    def __init__(self, door: int = 2, seed: int = 0) -> None:
        self.door = door + seed

    def reset(self, task: Task) -> Opening:
        return Opening([{"role": "system", "content": "Doors."}, {"role": "user", "content": f"{task.uid}: which?"}])

    def step(self, action: Action) -> Step:
        right = int(action.text) == self.door
        return Step("no", -0.5, info={"tries": len(action.messages) // 2}) if not right else Step((), 1.0, done=True)

    def close(self) -> None:
        Doors.closed += 1


class AsyncDoors(Doors):
    async def reset(self, task: Task) -> Opening:  # type: ignore[override]
        return super().reset(task)

    async def step(self, action: Action) -> Step:  # type: ignore[override]
        return super().step(action)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


@pytest.mark.parametrize("environment", ["Doors", "AsyncDoors"])
def test_an_environment_writes_the_prompt_scores_turns_and_ends_the_episode(environment):
    Doors.closed = 0
    played = play(environment, say("1", "2"), environment_kwargs={"door": 2})
    assert [m["content"] for m in played.messages] == ["Doors.", "one: which?", "1", "no", "2"]
    assert played.rows[0].prompt_ids == renderer().prompt(played.messages[:2])
    assert [turn.reward for turn in played.rows[0].turns] == [-0.5, 1.0]
    assert played.extra["turn_rewards"] == (-0.5, 1.0) and played.extra["environment"] == {"tries": 1}
    assert played.outcome.reason is StopReason.STOP and Doors.closed == 1


def test_rewards_by_turn_reach_the_score():
    played = play("Doors", say("1", "2"))

    async def score():
        scorer = await Scorer.create(RewardConfig())
        try:
            return await scorer.score(task(), played)
        finally:
            await scorer.close()

    scored = asyncio.run(score())
    assert scored.value == 0.5 and scored.parts["environment"] == 0.5


def test_a_task_without_a_prompt_is_the_environments_to_ask():
    item = Task("seeds:1", (), environment_kwargs={"seed": 1})
    played = play("Doors", say("3"), item)
    assert played.messages[1]["content"] == "seeds:1: which?" and played.outcome.ok


class Silent:
    def reset(self, task: Task) -> None:
        return None

    def step(self, action: Action) -> Step:
        return Step(done=True)


def test_no_prompt_at_all_is_a_failure_of_the_prompt():
    assert play("Silent", say("x"), Task("t", ())).outcome.boundary == "prompt"
    assert play("Silent", say("x")).messages[0]["content"] == "Task one"


@pytest.mark.parametrize(("what", "boundary"), [("error", "prompt"), ("drop", None), ("truncate_left", None)])
def test_a_long_prompt_of_an_environment_is_treated_as_a_tasks(what, boundary):
    played = play("Doors", say("2"), prompt_length=5, overlong_prompts=what)
    if what == "drop":
        assert isinstance(played, Dropped) and "rollout.prompt_length is 5" in played.detail
    elif boundary:
        assert played.outcome.boundary == boundary and "rollout.prompt_length is 5" in played.outcome.detail
    else:
        assert played.outcome.ok and len(played.rows[0].prompt_ids) == 5 and played.extra["prompt_tokens_cut"] > 0


class House:
    """Has a tool of its own beside those of the config."""

    def reset(self, task: Task) -> Opening:
        return Opening(None, [LOOK])

    def step(self, action: Action) -> Step:
        if not action.calls:
            return Step(reward=1.0, done=True)
        (one,) = action.calls
        seen = f"a {one.arguments['where']} wall"
        return Step([{"role": "tool", "name": one.name, "tool_call_id": one.id, "content": seen}], 0.25)


def test_the_environments_own_tools_are_shown_checked_and_called_in_a_step():
    wrong, unknown = call("look", '{"were": 1}'), call("see", "{}")
    played = play("House", say(wrong, unknown, call("look", '{"where": "red"}'), "done"))
    assert "look" in renderer().decode(played.rows[0].prompt_ids)
    told = [m["content"] for m in played.messages if m["role"] == "tool"]
    assert "missing: where" in told[0] and "Known tools: look" in told[1] and told[2] == "a red wall"
    turns = played.rows[0].turns
    assert [turn.results[0].status for turn in turns[:3]] == [ToolStatus.INVALID, ToolStatus.INVALID, ToolStatus.OK]
    assert turns[2].calls[0].arguments == {"where": "red"} and turns[2].results[0].text == "a red wall"
    assert [turn.reward for turn in turns] == [None, None, 0.25, 1.0]


def hand_in() -> ToolResult:
    """Hand in the result."""
    return ToolResult("done", extra={"submitted": True})


class Talkative:
    def reset(self, task: Task) -> None:
        return None

    def step(self, action: Action) -> Step:
        return Step("go on")


class TalkativeInShort:
    def __init__(self, task: Task) -> None: ...

    def step(self, messages: object) -> Reply:
        return Reply("go on")


@pytest.mark.parametrize("environment", ["Talkative", "TalkativeInShort"])
def test_what_is_handed_in_ends_the_task(environment):
    handed = call("hand_in", "{}")
    played = play(environment, say("x", handed, handed, handed), tools=("tests.unit.test_environment:hand_in",))
    assert played.outcome.ok and len(played.rows[0].turns) == 2
    assert played.rows[0].turns[1].results[0].extra == {"submitted": True}


def test_calls_of_both_kinds_in_one_turn_are_all_answered():
    both = call("add", '{"a": 1, "b": 2}') + call("look", '{"where": "blue"}')
    played = play("House", say(both, "done"), tools=("tests.rollouts:add",))
    assert [m["content"] for m in played.messages if m["role"] == "tool"] == ["3", "a blue wall"]
    assert [result.text for result in played.rows[0].turns[0].results] == ["3", "a blue wall"]


def test_a_tool_name_that_is_taken_is_the_environments_failure():
    played = play("Adds", say("x"), tools=("tests.rollouts:add",))
    assert played.outcome.boundary == "environment" and "'add'" in played.outcome.detail


class Adds(House):
    def reset(self, task: Task) -> Opening:
        return Opening(None, [{"type": "function", "function": {"name": "add"}}])


class Maps:
    """What an environment of another interpreter returns."""

    def reset(self, task):
        return {"messages": "Which?"}

    def step(self, action):
        return {"messages": "no", "reward": 0} if action.text == "1" else {"done": True, "reward": 1}


def test_maps_stand_for_records():
    played = play("Maps", say("1", "2"))
    assert [m["content"] for m in played.messages] == ["Which?", "1", "no", "2"]
    assert [turn.reward for turn in played.rows[0].turns] == [0.0, 1.0]


class Stuck:
    """Hangs in its constructor or in `reset`, until the test lets it go."""

    let_go = threading.Event()
    closed = threading.Event()

    def __init__(self, place: str) -> None:
        self.place = place
        self._at("constructor")

    def _at(self, place: str) -> None:
        if self.place == place:
            assert self.let_go.wait(60)

    def reset(self, task: Task) -> Opening:
        self._at("reset")
        return Opening("go")

    def step(self, action: Action) -> Step:
        return Step(done=True)

    def close(self) -> None:
        self.closed.set()


@pytest.mark.parametrize("place", ["constructor", "reset"])
def test_setup_has_a_deadline_and_what_was_set_up_is_closed(place):
    Stuck.let_go.clear(), Stuck.closed.clear()
    played = play("Stuck", say("x"), environment_kwargs={"place": place}, environment_timeout_s=0.05)
    Stuck.let_go.set()
    assert played.outcome.boundary == "environment"
    assert "gave no answer within rollout.multi_turn.environment_timeout_s = 0.05" in played.outcome.detail
    assert Stuck.closed.wait(60)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (3, "step returned int; it must return Step"),
        ({"message": "x"}, "'message', which is no field of Step"),
        (Step(), "no messages for the model, and it is not done"),
        (Step("x", float("nan")), "reward must be a finite number"),
        (Step("x", "1"), "reward must be a finite number"),  # type: ignore[arg-type]
        (Step([{"role": "assistant", "content": "I"}]), "a role (system, user, tool)"),
        (Step(done=1), "done must be true or false"),  # type: ignore[arg-type]
        (Step("x", info={"seen": {1, 2}}), "info['seen'] is no JSON value"),
    ],
)
def test_what_is_no_step_is_a_failure_that_names_the_field(value, problem):
    with pytest.raises(EnvironmentFailure) as caught:
        read_step(value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Opening([]), "messages is empty"),
        (Opening("x", [{"name": "f"}]), "tools must be schemas"),
        ("text", "reset returned str; it must return Opening"),
    ],
)
def test_what_is_no_opening_is_a_failure_that_names_the_field(value, problem):
    with pytest.raises(EnvironmentFailure) as caught:
        read_opening(value)
    assert problem in str(caught.value)


def test_gymnasium_actions_are_found_as_words_of_a_text():
    pattern = compile_names(["up", "up left", "+", "stay_here"])
    assert pattern.findall("i support that, and upward too") == []
    assert pattern.findall("up, then up left; stay_here!") == ["up", "up left", "stay_here"]
    assert pattern.findall("go+up") == ["+", "up"]
