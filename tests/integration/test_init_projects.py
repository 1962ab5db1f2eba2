"""What `treadle init` writes runs as it stands: its tests pass, its checks pass, it trains with the bundled model."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.cli.init import TASKS
from treadle.config import load
from treadle.inspect.run_records import RunRecords

GOLDEN = Path(__file__).parents[1] / "golden"
SHORT = ("trainer.total_training_steps=2", "trainer.test_freq=-1", "rollout.n=4", "data.train_batch_size=4",
         "actor.ppo_mini_batch_size=4", "data.val_max_samples=4")  # fmt: skip


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(words, cwd=directory, capture_output=True, text=True, timeout=600, env=environment)


def make(directory: Path, *words: str) -> Path:
    done = run(directory, "treadle", "init", "project", *words)
    assert done.returncode == 0, done.stderr
    assert "try next:  cd project && treadle train train.yaml" in done.stdout
    return directory / "project"


@pytest.mark.parametrize("task", TASKS)
def test_a_project_passes_its_own_tests_and_trains(tmp_path, task):
    project = make(tmp_path, "--task", task)
    tested = run(project, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout
    trained = run(project, "treadle", "train", "train.yaml", *SHORT)
    assert trained.returncode == 0, trained.stderr
    records = RunRecords(project / "runs/treadle/train")
    assert records.steps() == (1, 2) and len(records.select(2)) == 16
    if task == "gsm8k":
        found = run(project, "treadle", "config", "check", "train.yaml", "gsm8k.yaml")
        assert found.stdout == "fine: a training run\n", found.stderr
        gsm8k = load([project / "train.yaml", project / "gsm8k.yaml"])
        assert gsm8k.reward.weights() == {"answer": 1.0, "form": 0.0}, "a small model wins the form alone"
    else:
        assert any(recorded.headline.num_turns > 1 for recorded in records.select(2)), "the tool is used"


@pytest.mark.parametrize(
    ("framework", "script", "lost"),
    [
        ("trl", "trl_grpo.py", "top_entropy_quantile = 0.2: there is no counterpart"),
        ("verl", "verl_grpo.sh", "log_prob_micro_batch_size_per_gpu = 32"),
        ("verl", "verl_tools.sh", "tool_config_path = config/tools.yaml"),
        ("verl", "verl_fully_async.sh", ""),
    ],
)
def test_a_script_of_another_framework_becomes_a_project_that_trains(tmp_path, framework, script, lost):
    done = run(tmp_path, "treadle", "init", "project", "--from", framework, str(GOLDEN / script))
    assert done.returncode == 0, done.stderr
    assert "try next:  cd project && treadle train laptop.yaml" in done.stdout
    assert lost in done.stderr and lost.partition(" = ")[0] in (tmp_path / "project/migration.txt").read_text()
    project = tmp_path / "project"
    tested = run(project, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout
    trained = run(project, "treadle", "train", "laptop.yaml", *SHORT)
    assert trained.returncode == 0, trained.stderr
    found = RunRecords(project / "runs/treadle/laptop").select(2)
    assert len(found) == 16 and all(recorded.headline.outcome.ok for recorded in found)
    if framework == "trl":
        assert set(found[0].headline.reward.parts) == {"correctness", "brevity"}


def test_the_page_shows_what_is_written(tmp_path):
    shutil.copyfile(GOLDEN / "trl_grpo.py", tmp_path / "train_grpo.py")
    shutil.copyfile(GOLDEN / "verl_grpo.sh", tmp_path / "run_grpo.sh")
    page = (GOLDEN.parents[1] / "docs" / "projects.md").read_text(encoding="utf-8")
    shown = re.findall(r"```console\n\$ (treadle .*?)\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 3
    for command, output in shown:
        done = run(tmp_path, *command.split())
        assert done.returncode == 0 and done.stdout == output.removeprefix("…\n"), done.stdout


def test_an_unknown_framework_and_both_kinds_at_once_are_refused(tmp_path):
    other = run(tmp_path, "treadle", "init", "project", "--from", "openrlhf", "x.sh")
    assert other.returncode == 2 and "the frameworks are trl and verl" in other.stderr
    both = run(tmp_path, "treadle", "init", "project", "--from", "trl", "x.py", "--task", "tools")
    assert both.returncode == 2 and "not allowed with" in both.stderr
    missing = run(tmp_path, "treadle", "init", "project", "--from", "trl", "x.py")
    assert missing.returncode == 2 and "cannot be read" in missing.stderr
    assert not (tmp_path / "project").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="a laptop without make")
def test_make_check_without_pytest_says_what_to_install(tmp_path):
    project = make(tmp_path, "--task", "tools")
    (project / "pytest.py").write_text("raise ModuleNotFoundError\n")
    checked = run(project, "make", "check")
    assert checked.returncode != 0 and "pip install pytest" in checked.stdout
    assert "fine: nothing is wrong" in checked.stdout, "what needs no pytest is checked"


@pytest.mark.skipif(shutil.which("make") is None, reason="a laptop without make")
def test_make_check_looks_at_everything(tmp_path):
    project = make(tmp_path, "--task", "tools")
    checked = run(project, "make", "check")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "fine: nothing is wrong" in checked.stdout and "passed" in checked.stdout


def test_the_rows_of_training_and_validation_differ(tmp_path):
    for task in TASKS:
        project = make(tmp_path / task if (tmp_path / task).mkdir() is None else tmp_path, "--task", task)
        rows = {name: (project / name).read_text().splitlines() for name in ("tasks.jsonl", "val.jsonl")}
        assert not set(rows["tasks.jsonl"]) & set(rows["val.jsonl"])
        assert all(json.loads(line) for lines in rows.values() for line in lines)


def test_a_directory_in_use_is_refused_and_an_empty_one_is_not(tmp_path):
    (tmp_path / "project").mkdir()
    make(tmp_path)
    again = run(tmp_path, "treadle", "init", "project")
    assert again.returncode == 2 and "exists and is not empty; nothing is overwritten" in again.stderr
