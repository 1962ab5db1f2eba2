"""docs/config.md tells the truth: its files load, its commands print what it shows, its Python runs.

`<!-- file: NAME -->` before a block writes it to a file. A line `…` in shown output stands for any lines.
"""

import contextlib
import gc
import io
import re
import shlex
from pathlib import Path

import pytest

import treadle
from treadle.cli.main import main

PAGE = Path(treadle.__file__).parents[1] / "docs" / "config.md"
BLOCK = re.compile(r"(?:<!-- file: (\S+)[^\n]*-->\n)?```(\w+)\n(.*?)```", re.DOTALL)
BLOCKS = BLOCK.findall(PAGE.read_text(encoding="utf-8"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name, _, text in BLOCKS:
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands() -> list[tuple[str, str]]:
    """Each shown command with the output shown below it."""
    found = []
    for _, language, text in BLOCKS:
        if language == "console":
            for part in text.removeprefix("$ ").split("\n$ "):
                command, _, output = part.partition("\n")
                found.append((command, output if output.endswith("\n") or not output else output + "\n"))
    return found


def run(command: str) -> str:
    """What a command prints, on either stream."""
    ours, _, redirect = command.partition(" > ")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit):
        main(shlex.split(ours)[1:])
    return "" if redirect else out.getvalue()


def fits(shown: str, printed: str) -> bool:
    pattern = "".join("(?:.*\n)*?" if line == "…" else f"{re.escape(line)}\n" for line in shown.splitlines())
    return re.fullmatch(pattern, printed) is not None


@pytest.mark.parametrize(("command", "shown"), commands(), ids=lambda value: value.partition("\n")[0][:60])
def test_a_command_prints_what_the_page_shows(here, command, shown):
    assert command.startswith("treadle ")
    printed = run(command)
    assert fits(shown, printed), printed


def test_the_python_on_the_page_runs_and_prints_what_its_comments_say(here, capsys):
    code = "\n".join(text for _, language, text in BLOCKS if language == "python")
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    gc.collect()  # the page's own section class must not be there for other tests
    printed = capsys.readouterr().out.splitlines()
    assert printed == re.findall(r"print\(.*\)  # (.*)", code)


def test_the_page_has_examples_of_everything():
    shown = "\n".join(command for command, _ in commands())
    for word in ("check", "show", "explain", "diff", "schema", "plan"):
        assert word in shown


def test_dots_stand_for_any_lines():
    assert fits("a\n…\nd\n", "a\nb\nc\nd\n")
    assert not fits("a\n…\nd\n", "a\nb\nc\n")
