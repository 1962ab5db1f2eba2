"""The built-in functions that need no package: what counts as the answer, and what as the same."""

from decimal import Decimal
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.reward.builtin import by_source, exact_match, format, number_match, soft_overlong
from treadle.reward.builtin.exact_match import read_tag
from treadle.reward.result import ScoreFailure
from treadle.types import Outcome, Row, StopReason, Trajectory


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6 * 7 = 42\n#### 42", "42"),
        ("#### 1,234.50 dollars", "1234.5"),
        ("#### $-5", "-5"),
        ("#### -$5", "-5"),
        ("#### −3", "-3"),
        ("#### 42 (that is 6*7)", "42"),
        ("first #### 1 then #### 2", "2"),
        ("The answer is 42.", "42"),
        ("x = -7", "-7"),
        ("10-4", "4"),
        ("it grew by +3%", "3"),
        ("between 2019,2020", "2020"),
        ("1, 2, 3", "3"),
        ("1,2,3", "3"),
        ("12,345,678 people", "12345678"),
        ("2019,123", "123"),
        ("about .5 of it", "0.5"),
        ("-.5", "-0.5"),
        ("\\boxed{1,000}", "1000"),
        ("3.14.", "3.14"),
        ("007", "7"),
        ("$1,234.5", "1234.5"),
        ("costs -$20 in all", "-20"),
        ("#### none, so 9", "9"),
    ],
)
def test_the_answer_is_the_number_a_solution_ends_in(text: str, number: str) -> None:
    assert number_match.read_answer(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "no idea", "####", "-", "...", ","])
def test_a_text_without_a_number_has_no_answer_and_scores_nothing(text: str) -> None:
    assert number_match.read_answer(text) is None
    assert number_match.score(text, "42") == 0.0


def test_strict_wants_the_mark() -> None:
    assert number_match.score("the answer is 42", "42", strict=True) == 0.0
    assert number_match.score("#### 42", "42", strict=True) == 1.0


def test_the_ground_truth_may_be_a_whole_solution_or_a_bare_number() -> None:
    assert number_match.score("so 1,000", "Half of 2000 is <<2000/2=1000>>1000\n#### 1,000") == 1.0
    assert number_match.score("so 42.0", 42) == 1.0
    assert number_match.score("so 43", 42.0) == 0.0


def test_a_tolerance_allows_a_distance() -> None:
    assert number_match.score("3.14", "3.1416") == 0.0
    assert number_match.score("3.14", "3.1416", tolerance=0.01) == 1.0


def test_a_ground_truth_without_a_number_is_an_error_and_not_a_wrong_answer() -> None:
    with pytest.raises(ValueError, match="holds no number"):
        number_match.score("42", "many")


@given(st.integers(-(10**12), 10**12), st.integers(0, 99), st.sampled_from(["", ",", "."]), st.integers(0, 1200))
def test_a_written_number_is_read_back_wherever_the_tail_is_cut(whole: int, cents: int, end: str, words: int) -> None:
    text = f"{'1 x' * 9}so it is {whole:,}.{cents:02}{end}" + " y" * words
    assert number_match.read_answer(text) == Decimal(f"{whole}.{cents:02}")


@given(st.text(alphabet="0123456789,.-−+$# \nx)", max_size=1500))
def test_reading_the_tail_agrees_with_reading_the_whole_text(text: str) -> None:
    whole = number_match._BACKWARD.search(text[::-1])
    assert number_match._read_last(text) == (number_match._to_number(whole[0][::-1]) if whole else None)


@given(st.text(alphabet="0123456789<>/a#$ \n\x00é−٣😀", max_size=300))
def test_no_text_breaks_a_built_in(text: str) -> None:
    assert number_match.score(text, "42") in (0.0, 1.0)
    assert exact_match.score(text, "42", tag="answer") in (0.0, 1.0)
    assert format.score(text, r"(?s)^<a>.*</a>$") in (0.0, 1.0)


def test_a_megabyte_of_digits_is_read_in_linear_time() -> None:
    assert number_match.score("1," * 500_000, "1") == 1.0
    assert number_match.score("9" * 1_000_000, "1", tolerance=1.0) == 0.0


def test_exact_match_compares_letter_for_letter() -> None:
    assert exact_match.score(" Paris\n", "Paris") == 1.0
    assert exact_match.score("paris", "Paris") == 0.0
    assert exact_match.score("paris", "Paris", ignore_case=True) == 1.0
    assert exact_match.score("Lutetia", ["Paris", "Lutetia"]) == 1.0
    assert exact_match.score("42", 42) == 1.0


