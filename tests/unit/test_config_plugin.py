"""The user's code by import path, built-in parts by name: names that a config may use are those the code knows."""

from pathlib import Path

import pytest

from treadle.algorithm.estimators import ESTIMATORS
from treadle.algorithm.loss import LOSSES
from treadle.config.plugin import load_object
from treadle.config.reward import REWARD_FUNCTIONS
from treadle.config.rollout import AGENT_LOOPS, TOOL_FORMATS
from treadle.config.training import GROUP_ESTIMATORS, OTHER_ESTIMATORS, POLICY_LOSSES
from treadle.errors import ConfigError
from treadle.reward.builtin import BUILTINS
from treadle.rollout.agent_loop import BUILT_IN
from treadle.rollout.parsers.registry import PARSERS


def test_a_file_is_imported_once_under_a_name_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "score.py").write_text("made = []\nmade.append(1)\ndef score(): return made\n")
    (tmp_path / "a" / "score.py").write_text("def score(): return 'other'\n")
    first = load_object(f"{tmp_path}/score.py:score", "k")
    assert first() == [1] and load_object(f"{tmp_path}/score.py:score", "k") is first
    assert load_object(f"{tmp_path}/a/score.py:score", "k")() == "other"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nowhere/score.py:f", "there is no file nowhere/score.py"),
        ("{}/good.py:missing", "has no 'missing'"),
        ("{}/bad.py:f", "importing .*bad.py failed: ZeroDivisionError"),
        ("{}/good.py", "is not an import path"),
    ],
)
def test_what_is_wrong_with_a_file_is_a_mistake_of_the_key(tmp_path: Path, path: str, why: str) -> None:
    (tmp_path / "good.py").write_text("def f(): ...\n")
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=why) as caught:
        load_object(path.format(tmp_path), "reward.functions.f.path")
    assert caught.value.mistakes[0].key == "reward.functions.f.path"


def test_agent_loops():
    assert sorted(AGENT_LOOPS) == sorted(BUILT_IN), "update AGENT_LOOPS in config/rollout.py"


def test_tool_formats():
    assert sorted(TOOL_FORMATS) == sorted(PARSERS), "update TOOL_FORMATS in config/rollout.py"


def test_reward_functions():
    assert sorted(REWARD_FUNCTIONS) == sorted(BUILTINS), "update REWARD_FUNCTIONS in config/reward.py"


def test_advantage_estimators():
    known = sorted((*GROUP_ESTIMATORS, *OTHER_ESTIMATORS))
    assert known == sorted(ESTIMATORS), "update the estimators in config/training.py"


def test_policy_losses():
    assert sorted(POLICY_LOSSES) == sorted(LOSSES), "update POLICY_LOSSES in config/training.py"
