"""After a run, as a person types it: the last lines of a run, and every command and block of docs/results.md."""

import contextlib
import io
import json
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

import treadle
from treadle.cli.main import main
from treadle.inspect import replay
from treadle.journal.codec import seal
from treadle.journal.run_directory import RunLock
from treadle.view.run_pages import RunPages
from treadle.view.trajectory_pages import TrajectoryPages

PAGE = (Path(treadle.__file__).parents[1] / "docs" / "results.md").read_text(encoding="utf-8")
SMALL = (
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=8",
    "rollout.n=4",
    "data.val_max_samples=8",
    "trainer.total_training_steps=4",
    "trainer.test_freq=2",
    "checkpoint.save_freq=2",
)
CONSOLE = re.findall(r"```console\n\$ (treadle .*?)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [*re.findall(r"^    (treadle .*)$", PAGE, re.MULTILINE), *re.findall(r"\| `(treadle .*?)` \|", PAGE)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory in which `treadle train calculator` ran, shorter than it would; and what it printed."""
    home = tmp_path_factory.mktemp("home")
    words = [sys.executable, "-m", "treadle", "train", "calculator", *SMALL]
    done = subprocess.run(words, cwd=home, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return home, done.stdout


def run(command: str) -> tuple[int, str]:
    out = io.StringIO()
    ours = command.partition(" | ")[0]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as ended:
        main(shlex.split(ours)[1:])
    return int(ended.value.code or 0), out.getvalue()


def fits(shown: str, printed: str) -> bool:
    """Whether a text is what a page shows; `…` alone on a line stands for any lines, and within one for any text."""
    lines = ["(?:.*\n)*?" if line == "…" else f"{re.escape(line).replace('…', '.*')}\n" for line in shown.splitlines()]
    return re.fullmatch("".join(lines), printed) is not None


def test_the_last_lines_of_a_run_are_commands_that_work(trained, monkeypatch):
    home, printed = trained
    monkeypatch.chdir(home)
    shown = next(output for command, output in CONSOLE if command == "treadle train calculator")
    assert fits(shown, printed)
    tried = re.findall(r"(treadle (?:show|metrics|export) .*?)    ", printed)
    assert [command.split()[1] for command in tried] == ["show", "metrics", "export"]
    for command in tried:
        assert run(command)[0] == 0
    assert (home / "my-model" / "model.safetensors").is_file()


def test_every_command_of_the_page_works(trained, monkeypatch, tmp_path):
    (tmp_path / "runs").symlink_to(trained[0] / "runs")
    monkeypatch.chdir(tmp_path)
    results = {command: run(command) for command in COMMANDS}
    expected = {command: 1 if "--failed" in command else 0 for command in COMMANDS}
    assert {command: status for command, (status, _) in results.items()} == expected, results
    assert {path.name for path in tmp_path.iterdir()} >= {
        "curves.svg",
        "curves.png",
        "my-model",
        "best-model",
        "step-2",
    }


@pytest.mark.parametrize(("command", "shown"), [block for block in CONSOLE if "train" not in block[0].split()[1]])
def test_a_command_prints_what_the_page_shows(trained, monkeypatch, command, shown):
    monkeypatch.chdir(trained[0])
    status, printed = run(command)
    assert status == 0 and fits(shown, printed), printed


def test_the_python_of_the_page_runs(trained, monkeypatch, tmp_path, capsys):
    (tmp_path / "runs").symlink_to(trained[0] / "runs")
    monkeypatch.chdir(tmp_path)
    run("treadle export runs/treadle/calculator my-model")
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/results.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.count("── ") == 3


def test_the_best_checkpoint_is_one_that_was_validated(trained):
    folder = trained[0] / "runs/treadle/calculator/checkpoints"
    assert (folder / "latest").readlink() == Path("0002-step-4")
    assert (folder / "best" / "model.safetensors").is_file()


def test_the_last_lines_say_what_to_look_at(trained):
    found = [line for line in trained[1].splitlines() if line.startswith("look at: ")]
    assert found and len(found) == len({line.split(":")[1] for line in found})


def test_a_replay_computes_the_trainers_side_of_every_token_exactly(trained, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained[0] / "runs/treadle/calculator", copy)
    status, printed = run(f"treadle annotate {copy} 2")
    assert status == 0
    assert printed == "step 2: the same weights; 32 rows annotated, logprobs differ by 0 at most\n"
    pages = RunPages("run", copy)
    shown = TrajectoryPages(pages)
    for sample in pages.groups(step=2)["groups"][0]["samples"]:
        window = shown.tokens(sample["id"], 0)
        pairs = [pair for pair in zip(window["logprobs"], window["trainer"], strict=True) if pair[1] is not None]
        assert len(pairs) == sample["tokens"]
        assert all(abs(sampler - trainer) < 1e-3 for sampler, trainer in pairs)
    assert run(f"treadle annotate {copy} 99")[1].count("has no training step 99") == 1


def test_a_replay_that_differs_says_by_how_much(trained, tmp_path, monkeypatch):
    """As on a GPU: other logprobs than were recorded, and other weights; here by a journal that was changed."""
    copy = tmp_path / "run"
    shutil.copytree(trained[0] / "runs/treadle/calculator", copy)
    with contextlib.closing(sqlite3.connect(copy / "journal.sqlite")) as journal, journal:
        id, blob = journal.execute(
            "SELECT id, trainer FROM annotations WHERE step = 2 AND trainer IS NOT NULL ORDER BY id LIMIT 1"
        ).fetchone()
        trainer = array("f", blob)
        trainer[-1] += 0.25
        journal.execute("UPDATE annotations SET trainer = ? WHERE id = ?", (trainer.tobytes(), id))
        weights = journal.execute("SELECT id, start, time, kind, fields FROM events WHERE kind = 'weights'").fetchall()
        for id, *values, fields in weights:
            if json.loads(fields)["version"] == 2:
                values.append(json.dumps({**json.loads(fields), "checksum": "other"}))
                journal.execute("UPDATE events SET fields = ?, digest = ? WHERE id = ?", (values[-1], seal(values), id))
    status, printed = run(f"treadle annotate {copy} 2")
    assert status == 1
    told = r"step 2: OTHER weights: other then, \w+ now; 32 rows annotated, logprobs differ by 0.25 at most"
    assert re.search(told, printed)
    assert "1 step gave other weights than the run: annotations are near, and not exact" in printed
    sizes = iter((4_000_000, 9_000_000))
    monkeypatch.setattr(replay, "journal_bytes", lambda run_dir: next(sizes))
    printed = run(f"treadle annotate {copy} 2")[1]
    assert "differ by 0 at most" in printed  # what was recorded is replaced
    assert "the journal is 5.0 MB larger; only a run that goes on keeps to logging.journal_max_mb" in printed


def test_a_step_is_annotated_from_the_checkpoint_before_it(trained, tmp_path):
    """Also where the tokens of earlier steps were dropped: of all steps, those after the checkpoint."""
    copy = tmp_path / "run"
    shutil.copytree(trained[0] / "runs/treadle/calculator", copy)
    saved = next((copy / "checkpoints").glob("*-step-2"))
    with contextlib.closing(sqlite3.connect(copy / "journal.sqlite")) as journal, journal:
        last = journal.execute(
            "SELECT max(t.id) FROM events e, json_each(e.fields, '$.groups') g, trajectories t "
            "WHERE e.kind = 'step' AND json_extract(e.fields, '$.step') = 2 AND t.uid = json_extract(g.value, '$[0]')"
        ).fetchone()[0]
        for table in ("rows", "texts", "annotations"):
            journal.execute(f"DELETE FROM {table} WHERE trajectory <= ?", (last,))
    for words, steps in (("3", [3]), ("", [3, 4])):
        status, printed = run(f"treadle annotate {copy} {words}")
        assert status == 0 and f"replaying from {saved}" in printed
        assert [f"step {step}: the same weights" in printed for step in (1, 2, 3, 4)] == [
            step in steps for step in (1, 2, 3, 4)
        ]
    status, printed = run(f"treadle annotate {copy} 2")
    assert status != 0 and "logging.journal_max_mb let them go" in printed


def test_a_run_that_is_held_is_not_annotated(trained, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained[0] / "runs/treadle/calculator", copy)
    lock = RunLock.take(copy, 0.0)
    try:
        status, printed = run(f"treadle annotate {copy}")
    finally:
        lock.release()
    assert status == 1 and "annotated" not in printed
