"""Answers and rows that are programs: no built-in reward compiles or evaluates their text, whatever the data set."""

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

def hostile_row(value, text):
    # every text in an entry replaced, and its shape kept
    if isinstance(value, dict):
        return {key: item if key == "source_dataset" else hostile_row(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile_row(item, text) for item in value]
    return text if isinstance(value, str) else value

watching, tried, left_out = [], [], []
for name in sorted(DATASETS):
    try:
        entry = reasoning_gym.create_dataset(name, size=1, seed=1)[0]
    except Exception:  # it needs a package, a file or arguments
        left_out.append(name)
        continue
    tried.append(name)
    good = entry["answer"] if isinstance(entry["answer"], str) else str(entry["answer"])
    pairs = [(text, entry) for text in HOSTILE]
    pairs += [(answer, hostile_row(entry, text)) for text in HOSTILE[:4] for answer in (good, "[1, 2]", "7")]
    for answer, row in pairs:
        watching.append(name)
        try:
            gym.score(answer, Task("t", (), row["answer"], name, extra={"entry": row}))
        except Exception:
            pass
        watching.clear()
for text in HOSTILE:
    watching.append("math")
    math.score(text, "3")
    watching.clear()
print(json.dumps({"tried": tried, "left_out": left_out, "ran": ran, "set": hasattr(sys, MARK)}))
"""


def test_no_built_in_runs_an_answer_or_a_row_of_any_data_set() -> None:
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("math_verify")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["ran"], found["set"]) == ([], False)
    assert len(found["tried"]) > 90 and len(found["left_out"]) <= 6, found["left_out"]
    evaluating = {"countdown", "puzzle24", "n_queens", "number_sorting", "bitwise_arithmetic", "simple_integration"}
    assert evaluating <= set(found["tried"])


@pytest.mark.parametrize(("answer", "right"), [("0x3eb2", 1.0), ("16050", 1.0), ("0b11", 0.0), ("eval('1')", 0.0)])
def test_bitwise_arithmetic_is_compared_with_the_answer_of_its_row(answer, right) -> None:
    pytest.importorskip("reasoning_gym")
    from treadle.reward.builtin import reasoning_gym
    from treadle.types import Task

    reasoning_gym.prepare()
    entry = {"answer": "0x3eb2", "metadata": {"problem": "((0x7d65 >> 0x2) << 0x1)"}}
    task = Task("t", (), "0x3eb2", "reasoning_gym:bitwise_arithmetic", extra={"entry": entry})
    assert reasoning_gym.score(f"<answer>{answer}</answer>", task) == right
