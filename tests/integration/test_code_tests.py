"""Programs that a model wrote are scored by running their tests, each in a fenced process."""

import json
import sys

import pytest

from treadle.reward.builtin import by_source, code_tests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fences are Linux's")

TESTS = {"inputs": ["1 2\n", "5 5\n", "-1 1\n"], "outputs": ["3\n", "10\n", "0\n"]}
RIGHT = "Here it is:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."


def test_a_program_is_scored_by_the_share_of_tests_it_passes() -> None:
    assert code_tests.score(RIGHT, json.dumps(TESTS)) == 1.0
    wrong = "```python\nprint(3)\n```"
    assert code_tests.score(wrong, TESTS) == pytest.approx(1 / 3)
    assert code_tests.score(wrong, TESTS, all_or_nothing=True) == 0.0
    assert by_source.score(RIGHT, TESTS, "taco") == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b):\n    return a + b",
        "class Solution:\n    def add(self, a, b):\n        print('talk')\n        return a + b",
    ],
)
def test_a_function_or_a_method_can_be_called(program: str) -> None:
    tests = {"fn_name": "add", "inputs": [[1, 2], [5, 5]], "outputs": [[3], 10]}
    assert code_tests.score(f"```py\n{program}\n```", tests) == 1.0


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "raise SystemExit(3)", "this is no program", "import os; os._exit(0)", "print(10**10**10)"],
)
def test_a_program_that_does_not_answer_has_not_passed(program: str) -> None:
    assert code_tests.score(program, {"inputs": ["1 2"], "outputs": ["3"]}, timeout_s=2.0) == 0.0


def test_what_is_expected_is_nowhere_near_the_program() -> None:
    spy = "import os, sys\nfor name in ('environ', 'cmdline'):\n    print(open(f'/proc/{os.getppid()}/{name}').read())"
    assert code_tests.score(spy, {"inputs": [""], "outputs": ["secret-answer"]}, timeout_s=5.0) == 0.0


@pytest.mark.parametrize(("truth", "why"), [("{}", "no inputs"), ({"inputs": ["1"], "outputs": []}, "1 inputs and 0")])
def test_a_ground_truth_without_tests_is_an_error(truth: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        code_tests.score(RIGHT, truth)
