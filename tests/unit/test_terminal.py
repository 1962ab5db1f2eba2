"""Text of models, tools, rows and endpoints on a terminal: shown, never obeyed."""

import ast
from io import StringIO
from pathlib import Path

import pytest

from tests.package_source import FILES, PACKAGE, nodes
from treadle.cli.train import _print_comparison
from treadle.cluster.training import TrainingResult
from treadle.observe import summarize
from treadle.observe.progress import ProgressView, ReplicaStatus
from treadle.observe.rich_output import render_progress, render_summary
from treadle.terminal import cell, make_console, printable, say
from treadle.trainer.validation import Validation
from treadle.types import Outcome, Score, StopReason, Trajectory

ATTACKS = {
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J\x1b[H",
    "clipboard": "\x1b]52;c;eA==\x07",
    "one-byte escape": "\x9b2J",
    "carriage return": "all failed\rall is well",
    "backspace": "bad\b\b\bok ",
    "direction": "\u202egnp.exe\u202c \u2066x\u2069",
    "half a character": "\ud83d",
}


def finished(uid: str, reward: float) -> Trajectory:
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": ATTACKS["clipboard"] + "[/b]"})
    ended = Outcome.ended(StopReason.STOP)
    return Trajectory(uid, 0, (), ended, Score(reward), messages, data_source="gsm8k[/x][red]:smile:")


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_control_characters_are_written_out(attack: str) -> None:
    shown = printable(f"before {attack} after")
    assert shown.startswith("before ") and shown.endswith(" after")
    assert all(letter.isprintable() for letter in shown)
    shown.encode()


def test_lines_tabs_and_every_script_stay() -> None:
    text = "naïve — 漢字 🙂👩‍👩‍👧\n\tनमस्ते مرحبا"
    assert printable(text) == text
    assert printable("one\r\ntwo") == "one\ntwo"


def test_text_is_said_without_its_escapes() -> None:
    stream = StringIO()
    say("a\x1b[2Jb", file=stream)
    assert stream.getvalue() == "a\\x1b[2Jb\n"


def test_tables_read_no_markup_and_no_escapes() -> None:
    stream = StringIO()
    make_console(stream).print(render_summary(summarize([finished("task\x1b[2J", 1.0)])))
    replica = ReplicaStatus("native\x1b]0;x\x07[/y]", "dead[/z]")
    make_console(stream).print(render_progress(ProgressView(1, 2, 0, "1 done [/a]\x1b[2J", (replica,))))
    make_console(stream).print(cell("[bold]\x1b[31m"), "[/plain]")
    shown = stream.getvalue()
    assert "\x1b" not in shown and "\x07" not in shown
    for text in ("gsm8k[/x][red]:smile:", "native\\x1b]0;x\\x07[/y]", "dead[/z]", "[bold]\\x1b[31m", "[/plain]"):
        assert text in shown


def test_the_end_of_training_shows_any_data_source_and_any_answer(capsys: pytest.CaptureFixture[str]) -> None:
    def validation(step: int, reward: float) -> Validation:
        drawn = (finished("task", reward),)
        return Validation(step, summarize(drawn), drawn)

    _print_comparison(TrainingResult(Path("run"), 2, False, (validation(0, 0.0), validation(2, 1.0))))
    shown = capsys.readouterr().out
    assert "\x1b]" not in shown and "\\x1b]52;c;eA==\\x07[/b]" in shown
    assert "gsm8k[/x][red]:smile:/reward" in shown


def test_nothing_else_prints() -> None:
    """`print` and `Console` are called in terminal.py only; a console of its own needs its markup switched off."""
    offenders = []
    for path in FILES:
        if path == PACKAGE / "terminal.py":
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                quiet = any(word.arg == "markup" for word in node.keywords)
                if node.func.id == "print" or (node.func.id in ("Console", "_Console") and not quiet):
                    offenders.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not offenders


PROGRAMS = (
    "data/verifiers_shim.py",
    "process/foreign_main.py",
    "process/guard.py",
    "process/interrupt_watcher.py",
    "sandbox/init/kernel.py",
    "sandbox/init/server.py",
)
"""Processes without treadle's modules: their outputs are pipes that treadle reads, or they say a fixed sentence."""


def test_nothing_else_writes_to_the_standard_streams() -> None:
    offenders = []
    for path in FILES:
        name = str(path.relative_to(PACKAGE))
        if name == "terminal.py" or name in PROGRAMS:
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called, first = ast.unparse(node.func), [ast.unparse(item) for item in node.args[:1]]
                streams = {f"sys.{kind}{stream}" for kind in ("", "__") for stream in ("stdout", "stderr")}
                writes = called.startswith(tuple(f"{stream}." for stream in streams)) and "write" in called
                if writes or (called == "os.write" and first[0] in ("1", "2", "sys.stdout.fileno()")):
                    offenders.append(f"{name}:{node.lineno}")
    assert not offenders
