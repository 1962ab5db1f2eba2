"""All prompts of a run are looked at before it starts."""

import asyncio

import pytest

from tests.rollouts import renderer, rollout, task
from treadle.errors import ConfigError
from treadle.rollout.startup_checks import survey_prompts
from treadle.types import Task

LONG = {"role": "user", "content": "word " * 400}


def survey(tasks, **fields):
    return asyncio.run(survey_prompts(tasks, rollout(**fields), renderer()))


def tasks_with_one_too_long():
    long = task("long")
    return [task("a"), type(long)("long", (LONG,)), task("b")]


def test_prompts_that_fit_are_counted_and_the_longest_is_named():
    found = survey([task("a"), task("the longest of all of them")])
    assert (found.count, found.longest_uid, found.overlong) == (2, "the longest of all of them", ())
    assert found.note(rollout()) is None


def test_a_prompt_that_is_too_long_is_a_mistake_that_says_how_long():
    with pytest.raises(ConfigError) as refused:
        survey(tasks_with_one_too_long(), prompt_length=64)
    (mistake,) = refused.value.mistakes
    assert mistake.key == "rollout.prompt_length"
    assert "1 of 3 prompts is longer than 64 tokens; the longest, of long, has" in mistake.problem
    assert "overlong_prompts" in mistake.fix


@pytest.mark.parametrize(("choice", "says"), [("drop", "they are dropped"), ("truncate_left", "they are cut")])
def test_prompts_that_are_dropped_or_cut_are_told_before_the_start(choice, says):
    found = survey(tasks_with_one_too_long(), prompt_length=64, overlong_prompts=choice)
    assert found.overlong == ("long",)
    assert says in found.note(rollout(prompt_length=64, overlong_prompts=choice))


def test_rows_that_ask_for_what_does_not_exist_are_mistakes_together():
    with pytest.raises(ConfigError) as refused:
        survey([task("a", agent="os:system"), task("b", tools=("no_such_tool",)), task("c", agent="tool_agent")])
    assert [mistake.key for mistake in refused.value.mistakes] == ["task a", "task b"]
    assert "allow_imports_from_data" in str(refused.value)


def test_tools_count_as_part_of_the_prompt():
    alone, with_tools = survey([task()]).longest, survey([task()], tools=("tests.rollouts:add",)).longest
    assert with_tools > alone


def test_a_task_without_a_prompt_needs_an_agent_that_writes_one():
    seeds = [Task("seeds:0", (), environment_kwargs={"seed": 0})]
    with pytest.raises(ConfigError, match="has no prompt, and single_turn_agent writes none"):
        survey(seeds)
    assert survey(seeds, default_agent_loop="environment_agent", environment="x:Y").count == 1
