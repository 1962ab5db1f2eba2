"""Reward functions found by path, and what their signatures may ask for."""

from typing import Any

import pytest

from treadle.config.reward import REWARD_FUNCTIONS
from treadle.errors import ConfigError
from treadle.reward.builtin import BUILTINS
from treadle.reward.function import load_function

HERE = __name__


def wants_little(response: str, bonus: float = 0.0) -> float:
    return len(response) + bonus


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> float:
    return float(solution_str == ground_truth) + len(kwargs)


def wants_the_moon(response: str, moon: str) -> float:
    return 0.0


def by_position(response: str, /) -> float:
    return 0.0


def check_refused(path: str, kwargs: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_function("it", path, kwargs or {})
    return str(caught.value)


def test_a_function_gets_what_it_names_and_its_kwargs() -> None:
    function = load_function("it", f"{HERE}:wants_little", {"bonus": 0.5})
    assert function.needs == ("response",)
    assert function({"response": "abc", "task": None}) == 3.5


def test_verls_shape_fits_as_it_is() -> None:
    function = load_function("it", f"{HERE}:compute_score", {"sandbox_url": "x"})
    assert function.needs == ("data_source", "solution_str", "ground_truth", "extra_info")
    assert function({"data_source": "", "solution_str": "4", "ground_truth": "4", "extra_info": {}}) == 2.0


def test_a_parameter_nothing_fills_is_named_with_what_could_be() -> None:
    text = check_refused(f"{HERE}:wants_the_moon")
    assert "wants_the_moon" in text and "'moon'" in text and "ground_truth" in text


def test_a_kwarg_the_function_does_not_take_is_named_with_the_nearest() -> None:
    text = check_refused(f"{HERE}:wants_little", {"bonsu": 1})
    assert "kwargs.bonsu" in text and "did you mean 'bonus'?" in text


def test_a_kwarg_cannot_replace_what_the_trajectory_gives() -> None:
    assert "filled from each trajectory" in check_refused(f"{HERE}:wants_little", {"response": "x"})


def test_a_positional_only_parameter_is_refused() -> None:
    assert "by position only" in check_refused(f"{HERE}:by_position")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("exact_mach", "is not an import path"),
        ("no.such.module:score", "there is no module 'no'"),
        (f"{HERE}:nothing_here", "has no 'nothing_here'"),
        (f"{HERE}:HERE", "is not callable"),
        ("builtins:max", "has no signature"),
    ],
)
def test_a_path_that_leads_nowhere_says_so(path: str, words: str) -> None:
    assert words in check_refused(path)


def test_the_config_knows_every_built_in() -> None:
    assert set(REWARD_FUNCTIONS) == set(BUILTINS)


def test_a_built_in_checks_its_own_arguments() -> None:
    assert "'pattern'" in check_refused("format")
    assert "refuses them" in check_refused("format", {"pattern": "("})
    assert "tolerance must be ≥ 0" in check_refused("number_match", {"tolerance": -1})


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("math_verify", "reasoning_gym"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    assert "treadle[math]" in check_refused("math")
    assert "treadle[reasoning-gym]" in check_refused("reasoning_gym")
