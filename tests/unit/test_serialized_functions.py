"""Functions of scripts and notebooks in files: the same function has the same name, and loads as it was."""

import importlib.util
import os
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from treadle.config import ModelConfig, MultiTurnConfig, RewardConfig, RewardFunctionConfig, RolloutConfig
from treadle.config.plugin import load_object
from treadle.config.serialized import digest_of, import_path, name_of, serialize
from treadle.errors import ConfigError
from treadle.rollout.provenance import RunInputs

LOCK = threading.Lock()
WORDS = {"yes", "no", "maybe"}


def importable(response: str) -> float:
    return float(response in WORDS)


def stored(value, directory: Path, name: str = "reward"):
    found = serialize(value, name, "reward")
    (directory / found.file_name).write_bytes(found.content)
    return load_object(found.path(directory), "reward")


def test_a_function_of_a_module_goes_by_its_import_path():
    assert import_path(importable) == f"{__name__}:importable"
    assert import_path(re.match) == "re:match"


def test_what_no_other_process_can_import_has_no_import_path():
    def inner() -> None: ...

    assert import_path(inner) is None
    assert import_path(lambda: 0) is None
    assert import_path(partial(importable)) is None


def test_closures_lambdas_partials_and_classes_load_as_they_were(tmp_path):
    bonus = 0.5

    class Callable:
        def __call__(self, response: str) -> float:
            return bonus + len(response)

    assert stored(lambda response: bonus + importable(response), tmp_path)("yes") == 1.5
    assert stored(partial(importable, "no"), tmp_path, "partial")() == 1.0
    assert stored(Callable, tmp_path, "Callable")()("abc") == 3.5
    assert stored(Callable(), tmp_path, "instance")("abc") == 3.5


def test_a_module_that_only_this_process_has_loaded_goes_by_value(tmp_path):
    file = tmp_path / "loaded_by_hand.py"
    file.write_text(
        "LIMIT = 3\n\ndef helper(text):\n    return len(text) - LIMIT\n\n"
        "def reward(response):\n    return helper(response)\n"
    )
    spec = importlib.util.spec_from_file_location("loaded_by_hand", file)
    module = sys.modules["loaded_by_hand"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        assert import_path(module.reward) is None
        found = serialize(module.reward, "reward", "reward")
    finally:
        del sys.modules["loaded_by_hand"]
    (tmp_path / found.file_name).write_bytes(found.content)
    assert load_object(found.path(tmp_path), "reward")("abcd") == 1


def test_a_digest_knows_code_defaults_closures_and_globals():
    def make(bonus, add=1):
        return lambda response, add=add: bonus + add

    same, others = digest_of(make(1)), [make(2), make(1, add=2), lambda response: 1]
    assert digest_of(make(1)) == same
    assert same not in [digest_of(other) for other in others]


def test_a_digest_knows_the_functions_that_a_function_calls():
    def outer(times):
        def helper():
            return times

        return lambda: helper()

    assert digest_of(outer(2)) == digest_of(outer(2)) != digest_of(outer(3))


SCRIPT = """
{blank}import sys
from treadle.config.serialized import digest_of
KNOWN = {{"a", "b", "c", "d"}}
class Loop:
    limit = 3
    def run(self): return self.limit, KNOWN
def helper(text): return text in KNOWN and text not in {{"x", "y", "z"}}
def reward(response, answer="7"): return helper(response), Loop().run()
print(digest_of(reward), digest_of(Loop))
"""


def test_the_same_script_gives_the_same_digest_in_every_process():
    def run(seed: int, blank: str) -> str:
        code = SCRIPT.format(blank=blank)
        env = {**os.environ, "PYTHONHASHSEED": str(seed)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        return done.stdout

    found = {run(1, ""), run(2, ""), run(3, "\n\n\n")}
    assert len(found) == 1


def test_a_value_that_cannot_be_copied_is_named():
    def locked(response: str) -> bool:
        return LOCK.locked()

    def closed_over(lock):
        return lambda response: lock.locked()

    with pytest.raises(ConfigError, match=r"reward: the function 'f' cannot be copied .*\(lock is a lock\)"):
        serialize(closed_over(threading.Lock()), "f", "reward")
    with pytest.raises(ConfigError, match=r"reward: the function 'locked' cannot be copied .*\(LOCK is a lock\)"):
        serialize(locked, "locked", "reward")


def test_files_of_another_python_or_another_name_are_refused(tmp_path, monkeypatch):
    found = serialize(lambda: 0, "reward", "reward")
    (tmp_path / found.file_name).write_bytes(found.content)
    with pytest.raises(ConfigError, match="has no 'other'"):
        load_object(f"{tmp_path / found.file_name}:other", "reward")
    with pytest.raises(ConfigError, match="there is no file"):
        load_object(f"{tmp_path}/nothing.pkl:reward", "reward")
    monkeypatch.setattr("treadle.config.serialized._PYTHON", "3.99")
    with pytest.raises(ConfigError, match=r"was written by Python 3\.1\d, and this is Python 3\.99"):
        load_object(found.path(tmp_path), "reward.functions.reward.path")


def test_a_file_that_holds_no_function_is_refused(tmp_path):
    (tmp_path / "broken.pkl").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="holds no function"):
        load_object(f"{tmp_path}/broken.pkl:reward", "reward")


def test_names_fit_into_a_config():
    assert name_of(importable, "reward") == "importable"
    assert name_of(lambda: 0, "reward") == "reward"
    assert name_of(partial(importable), "reward") == "importable"


def test_code_named_by_file_is_part_of_what_scores_and_tokens_are_made_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ModelConfig(path="treadle/tiny-calculator")

    def inputs(reward: str, tool: str) -> RunInputs:
        Path("rewards.py").write_text(f"from limits import LIMIT\ndef score(response):\n    return {reward}\n")
        Path("tools").mkdir(exist_ok=True)
        Path("tools/own.py").write_text(f"def find(text: str) -> str:\n    return {tool!r}\n")
        functions = {"score": RewardFunctionConfig(path="rewards.py:score")}
        rollout = RolloutConfig(multi_turn=MultiTurnConfig(tools=("tools/own.py:find",)))
        return RunInputs.of(rollout, model, RewardConfig(functions=functions))

    Path("limits.py").write_text("LIMIT = 1")
    before, other_reward, other_tool = inputs("1.0", "a"), inputs("2.0", "a"), inputs("1.0", "b")
    assert inputs("1.0", "a") == before
    assert other_reward.scoring != before.scoring and other_reward.training == before.training
    assert other_tool.training != before.training and other_tool.scoring == before.scoring
    inputs("1.0", "a")
    Path("limits.py").write_text("LIMIT = 2")
    assert inputs("1.0", "a").scoring != before.scoring, "it imports what has changed"
