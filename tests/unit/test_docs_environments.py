"""docs/environments.md tells the truth: its environment, config and commands work as they stand."""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest

import treadle
from treadle.cli.main import main
from treadle.journal import JournalReader

PAGE = (Path(treadle.__file__).parents[1] / "docs" / "environments.md").read_text(encoding="utf-8")
FILES = re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^\$ treadle (.*)\n…\n(.*)\n", PAGE, re.MULTILINE)


def test_the_environment_of_the_page_is_checked_and_played(tmp_path, monkeypatch):
    for name, text in FILES:
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["treadle"])
    assert len(COMMANDS) == 2
    for command, last in COMMANDS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as left:
            main(shlex.split(command))
        assert left.value.code == 0 and printed.getvalue().splitlines()[-1] == last
    with JournalReader.open(tmp_path / "runs/treadle/safe-rollout") as journal:
        played = [journal.trajectory(f"seeds:{seed}", 0).trajectory for seed in range(8)]
    for one in played:
        guesses = len(one.rows[0].turns)
        assert one.reward.value == pytest.approx(1.0 - 0.1 * (guesses - 1)) and one.messages[-1]["content"].isdecimal()
