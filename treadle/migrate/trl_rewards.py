"""Reward functions of a TRL script as a file that treadle calls: a copy of each, and a function around it.

TRL gives a reward function lists: prompts, completions and every column of the data set; here a function scores one
answer. The functions around the copies call them with lists of one.
"""

import ast
from collections.abc import Sequence

from treadle.migrate.python_source import PythonScript

_HEAD = '''"""Reward functions of {script}, copied; around each a function that calls it for one answer as TRL does."""

import inspect
{copies}


CHAT = {chat}
"""Whether completions are lists of messages, as TRL gives them for chat data, or texts."""

ANSWER = "{answer}"
"""The column that data.answer_key names."""


def call_as_trl(function, task, trajectory, response):
    """What a function of TRL gives for one answer; None counts as 0, as it does there."""
    prompt = list(task.messages) if CHAT else task.messages[-1]["content"]
    completion = [{{"role": "assistant", "content": response}}] if CHAT else response
    ids = list(trajectory.rows[0].ids) if trajectory.rows else []
    given = {{**task.extra, ANSWER: task.ground_truth}}
    given |= {{"prompts": prompt, "completions": completion, "completion_ids": ids}}
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        given = {{parameter.name: given[parameter.name] for parameter in parameters if parameter.name in given}}
    (score,) = function(**{{name: [value] for name, value in given.items()}})
    return 0.0 if score is None else float(score)
'''

_AROUND = """

def {name}_score(task, trajectory, response):
    return call_as_trl({name}, task, trajectory, response)
"""

_TEST = '''"""Tests of the rewards: every function gives a number. Add answers that you know the score of."""

import pytest
from reward import {names}

from treadle.types import Outcome, StopReason, Task, Trajectory

COLUMNS = {columns}


@pytest.mark.parametrize("score", [{names}])
def test_a_score_is_a_number(score):
    task = Task("one", ({{"role": "user", "content": "3+4="}},), "7", extra=COLUMNS)
    trajectory = Trajectory("one", 0, (), Outcome.ended(StopReason.STOP))
    assert isinstance(score(task, trajectory, "#### 7"), float)
'''


def write_rewards(script: PythonScript, names: Sequence[str], columns: Sequence[str]) -> str:
    """The file `reward.py`."""
    copies = script.copy_definitions(list(names))
    answer = columns[0] if columns else "answer"
    head = _HEAD.format(script=script.path.name, copies=copies, chat=_reads_messages(script, names), answer=answer)
    return head + "".join(_AROUND.format(name=name) for name in names)


def write_reward_test(script: PythonScript, names: Sequence[str], columns: Sequence[str]) -> str:
    """The file `test_reward.py`."""
    wrapped = ", ".join(f"{name}_score" for name in names)
    return _TEST.format(names=wrapped, columns=repr(dict.fromkeys(columns[1:], "7")))


def _reads_messages(script: PythonScript, names: Sequence[str]) -> bool:
    """Whether some function reads `["content"]` of its completions, as those for chat data do."""
    functions = [script.function(name) for name in names]
    nodes = [node for function in functions if function is not None for node in ast.walk(function)]
    return any(isinstance(node, ast.Constant) and node.value == "content" for node in nodes)
