"""Hostile outputs through all that reads or prints what a model wrote; `bench/hostile_text.py` makes more of them."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.chaos import ROOT
from tests.hostile import attack
from treadle.types import Task


def test_nothing_breaks_and_nothing_escapes() -> None:
    report = attack(1500, seed=7, targets=("parsers", "renderer", "templates", "rewards", "terminal", "transcript"))
    assert report.texts == 1500
    assert not report.broken, "\n".join(report.broken[:5])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that a package leaves open
def test_nothing_breaks_in_mathematics_in_scorers_of_others_and_on_the_console() -> None:
    pytest.importorskip("math_verify")
    pytest.importorskip("reasoning_gym")
    report = attack(400, seed=7, targets=("math", "reasoning_gym", "show"))
    assert not report.broken, "\n".join(report.broken[:5])
    assert not report.ended


def test_texts_are_shared_by_jobs_and_told_in_one_table() -> None:
    command = [sys.executable, "bench/hostile_text.py", "--count", "101", "--jobs", "2", "--targets", "parsers", "show"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    first, *rows = done.stdout.splitlines()
    assert first.startswith("101 texts, ") and [row.split()[0] for row in rows] == ["parsers", "show"]


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
