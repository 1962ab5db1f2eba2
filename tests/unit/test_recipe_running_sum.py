"""The sums of the recipe running_sum, and who reads them out."""

import builtins
from importlib.util import find_spec

import pytest

from treadle.errors import ConfigError
from treadle.recipes.running_sum import tasks
from treadle.recipes.running_sum.environment import Reader
from treadle.recipes.running_sum.tasks import train, validation
from treadle.types import Task

gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
TASK = Task("sum", ({"role": "user", "content": "5+2="},))


def reply(reader, text):
    return reader.step(({"role": "user", "content": "?"}, {"role": "assistant", "content": text})).text


def spelled(row):
    """The sum as it is read out when every answer is right."""
    expression = row["prompt"].removesuffix("=") + "".join(row["environment_kwargs"]["rest"])
    return expression, eval(expression)


@gym
def test_every_sum_comes_to_its_answer():
    rows = list(train(64))
    assert len({row["uid"] for row in rows}) == 64
    assert {row["data_source"] for row in rows} == {"2 terms", "3 terms", "4 terms"}
    assert all(str(spelled(row)[1]) == row["answer"] for row in rows)


@gym
def test_training_and_validation_share_no_sum_and_are_the_same_each_time():
    learned, held_out = list(train(256)), list(validation(32))
    assert not {row["uid"] for row in learned} & {row["uid"] for row in held_out}
    assert list(train(256)) == learned
    assert list(train(256, seed=1)) != learned


@gym
def test_every_total_on_the_way_can_be_read():
    for row in train(128):
        first, *rest = row["prompt"].removesuffix("="), *row["environment_kwargs"]["rest"]
        total = eval(first)
        for term in rest:
            assert total in tasks.READABLE
            total = eval(f"{total}{term}")


@gym
def test_more_sums_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr(tasks, "_SUPPLY", 1)
    with pytest.raises(ConfigError, match="different sums of up to 2 terms"):
        list(train(64, max_terms=2))


def test_without_reasoning_gym_the_error_says_what_to_install(monkeypatch):
    find = builtins.__import__

    def absent(name, *others):
        if name == "reasoning_gym":
            raise ImportError(name)
        return find(name, *others)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match="reasoning-gym"):
        list(train(1))


def test_the_reader_goes_on_from_what_the_agent_says():
    reader = Reader(TASK, rest=["-3", "+10"])
    assert reply(reader, "#### 7") == "7-3="
    assert reply(reader, "#### 5") == "5+10="  # wrong, and so will the end be
    assert reply(reader, "#### 15") is None


@pytest.mark.parametrize("text", ["", "seven", "7", "#### 12345678"])
def test_the_reader_stops_where_there_is_no_total_to_go_on_from(text):
    assert reply(Reader(TASK, rest=["-3"]), text) is None
