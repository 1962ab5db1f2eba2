"""Reading a judge's answer: the last score counts, and what holds none is never a number."""

import asyncio
from typing import Any

import pytest

from tests.reward_models import make_task, make_trajectory
from treadle.config import ModelConfig
from treadle.config.reward import JudgeConfig, RewardConfig
from treadle.errors import ConfigError
from treadle.reward.judge import ScoreExtractor
from treadle.reward.judge_parser import JudgeParser
from treadle.reward.result import Fault, ScoreFailure
from treadle.types import Score

HERE = __name__


def read(text: str, **keys: Any) -> Score:
    async def main() -> Score:
        judge = JudgeConfig(prompt="?", **keys)
        reading = ScoreExtractor.create(judge, await JudgeParser.create("fair", judge, RewardConfig(num_workers=0)))
        (score,) = await reading.read(text, make_task(), (make_trajectory(),))
        return score

    return asyncio.run(main())


def fail(text: str, **keys: Any) -> ScoreFailure:
    with pytest.raises(ScoreFailure) as caught:
        read(text, **keys)
    return caught.value


def parse(text: str, ground_truth: str) -> dict[str, Any] | None:
    return {"score": 1.0, "quoted": text} if ground_truth in text else None


async def parse_later(text: str) -> float:
    await asyncio.sleep(0)
    return float(len(text))


def broken(text: str) -> float:
    raise KeyError("no such thing")


def takes_no_text(response: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 7.0),
        ("good.\n**Score:** 7/10", 7.0),
        ("Score: **0.5**", 0.5),
        ("score = -1.25.", -1.25),
        ("at first Score: 3, on reflection\nScore: 8", 8.0),
    ],
)
def test_a_score_line_is_read_without_further_keys(text, score):
    assert read(text).value == score


@pytest.mark.parametrize(
    "text", ["", "I cannot judge this.", "Score: high", "Score (1-10): seven", "Score: nan", "Score: 1e999", "7"]
)
def test_an_answer_without_a_score_is_a_failure_and_never_zero(text):
    failure = fail(text)
    assert failure.fault is Fault.UNREADABLE
    assert not failure.fault.may_pass, "the judge itself draws again, with another seed"


def test_a_failure_quotes_the_end_of_the_answer():
    assert "the very end" in str(fail("x" * 1000 + "the very end"))


def test_words_have_scores():
    keys: dict[str, Any] = {"pattern": r"Verdict: (\w+)", "words": {"yes": 1.0, "No": 0.0}}
    assert read("Verdict: no. Or rather: Verdict: YES", **keys).value == 1.0
    assert read("Verdict: no", **keys).value == 0.0
    assert "none of its words" in str(fail("Verdict: maybe", **keys))


def test_a_named_group_or_the_whole_match_can_hold_the_score():
    assert read("a 3 b 4", pattern=r"a (\d) b (?P<score>\d)").value == 4.0
    assert read("a 3 b 4", pattern=r"\d").value == 4.0


def test_a_score_outside_its_bounds_cannot_be_read():
    assert read("Score: 10", bounds=(0, 10)).value == 10.0
    assert "outside bounds 0 to 10" in str(fail("Score: 11", bounds=(0, 10)))


def test_a_pattern_that_explodes_is_a_timeout():
    assert fail("a" * 40 + "b", pattern=r"^(a|a)+$").fault is Fault.TIMEOUT


def test_a_parser_takes_the_text_and_what_reward_functions_take():
    score = read("it is 42", parser=f"{HERE}:parse")
    assert (score.value, score.extra) == (1.0, {"quoted": "it is 42"})
    assert fail("it is 43", parser=f"{HERE}:parse").fault is Fault.UNREADABLE


def test_a_parser_may_be_async_and_its_bugs_are_failures():
    assert read("abc", parser=f"{HERE}:parse_later").value == 3.0
    assert fail("abc", parser=f"{HERE}:broken").fault is Fault.EXCEPTION


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"pattern": "("}, "pattern"),
        ({"parser": "no.such:thing"}, "parser"),
        ({"parser": f"{HERE}:takes_no_text"}, "parser"),
    ],
)
def test_what_cannot_read_answers_is_a_mistake_before_the_first_score(keys, key):
    with pytest.raises(ConfigError) as caught:
        read("Score: 1", **keys)
    assert [mistake.key for mistake in caught.value.mistakes] == [key]


def test_a_judge_has_a_model_section_of_its_own():
    assert JudgeConfig(prompt="?", path="there").model() == ModelConfig(path="there")
