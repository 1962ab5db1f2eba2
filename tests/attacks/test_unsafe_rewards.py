"""Reward functions that run what they are given are sandboxed by default, and named before a run."""

import asyncio
import importlib
import subprocess
import sys

import cloudpickle
import pytest

from tests.reward_models import make_trajectory
from treadle.config import RewardConfig, RewardFunctionConfig
from treadle.config.reward import JudgeConfig, JudgeEngineConfig
from treadle.config.serialized import serialize
from treadle.reward.scorer import Scorer, refuse_unfenced
from treadle.reward.unsafe_calls import find_fenced, find_unsafe_calls
from treadle.types import Task

HELPER = "def check(text):\n    exec(text)\n    return 1.0\n"
"""The module `unsafe_helper`, which the functions below can import."""

UNSAFE = {
    "calls exec": "def score(response):\n    exec(response)\n    return 1.0\n",
    "calls eval": "def helper(text):\n    return eval(text)\n\ndef score(response):\n    return helper(response)\n",
    "calls compile": "def score(response):\n    return bool(compile(response, 'x', 'exec'))\n",
    "calls subprocess.run": "import subprocess\n\ndef score(response):\n    return subprocess.run(response)\n",
    "calls os.system": "import os\n\ndef score(response):\n    return os.system(response)\n",
}
"""What is found, and the function it is found in."""

SPELLINGS = {
    "from subprocess import run\n\ndef score(response):\n    return run(response)\n": "4 calls subprocess.run",
    "import subprocess as sp\n\ndef score(response):\n    return sp.Popen(response)\n": "4 calls subprocess.Popen",
    "def score(response):\n    from subprocess import check_output as c\n    return c(response)\n": "subprocess.check_",
    "from os import system\n\ndef score(response):\n    return system(response)\n": "4 calls os.system",
    "from os import *\n\ndef score(response):\n    return popen(response)\n": "4 calls os.popen",
    "import os\n\ndef score(response):\n    return os.spawnvp(os.P_WAIT, 'sh', ['sh', '-c', response])\n": "os.spawnvp",
    "import os\n\ndef score(response):\n    return getattr(os, 'system')(response)\n": "os.system",
    "import builtins\n\ndef score(response):\n    builtins.exec(response)\n": "4 calls exec",
    "def score(response):\n    __builtins__['exec'](response)\n": "2 calls exec",
    "def score(response):\n    run = exec\n    run(response)\n": " exec: ",
    "RUNNERS = {'python': exec}\n\ndef score(response):\n    RUNNERS['python'](response)\n": "1 uses exec",
    "def score(response):\n    return list(map(eval, [response]))\n": "2 uses eval",
    "def score(response):\n    return (lambda text: eval(text))(response)\n": "2 calls eval",
    "class Checker:\n    def run(self, text):\n        exec(text)\n\nchecker = Checker()\n\n"
    "def score(response):\n    checker.run(response)\n": "3 calls exec",
    "CHECKS = []\n\n@CHECKS.append\ndef check(text):\n    exec(text)\n\n"
    "def score(response):\n    CHECKS[0](response)\n": "5 calls exec",
    "def install():\n    global run\n    run = eval\n\ndef score(response):\n    return run(response)\n": " eval: ",
    "class Rewards:\n    @staticmethod\n    def score(response):\n        return eval(response)\n\n"
    "score = Rewards.score\n": "4 calls eval",
    "import sympy\n\ndef score(response):\n    return sympy.sympify(response) == 4\n": "4 calls sympy.sympify",
    "from sympy.parsing.sympy_parser import parse_expr\n\ndef score(response):\n    return parse_expr(response)\n": (
        "sympy.parsing.sympy_parser.parse_expr"
    ),
    "from sympy import S\n\ndef score(response):\n    return S(response) == 4\n": "4 calls sympy.S",
    "import asyncio\n\nasync def score(response):\n    return await asyncio.create_subprocess_shell(response)\n": (
        "asyncio.create_subprocess_shell"
    ),
    "import multiprocessing\n\ndef score(response):\n"
    "    multiprocessing.Process(target=print, args=(response,)).start()\n": "multiprocessing.Process",
    "import pandas as pd\n\ndef score(response):\n    return pd.eval(response)\n": "4 calls pandas.eval",
    "import pandas as pd\n\ndef score(response):\n    return pd.DataFrame().eval(response)\n": "DataFrame.eval",
    "import numexpr\n\ndef score(response):\n    return numexpr.evaluate(response)\n": "numexpr.evaluate",
    "import pickle\n\ndef score(response):\n    return pickle.loads(response.encode())\n": "pickle.loads",
    "import runpy\n\ndef score(response):\n    return runpy.run_path(response)\n": "runpy.run_path",
    "import code\n\ndef score(response):\n    code.InteractiveInterpreter().runsource(response)\n": "code.Interactive",
    "import pty\n\ndef score(response):\n    return pty.spawn(['sh', '-c', response])\n": "pty.spawn",
    "import importlib\n\ndef score(response):\n    importlib.import_module('os').system(response)\n": "os.system",
    "def score(response):\n    return __import__('subprocess').run(response)\n": "subprocess.run",
    "from unsafe_helper import check\n\ndef score(response):\n    return check(response)\n": "helper.py:2 calls exec",
    "import unsafe_helper as h\n\ndef score(response):\n    return h.check(response)\n": "helper.py:2 calls exec",
    "from unsafe_helper import *\n\ndef score(response):\n    return check(response)\n": "helper.py:2 calls exec",
    "from unsafe_helper import check as score\n": "helper.py:2 calls exec",
}
"""Functions, and what is found in each."""

