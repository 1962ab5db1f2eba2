"""Reward functions that run what they are given are sandboxed by default, and named before a run."""

import asyncio
import subprocess
import sys

import cloudpickle
import pytest

from tests.reward_models import make_trajectory
from treadle.config import RewardConfig, RewardFunctionConfig
from treadle.reward.scorer import Scorer, refuse_unfenced
from treadle.reward.unsafe_calls import find_fenced, find_unsafe_calls
from treadle.types import Task

UNSAFE = {
    "exec": "def score(response):\n    exec(response)\n    return 1.0\n",
    "eval": "def helper(text):\n    return eval(text)\n\ndef score(response):\n    return helper(response)\n",
    "compile": "def score(response):\n    return bool(compile(response, 'x', 'exec'))\n",
    "subprocess.run": "import subprocess\n\ndef score(response):\n    return subprocess.run(response).returncode\n",
    "os.system": "import os\n\ndef score(response):\n    return os.system(response)\n",
}
SAFE = "import re\n\ndef score(response):\n    return bool(re.compile('a').match(response)), model.eval()\n"


def warnings(path: str, **fields: object) -> list[str]:
    return list(find_unsafe_calls(RewardConfig(functions={"mine": RewardFunctionConfig(path=path, **fields)})))


@pytest.mark.parametrize("call", UNSAFE)
def test_a_call_that_runs_text_is_named_with_its_line_and_the_way_out(tmp_path, call):
    (tmp_path / "rewards.py").write_text(UNSAFE[call])
    (found,) = warnings(f"{tmp_path}/rewards.py:score", sandbox=False)
    assert f"rewards.py:{UNSAFE[call][: UNSAFE[call].index(call + '(')].count(chr(10)) + 1} calls {call}" in found
    assert "reward.functions.mine.sandbox=true" in found and "run_python" in found
    assert warnings(f"{tmp_path}/rewards.py:score", sandbox=True) == []


def test_a_function_without_such_a_call_and_a_built_in_have_no_warning(tmp_path):
    (tmp_path / "rewards.py").write_text(SAFE)
    assert warnings(f"{tmp_path}/rewards.py:score") == [] == warnings("exact_match")


def test_a_function_of_a_script_is_read_from_its_pickle_which_is_not_loaded(tmp_path):
    def score(response: str) -> float:
        return float(subprocess.call(["true"]))

    (tmp_path / "score.pkl").write_bytes(cloudpickle.dumps(score))
    (found,) = warnings(f"{tmp_path}/score.pkl:score")
    assert "uses subprocess" in found


@pytest.mark.parametrize("call", UNSAFE)
def test_a_function_with_such_a_call_is_sandboxed_unless_its_key_says_otherwise(tmp_path, call):
    (tmp_path / "rewards.py").write_text(UNSAFE[call])
    path = f"{tmp_path}/rewards.py:score"

    def fenced(**fields: object) -> list[str]:
        workers = int(fields.pop("num_workers", 1))  # type: ignore[call-overload]
        functions = {"mine": RewardFunctionConfig(path=path, **fields)}
        return list(find_fenced(RewardConfig(functions=functions, num_workers=workers)))

    (line,) = fenced()
    assert f"calls {call}" in line and "reward.functions.mine.sandbox=false" in line
    assert warnings(path) == [] and fenced(sandbox=False) == [] and fenced(sandbox=True) == []
    assert fenced(num_workers=0) == []  # there it runs in the driver, with a warning


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
