"""Reward functions in another interpreter: scored, refused, ended and limited as those of a worker are."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_reward_sandbox import is_running, make_trajectory, score_after, wait_until
from treadle.config import loads
from treadle.config.reward import RewardConfig, RewardFunctionConfig
from treadle.errors import ConfigError
from treadle.reward.result import Fault, ScoreFailure
from treadle.reward.scorer import Scorer
from treadle.reward.unsafe_calls import find_unsafe_calls
from treadle.types import Score, Task

REWARDS = """
import asyncio, ctypes, functools, os, subprocess, sys, time

def length(response, answer, hint="", offset=0.0, **columns):
    assert "treadle" not in sys.modules
    extra = {"answer": answer, "hint": hint, "columns": sorted(columns), "pid": os.getpid()}
    return {"score": len(response) + offset, "secret": os.environ.get("SECRET"), **extra}

async def later(response, messages):
    await asyncio.sleep(0)
    return len(messages)

def ranks(responses, ground_truth):
    return [float(len(one)) for one in responses]

def misbehave(response, how=""):
    if how == "exit":
        sys.exit(3)
    if how == "os_exit":
        os._exit(7)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "memory":
        return len(bytearray(3 << 30))
    if how == "raise":
        raise RuntimeError("as told")
    if how == "spin":
        while True:
            pass
    if how == "sleep":
        time.sleep(1000)
    return 5.0 if how in ("", "well_behaved") else {"score": "text"} if how == "text" else None

def sees(trajectory):
    return 0.0

def shell(response):
    return float(os.system(response))

def leaves(response):
    print("about to leave one behind")
    return {"score": 1.0, "left": subprocess.Popen(["sleep", "1000"]).pid}

def scaled(response, scale=1.0):
    return scale

doubled = functools.partial(scaled, scale=2.0)
"""


@pytest.fixture(autouse=True)
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_another.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)


def configured(*names: str, limits: dict[str, Any] | None = None, **fields: Any) -> RewardConfig:
    given = {"python": sys.executable, **fields}
    functions = {name: RewardFunctionConfig(path=f"rewards_of_another:{name}", **given) for name in names}
    return RewardConfig(**{"functions": functions, "retries": 0, "timeout_s": 20.0, **(limits or {})})


def scored(reward: RewardConfig, **extra: Any) -> Score:
    async def main() -> Score:
        async with await Scorer.create(reward) as scorer:
            score = await scorer.score(Task("t", (), "42", extra=extra), make_trajectory())
            assert score is not None
            return score

    return asyncio.run(main())


def test_functions_are_called_in_another_python_with_what_they_name(monkeypatch):
    monkeypatch.setenv("SECRET", "key")
    score = scored(configured("length", "later", kwargs={}), hint="small", level=3)
    assert score.parts == {"length": 4.0, "later": 2.0}
    found = score.extra
    assert (found["answer"], found["hint"], found["secret"]) == ("42", "small", None)
    assert "level" in found["columns"] and found["pid"] != os.getpid()
    named = scored(configured("length", kwargs={"offset": 0.5}, env=("SECRET",)))
    assert named.value == 4.5 and named.extra["secret"] == "key"


def test_a_function_there_sees_a_group():
    async def main() -> list[Score]:
        async with await Scorer.create(configured("ranks", scope="group")) as scorer:
            return await scorer.score_group(Task("t", (), "42"), [make_trajectory("a"), make_trajectory("abc")])

    assert [score.value for score in asyncio.run(main())] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("how", "fault", "words"),
    [
        ("exit", Fault.CRASH, "called sys.exit(3)"),
        ("os_exit", Fault.CRASH, "ended its process with status 7"),
        ("segfault", Fault.CRASH, "was killed by SIGSEGV"),
        ("memory", Fault.MEMORY, "reward.memory_mb"),
        ("raise", Fault.EXCEPTION, "RuntimeError: as told (/"),
        ("text", Fault.NO_RESULT, "returned str 'text'"),
        ("none", Fault.NO_RESULT, "returned NoneType"),
    ],
)
def test_a_function_that_misbehaves_there_fails_its_own_score(how, fault, words):
    first, after = asyncio.run(score_after(configured("misbehave"), Task("t", (), "42", extra={"how": how})))
    assert isinstance(first, ScoreFailure) and first.fault is fault and words in str(first), first
    assert after.value == 5.0


@pytest.mark.parametrize(
    ("how", "limits", "fault"),
    [
        ("sleep", {"timeout_s": 2.0}, Fault.TIMEOUT),
        ("spin", {"timeout_s": 600.0, "cpu_time_s": 0.5}, Fault.CPU_TIME),
    ],
)
def test_a_function_past_a_limit_there_is_ended_with_its_process(how, limits, fault):
    async def main() -> int:
        async with await Scorer.create(configured("misbehave", "length", limits=limits)) as scorer:
            first = await scorer.score(Task("t", (), "42"), make_trajectory())
            assert first is not None
            with pytest.raises(ScoreFailure) as caught:
                await scorer.score(Task("t", (), "42", extra={"how": how}), make_trajectory())
            assert caught.value.fault is fault
            return first.extra["pid"]

    pid = asyncio.run(main())
    wait_until(lambda: not is_running(pid))


def mistake(reward: RewardConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        asyncio.run(Scorer.create(reward))
    return str(caught.value)


def test_mistakes_are_found_before_any_score():
    functions = {"gone": RewardFunctionConfig(path="nowhere:score", python=sys.executable)}
    found = mistake(RewardConfig(functions=functions))
    assert "no module 'nowhere'" in found and "reward.functions.gone.python" in found
    assert "has no attribute 'leng'" in mistake(configured("leng"))
    assert "there is no such program" in mistake(configured("length", python="/nowhere/bin/python"))
    assert "does not start" in mistake(configured("length", python="/bin/false"))
    assert "has no parameter 'ofset'" in mistake(configured("later", kwargs={"ofset": 1}))
    assert "takes 'trajectory', a record of treadle" in mistake(configured("sees"))


def test_a_function_that_runs_text_there_is_warned_of():
    (warning,) = find_unsafe_calls(configured("shell"))
    assert "os.system" in warning and "leave python out" in warning


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("reward.functions.a.sandbox=true",), "and sandbox is true"),
        (("reward.functions.a.path=math",), "math is a built-in"),
        (("reward.num_workers=0",), "reward.num_workers is 0"),
    ],
)
def test_what_another_interpreter_does_without_is_refused_by_name(words, problem):
    text = """
    model: {path: unused}
    reward: {functions: {a: {path: "rewards_of_another:length", python: /usr/bin/python3}}}
    """
    with pytest.raises(ConfigError) as caught:
        loads(text, "test.yaml", words)
    assert "reward.functions.a.python" in str(caught.value) and problem in str(caught.value)


def test_what_a_score_leaves_behind_ends_with_it():
    async def main() -> None:
        async with await Scorer.create(configured("leaves")) as scorer:
            score = await scorer.score(Task("t", (), "42"), make_trajectory())
            assert score is not None
            await asyncio.to_thread(wait_until, lambda: not is_running(score.extra["left"]))

    asyncio.run(main())


def test_what_a_function_prints_there_is_shown(capfd):
    scored(configured("leaves"))
    assert "about to leave one behind" in "".join(capfd.readouterr())


def test_no_column_takes_the_place_of_what_a_partial_has_bound():
    assert scored(configured("doubled"), scale=3).value == 2.0