def test_exact_match_in_a_tag_takes_the_last_pair() -> None:
    assert exact_match.score("<answer>A</answer> no: <answer> B </answer>", "B", tag="answer") == 1.0
    assert exact_match.score("B", "B", tag="answer") == 0.0


@pytest.mark.parametrize("builtin", ["exact_match", "number_match", "math"])
def test_none_is_no_ground_truth(builtin: str) -> None:
    with pytest.raises(ValueError, match="the task has no ground truth"):
        import_module(f"treadle.reward.builtin.{builtin}").score("None", None)


def test_a_task_without_ground_truth_cannot_be_matched() -> None:
    with pytest.raises(ValueError, match="no ground truth"):
        exact_match.score("42", None)


@pytest.mark.parametrize("text", ["", "<a>", "</a>", "</a><a>", "<a", "<a>x"])
def test_an_incomplete_pair_of_tags_holds_nothing(text: str) -> None:
    assert read_tag(text, "a") is None


def test_format_searches_and_leaves_anchors_to_the_pattern() -> None:
    pattern = r"(?s)^<think>.*</think>\s*<answer>.*</answer>\s*$"
    assert format.score("<think>a\nb</think>\n<answer>42</answer>", pattern) == 1.0
    assert format.score("well: <think>a</think><answer>42</answer>", pattern) == 0.0
    assert format.score("the 42nd", r"\d+") == 1.0


def test_a_pattern_that_explodes_gives_up() -> None:
    with pytest.raises(ScoreFailure, match="characters for more than"):
        format.score("a" * 40 + "b", r"^(a|a)+$")


def test_a_wrong_pattern_is_refused_before_the_first_score() -> None:
    with pytest.raises(ValueError, match="pattern"):
        format.prepare("(")


@pytest.mark.parametrize(
    ("source", "response", "truth", "expected"),
    [
        ("openai/gsm8k", "so #### 1,024", "1024", 1.0),
        ("openai/gsm8k", "so it is 1024", "1024", 0.0),
        ("lighteval/MATH", "thus \\boxed{\\dfrac12}.", "\\frac{1}{2}", 1.0),
        ("HuggingFaceH4/MATH-500", "\\boxed{1} then \\boxed{12\\text{ cm}}", "12", 1.0),
        ("HuggingFaceH4/MATH-500", "thus 12", "12", 0.0),
        ("lighteval/MATH", "\\boxed{3\\sqrt2}", "so \\boxed{3\\sqrt{2}}", 1.0),
        ("numina_olympiads", "\\boxed{x=-3/4}", "-\\frac{3}{4}", 1.0),
        ("math_dapo", "Answer: 7\nAnswer: $8$", "8", 1.0),
        ("aime2025", "\\boxed{70}", "70", 1.0),
        ("math_dapo", "Answer: 7", "8", -1.0),
        ("math_dapo", "no idea", "8", -1.0),
        ("searchR1_nq", "<answer>The Eiffel Tower!</answer>", {"target": ["eiffel tower"]}, 1.0),
        ("searchR1_nq", "Eiffel Tower", {"target": ["eiffel tower"]}, 0.0),
    ],
)
def test_by_source_scores_as_the_data_set_does(source: str, response: str, truth: object, expected: float) -> None:
    assert by_source.score(response, truth, source) == expected


@pytest.mark.parametrize("source", ["mine", ""])
def test_by_source_refuses_a_source_without_a_rule_by_name(source: str) -> None:
    with pytest.raises(ValueError, match=f"no rule scores data source {source!r}"):
        by_source.score("x", "y", source)


@pytest.mark.parametrize(("sampled", "value"), [(0, 0.0), (60, 0.0), (70, -0.25), (100, -1.0), (500, -1.0)])
def test_an_answer_near_the_limit_is_punished_as_in_dapo(sampled: int, value: float) -> None:
    """By the paper: 0 up to L_max - L_cache, ((L_max - L_cache) - |y|) / L_cache up to L_max, then -1."""
    row = Row((1,), (7,) * (sampled + 2), (1,) * sampled + (0, 0), (0.0,) * (sampled + 2), (0,) * (sampled + 2))
    trajectory = Trajectory("t", 0, (row,), Outcome.ended(StopReason.STOP))
    assert soft_overlong.score(trajectory, max_length=100, buffer=40) == value


def test_a_punishment_without_a_slope_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer must lie between 1 and max_length 10, got 11"):
        soft_overlong.prepare(max_length=10, buffer=11)
