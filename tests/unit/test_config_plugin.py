"""A user's own code is found by module or by file, and what is wrong with it is a mistake of the key."""

from pathlib import Path

import pytest

from treadle.config.plugin import load_object
from treadle.errors import ConfigError


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
