"""Hostile outputs through all that reads or prints what a model wrote; `bench/hostile_text.py` makes more of them."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.chaos import ROOT
from tests.hostile import attack
from treadle.reward.builtin import code_tests
from treadle.sandbox.protocol import ExecResult
from treadle.types import Task


def test_nothing_breaks_and_nothing_escapes() -> None:
    targets = ("parsers", "renderer", "templates", "rewards", "terminal", "transcript")
    report = attack(1500, seed=7, targets=(*targets, "stream", "dialects", "code_tests"))
    assert report.texts == 1500
    assert not report.broken, "\n".join(report.broken[:5])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that a package leaves open
def test_nothing_breaks_in_mathematics_in_scorers_of_others_and_on_the_console() -> None:
    pytest.importorskip("math_verify")
    pytest.importorskip("reasoning_gym")
    report = attack(400, seed=7, targets=("math", "reasoning_gym", "show", "pages"))
    assert not report.broken, "\n".join(report.broken[:5])
    assert not report.ended


def test_texts_are_shared_by_jobs_and_told_in_one_table() -> None:
    command = [sys.executable, "bench/hostile_text.py", "--count", "101", "--jobs", "2", "--targets", "parsers", "show"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    first, *rows = done.stdout.splitlines()
    assert first.startswith("101 texts, ") and [row.split()[0] for row in rows] == ["parsers", "show"]


def test_a_program_that_prints_deep_lists_has_not_passed_and_the_grader_goes_on() -> None:
    printed = ExecResult(0, b"[" * 100_000)
    program = code_tests.Program("", code_tests.LANGUAGES["python"], "f", 1.0, code_tests.TOLERANCE)
    assert not program._is_expected(printed, [42])


def test_blanks_after_a_fence_are_read_once() -> None:
    """Quadratic work would take a minute of CPU time here; the limit is far from both."""
    began = time.process_time()
    code_tests.read_program("```" + " " * 100_000)
    assert time.process_time() - began < 10
    assert code_tests.read_program("```  c++  \nA\n``` b\n```\nB") == "B"


def test_an_answer_that_a_scorer_cannot_read_is_wrong_and_an_entry_that_it_cannot_read_is_a_failure() -> None:
    pytest.importorskip("reasoning_gym")
    from reasoning_gym import create_dataset

    from treadle.reward.builtin import reasoning_gym

    reasoning_gym.prepare()
    entry = create_dataset("prime_factorization", size=1, seed=1)[0]
    task = Task("t", (), entry["answer"], data_source="reasoning_gym:prime_factorization", extra={"entry": entry})
    assert reasoning_gym.score(f"<answer>{entry['answer']}</answer>", task) == 1.0
    assert reasoning_gym.score("<answer>two times seven</answer>", task) == 0.0
    broken = replace(task, extra={"entry": {**entry, "answer": "no numbers"}})
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym.score("<answer>two times seven</answer>", broken)
