"""Answers that are programs: no built-in reward compiles or evaluates the text of a model, whatever the data set."""

import json
import subprocess
import sys

import pytest

PROGRAM = r"""
import json, sys
import reasoning_gym
from reasoning_gym.factory import DATASETS
from treadle.reward.builtin import math, reasoning_gym as gym
from treadle.types import Task

math.prepare(), gym.prepare()
MARK = "treadle_was_here"
HOSTILE = [
    f"__import__('builtins').setattr(__import__('sys'), '{MARK}', 1)",
    f"[__import__('builtins').setattr(__import__('sys'), '{MARK}', 1)]",
    f"(lambda {MARK}: {MARK})(1)",
    f"x + {MARK}.real",
    f"\\boxed{{ {MARK}.real }}", f"$ {MARK}.real $", f"answer: {MARK}.real",
    "2*(3+4)*5 - 6",
]
ran = []

def mentions(code):
    names = {*code.co_names, *code.co_varnames, *map(str, code.co_consts)}
    return any(MARK in name for name in names) or code.co_filename == "<string>"

def hook(event, arguments):
    if event == "exec" and watching and mentions(arguments[0]):
        ran.append([watching[-1], repr(arguments[0])])

sys.addaudithook(hook)
watching, tried = [], 0
for name in json.loads(sys.argv[1]):
    entry = reasoning_gym.create_dataset(name, size=1, seed=1)[0]
    for text in HOSTILE:
        watching.append(name)
        try:
            gym.score(text, Task("t", (), entry["answer"], name, extra={"entry": entry}))
        except Exception:
            pass
        tried += 1
        watching.clear()
for text in HOSTILE:
    watching.append("math")
    math.score(text, "3")
    watching.clear()
print(json.dumps({"tried": tried, "ran": ran, "set": hasattr(sys, MARK)}))
"""

EVALUATING = [
    "countdown",
    "puzzle24",
    "polynomial_multiplication",
    "simple_integration",
    "intermediate_integration",
    "binary_matrix",
    "spiral_matrix",
    "string_insertion",
    "n_queens",
    "coin_flip",
]


def test_no_built_in_runs_an_answer() -> None:
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("math_verify")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(EVALUATING)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tried"] == 8 * len(EVALUATING)
    assert (found["ran"], found["set"]) == ([], False)
