"""`treadle rollout` as a person uses it: run, interrupt, go on, read the summary and the status."""

import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.rollouts import save_model
from treadle.errors import RunError
from treadle.journal import JournalReader

SCRIPT = """
def answer(request, rng):
    return f"I think it is #### {rng.choice([1, 2])}"

def crash(response):
    if "I think" in response:  # before the start it is tried with other answers
        raise RuntimeError("the scorer is broken")
    return 0.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model")
    (tmp_path / "script_of_this_test.py").write_text(SCRIPT)
    rows = [{"question": f"What is {at} + 1?", "answer": "#### 2"} for at in range(12)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my.yaml").write_text(
        """
        model: {path: model}
        data: {train_files: tasks.jsonl, val_files: tasks.jsonl, prompt_key: question}
        rollout:
          name: scripted
          n: 2
          scripted: {script: "script_of_this_test:answer"}
        reward:
          functions: {answer: {path: number_match}}
        logging: {run_dir: run}
        """
    )
    return tmp_path


def treadle(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "treadle", "rollout", "my.yaml", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def finished(folder: Path) -> set[tuple[str, int]]:
    try:
        with JournalReader.open(folder / "run") as reader:
            return reader.finished()
    except RunError:
        return set()  # not there yet


def test_a_rollout_with_rewards_and_no_trainer_section(folder):
    done = treadle(folder, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["num_trajectories"], summary["num_tasks"], summary["num_failed"]) == (24, 12, 0)
    assert len(finished(folder)) == 24
    resolved = (folder / "run" / "config.yaml").read_text()
    assert "n: 2  # my.yaml:6" in resolved
    assert "trainer" not in resolved


def test_a_second_start_draws_nothing_again_and_a_larger_n_only_what_is_missing(folder):
    treadle(folder)
    before = finished(folder)
    again = json.loads(treadle(folder, "--json", "rollout.n=3").stdout)
    assert again["num_trajectories"] == 36
    assert finished(folder) - before == {(f"tasks.jsonl:{line}", 2) for line in range(1, 13)}


def test_an_interrupt_keeps_what_is_done_and_the_same_command_goes_on(folder):
    words = ["rollout.scripted.latency_s=0.4", "rollout.agent.max_concurrent_sessions=4"]
    command = [sys.executable, "-m", "treadle", "rollout", "my.yaml", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(finished(folder)) < 4:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on from here" in output
    kept = finished(folder)
    assert 4 <= len(kept) < 24
    rest = json.loads(treadle(folder, "--json", *words[1:]).stdout)
    assert rest["num_trajectories"] == 24
    assert kept < finished(folder)


def test_failed_trajectories_are_named_by_boundary_and_the_status_is_not_zero(folder):
    words = ("reward.functions.broken.path=script_of_this_test:crash", "rollout.failures.max_failed_fraction=1")
    done = treadle(folder, *words)
    assert done.returncode == 1
    assert "reward" in done.stdout
    assert "the scorer is broken" in done.stdout.replace("\n", " ")
    assert finished(folder) == set()


def test_a_spent_failure_budget_ends_the_run_with_its_cause(folder):
    done = treadle(folder, "rollout.scripted.failure_rate=1", "rollout.failures.min_finished=4")
    assert done.returncode == 1
    assert "trajectories failed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.train_files=nope.jsonl"], "nope.jsonl"),
        (["model.path=nope"], "model.path"),
        (["rollout.scripted.script=nope:answer"], "nope"),
        (["rolout.n=3"], "did you mean"),
        (["data.prompt_key=qestion"], "question"),
    ],
)
def test_mistakes_are_named_before_anything_starts(folder, words, says):
    done = treadle(folder, *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert words == ["rollout.scripted.script=nope:answer"] or not (folder / "run").exists()


def test_a_rollout_runs_on_ray_or_says_that_there_is_none(folder):
    done = treadle(folder, "cluster.backend=ray", "--json")
    if find_spec("ray") is None:
        assert (
            done.returncode == 2
            and "cluster.backend: Ray is not installed" in done.stderr
            and "pip install" in done.stderr
        )
    else:
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["num_trajectories"] == 24 and len(finished(folder)) == 24