SAFE = {
    "methods of those names": (
        "import re\n\ndef score(response):\n    return bool(re.compile('a').match(response)), model.eval()\n"
    ),
    "a shell that the function cannot reach": (
        "import os\nimport subprocess\nfrom functools import cache\n\nROOT = os.path.dirname(__file__)\n\n"
        "@cache\ndef revision():\n    return subprocess.run(['git', 'rev-parse', 'HEAD'])\n\n"
        "class Server:\n    def start(self):\n        self.process: subprocess.Popen = subprocess.Popen('x')\n\n"
        "def score(response: str) -> float:\n    return float(len(response))\n\n"
        "if __name__ == '__main__':\n    os.system('ls')\n"
    ),
    "constants and errors of subprocess": (
        "import subprocess\n\ndef score(response):\n    try:\n        return len(response)\n"
        "    except subprocess.TimeoutExpired:\n        return subprocess.PIPE\n"
    ),
    "names of its own": (
        "from re import compile\n\ndef eval(text):\n    return 1.0\n\n"
        "def score(response):\n    return eval(response) if compile('a').match(response) else 0.0\n"
    ),
    "a helper without one": ("from unsafe_helper import safe\n\ndef score(response):\n    return safe(response)\n"),
}


def describe_fences(path: str, **fields: object) -> list[str]:
    workers = int(fields.pop("num_workers", 1))  # type: ignore[call-overload]
    functions = {"mine": RewardFunctionConfig(path=path, **fields)}
    return list(find_fenced(RewardConfig(functions=functions, num_workers=workers)))


def warnings(path: str, **fields: object) -> list[str]:
    return list(find_unsafe_calls(RewardConfig(functions={"mine": RewardFunctionConfig(path=path, **fields)})))


@pytest.mark.parametrize("found", UNSAFE)
def test_a_call_that_runs_text_is_named_with_its_line_and_the_way_out(tmp_path, found):
    (tmp_path / "rewards.py").write_text(UNSAFE[found])
    (line,) = warnings(f"{tmp_path}/rewards.py:score", sandbox=False)
    where = UNSAFE[found][: UNSAFE[found].index(found.removeprefix("calls ") + "(")].count("\n") + 1
    assert f"rewards.py:{where} {found}" in line
    assert "reward.functions.mine.sandbox=true" in line and "run_python" in line
    assert warnings(f"{tmp_path}/rewards.py:score", sandbox=True) == []


@pytest.mark.parametrize("source", SPELLINGS)
def test_every_usual_spelling_is_found_where_the_function_can_reach_it(tmp_path, monkeypatch, source):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "unsafe_helper.py").write_text(HELPER)
    (tmp_path / "rewards.py").write_text(source)
    (line,) = warnings(f"{tmp_path}/rewards.py:score", sandbox=False)
    assert SPELLINGS[source] in line
    if sys.platform == "linux":
        assert len(describe_fences(f"{tmp_path}/rewards.py:score")) == 1


@pytest.mark.parametrize("what", SAFE)
def test_what_a_function_does_not_run_has_no_warning(tmp_path, monkeypatch, what):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "unsafe_helper.py").write_text(f"{HELPER}\ndef safe(text):\n    return 1.0\n")
    (tmp_path / "rewards.py").write_text(SAFE[what])
    path = f"{tmp_path}/rewards.py:score"
    assert warnings(path) == [] == describe_fences(path)


def test_a_built_in_has_no_warning_and_a_function_that_is_a_runner_itself_has_one():
    assert warnings("exact_match") == []
    assert "subprocess.getoutput runs text" in warnings("subprocess:getoutput", sandbox=False)[0]


def test_a_judges_parser_is_read_like_a_function(tmp_path):
    (tmp_path / "parsers.py").write_text("def read(text):\n    return eval(text)\n")
    judge = JudgeConfig(prompt="?", parser=f"{tmp_path}/parsers.py:read", engine=JudgeEngineConfig(name="scripted"))
    reward = RewardConfig(judges={"fair": judge}, num_workers=1)
    if sys.platform == "linux":
        assert list(find_fenced(reward)) == ["the parser of judge fair is sandboxed, since parsers.py:2 calls eval"]
    (line,) = find_unsafe_calls(RewardConfig(judges={"fair": judge}, num_workers=0))
    assert line.startswith("reward.judges.fair.parser: parsers.py:2 calls eval: ")


def runs_a_module(response: str) -> float:
    return float(subprocess.call(["true"]))


