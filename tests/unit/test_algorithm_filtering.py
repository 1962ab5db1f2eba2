import pytest

from treadle.algorithm.filtering import has_signal
from treadle.errors import ConfigError
from treadle.types import Score


def scores(*values: float) -> list[Score]:
    return [Score(value, {"exact": round(value), "format": 1.0}) for value in values]


def test_rewards_that_differ_are_a_signal() -> None:
    assert has_signal(scores(0.0, 0.0, 1.0), "reward")


def test_rewards_that_are_equal_are_none() -> None:
    assert not has_signal(scores(1.0, 1.0, 1.0), "reward")


def test_one_survivor_or_none_has_no_signal() -> None:
    assert not has_signal(scores(1.0), "reward")
    assert not has_signal([], "reward")


def test_a_reward_function_can_be_what_must_differ() -> None:
    assert has_signal(scores(0.1, 0.9), "exact")
    assert not has_signal(scores(0.1, 0.9), "format")
    assert not has_signal(scores(0.1, 0.2), "exact")


def test_an_unknown_function_names_the_key_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.filter_groups\.metric.*\n.*did you mean 'format'"):
        has_signal(scores(0.1, 0.9), "fromat")
