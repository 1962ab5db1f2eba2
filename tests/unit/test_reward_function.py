"""Reward functions found by path, and what their signatures may ask for."""

from functools import partial
from typing import Any

import pytest

from treadle.config import DataConfig
from treadle.config.reward import REWARD_FUNCTIONS
from treadle.data.file_formats import TaskRow
from treadle.data.task_files import to_task
from treadle.errors import ConfigError
from treadle.reward.arguments import ALL_COLUMNS, collect_arguments
from treadle.reward.builtin import BUILTINS
from treadle.reward.function import load_function
from treadle.types import Outcome, StopReason, Task, Trajectory

HERE = __name__


def wants_little(response: str, bonus: float = 0.0) -> float:
    return len(response) + bonus


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> float:
    return float(solution_str == ground_truth) + len(kwargs)


def wants_the_moon(response: str, moon: str) -> float:
    return 0.0


def two_columns(response: str, solution: str, level: int, mood: str = "none") -> Any:
    return response, solution, level, mood


def any_columns(response: str, **kwargs: Any) -> Any:
    return response, kwargs


def of_the_prompt(prompt: Any, solution: str) -> Any:
    return prompt, solution


def sees_all(responses: list[str]) -> list[float]:
    return [0.0 for _ in responses]


bound = partial(wants_the_moon, moon="full")


def say(text: str) -> Trajectory:
    messages = ({"role": "assistant", "content": text},)
    return Trajectory("a:1", 0, (), Outcome.ended(StopReason.STOP), messages=messages)


def by_position(response: str, /) -> float:
    return 0.0


def check_refused(path: str, kwargs: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_function("it", path, kwargs or {})
    return str(caught.value)


def test_a_function_gets_what_it_names_and_its_kwargs() -> None:
    function = load_function("it", f"{HERE}:wants_little", {"bonus": 0.5})
    assert (function.needs, function.required) == (("response",), ("response",))
    assert function({"response": "abc", "task": None}) == 3.5


def test_verls_shape_fits_as_it_is() -> None:
    function = load_function("it", f"{HERE}:compute_score", {"sandbox_url": "x"})
    assert function.required == ("data_source", "solution_str", "ground_truth")
    assert function.needs == (*function.required, "extra_info", ALL_COLUMNS)
    assert function({"data_source": "", "solution_str": "4", "ground_truth": "4", "extra_info": {}}) == 2.0


def test_a_parameter_of_another_name_is_a_column() -> None:
    function = load_function("it", f"{HERE}:wants_the_moon", {})
    assert function.required == ("response", "moon")
    assert load_function("it", f"{HERE}:wants_the_moon", {"moon": "full"}).required == ("response",)
    assert load_function("it", f"{HERE}:bound", {}).needs == ("response",), "a partial function has its own"
    assert load_function("it", "number_match", {}).needs == ("response", "ground_truth"), "built-ins take no columns"


def test_columns_fill_parameters_of_their_names() -> None:
    row = {"prompt": "1+1=", "solution": "2", "level": 3, "response": "two"}

    def given(path: str, data: DataConfig) -> Any:
        task = to_task(TaskRow("a:1", "a:1", row), data)
        names = load_function("it", f"{HERE}:{path}", {}).needs
        return load_function("it", f"{HERE}:{path}", {})(collect_arguments(names, task, say("4")))

    for data in (DataConfig(), DataConfig(answer_key="solution")):
        assert given("two_columns", data) == ("4", "2", 3, "none"), "and `response` is the model's"
        assert given("any_columns", data) == ("4", {"prompt": "1+1=", "solution": "2", "level": 3})
    assert given("of_the_prompt", DataConfig(prompt_key="solution")) == ("2", "2")


def test_a_prompt_is_text_or_messages() -> None:
    def prompt(*messages: Any) -> Any:
        return collect_arguments(["prompt"], Task("a", messages), say(""))["prompt"]

    asked, system = {"role": "user", "content": "1+1="}, {"role": "system", "content": "be brief"}
    assert prompt(asked) == prompt(system, asked) == "1+1="
    assert prompt(asked, {"role": "assistant", "content": "2"}, asked)[1]["content"] == "2"


def test_what_only_the_other_scope_sees_is_named() -> None:
    text = check_refused(f"{HERE}:sees_all")
    assert "takes 'responses', which only functions of scope group see" in text and "set scope: group" in text


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