def runs_what_it_imports(response: str) -> list[object]:
    import os as system

    return [system.system(part) for part in response]


def runs_a_table(response: str) -> object:
    return {"run": exec}["run"](response)


class Caller:
    def __call__(self, response: str) -> object:
        return eval(response)


def runs_nothing(response: str) -> object:
    """Not exec, eval or subprocess."""
    import os

    return os.path.join(response, "exec"), subprocess.PIPE


PICKLED = {
    "subprocess.call": runs_a_module,
    "os.system": runs_what_it_imports,
    "exec": runs_a_table,
    "eval": Caller(),
    "compile": lambda response: compile(response, "x", "exec"),
}


@pytest.fixture
def by_value():
    """What this module defines is pickled as what a script or a notebook defines."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("found", PICKLED)
def test_a_function_of_a_script_is_read_from_its_pickle_which_is_not_loaded(tmp_path, by_value, found):
    (tmp_path / "score.pkl").write_bytes(cloudpickle.dumps(PICKLED[found]) + b"cos\n_exit\n(I9\ntR.")
    path = f"{tmp_path}/score.pkl:score"
    assert f"score.pkl uses {found}: " in warnings(path, sandbox=False)[0]
    if sys.platform == "linux":
        assert len(describe_fences(path)) == 1 and warnings(path) == []


def test_a_pickle_that_runs_nothing_has_no_warning(tmp_path, by_value):
    (tmp_path / "score.pkl").write_bytes(cloudpickle.dumps(runs_nothing))
    assert warnings(f"{tmp_path}/score.pkl:score") == []


def test_a_pickle_that_refers_to_a_module_is_followed_into_it(tmp_path, monkeypatch, by_value):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "unsafe_pickled.py").write_text(HELPER)
    check = importlib.import_module("unsafe_pickled").check
    (tmp_path / "score.pkl").write_bytes(cloudpickle.dumps(lambda response: check(response)))
    assert "unsafe_pickled.py:2 calls exec" in warnings(f"{tmp_path}/score.pkl:score", sandbox=False)[0]


@pytest.mark.parametrize("found", UNSAFE)
def test_a_function_with_such_a_call_is_sandboxed_unless_its_key_says_otherwise(tmp_path, found):
    (tmp_path / "rewards.py").write_text(UNSAFE[found])
    path = f"{tmp_path}/rewards.py:score"
    (line,) = describe_fences(path)
    assert found in line and "reward.functions.mine.sandbox=false" in line
    assert warnings(path) == [] and describe_fences(path, sandbox=False) == [] == describe_fences(path, sandbox=True)
    assert describe_fences(path, num_workers=0) == []  # there it runs in the driver, with a warning


@pytest.mark.skipif(sys.platform != "linux", reason="the fences are Linux's")
@pytest.mark.parametrize("sandbox, written", [(None, False), (False, True)])
def test_an_answer_that_is_evaluated_cannot_write_by_default(tmp_path, sandbox, written):
    (tmp_path / "rewards.py").write_text(
        "def score(response):\n    try:\n        exec(response)\n"
        "    except OSError:\n        return 0.0\n    return 1.0\n"
    )
    function = RewardFunctionConfig(path=f"{tmp_path}/rewards.py:score", sandbox=sandbox)
    answer = f"open({str(tmp_path / 'planted')!r}, 'w')"

    async def run() -> float:
        async with await Scorer.create(RewardConfig(functions={"mine": function}, num_workers=1)) as scorer:
            return (await scorer.score(Task("t", ({"role": "user", "content": "?"},)), make_trajectory(answer))).value

    assert asyncio.run(run()) == float(written) and (tmp_path / "planted").exists() is written


def test_a_sandbox_that_is_demanded_and_cannot_be_had_is_refused_by_name():
    functions = {
        "demanded": RewardFunctionConfig(path="own:score", sandbox=True),
        "left": RewardFunctionConfig(path="own:score"),
    }
    reward = RewardConfig(functions=functions)
    (mistake,) = refuse_unfenced(reward, ["no Landlock against writing and signals", "no network namespace"])
    assert mistake.key == "reward.functions.demanded.sandbox" and "no Landlock" in mistake.problem
    assert not list(refuse_unfenced(reward, ["no network namespace"]))


@pytest.mark.skipif(sys.platform != "linux", reason="the fences are Linux's")
def test_a_serialized_function_that_evaluates_cannot_write_by_default(tmp_path, by_value):
    def score(response: str) -> float:
        try:
            exec(response)
        except OSError:
            return 0.5
        return 1.0

    made = serialize(score, "score", "reward")
    (tmp_path / made.file_name).write_bytes(made.content)
    reward = RewardConfig(functions={"mine": RewardFunctionConfig(path=made.path(tmp_path))}, num_workers=1)

    async def run() -> float:
        async with await Scorer.create(reward) as scorer:
            answer = make_trajectory(f"open({str(tmp_path / 'planted')!r}, 'w')")
            return (await scorer.score(Task("t", ({"role": "user", "content": "?"},)), answer)).value

    assert asyncio.run(run()) == 0.5 and not (tmp_path / "planted").exists()
