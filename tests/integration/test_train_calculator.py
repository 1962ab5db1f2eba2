"""The main job, as a person runs it: it learns, survives kill -9 with the same weights, and can be replayed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from treadle.journal import JournalReader

SMALL = (
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=8",
    "rollout.n=4",
    "data.val_max_samples=16",
    "trainer.total_training_steps=5",
    "checkpoint.save_freq=1",
)


def command(run_dir: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "treadle", "train", "calculator", f"logging.run_dir={run_dir}", *words]


def environment() -> dict[str, str]:
    """The same number of threads for every run: other numbers add up in another order."""
    return {**os.environ, "OMP_NUM_THREADS": "2"}


def train(run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(run_dir, *words), capture_output=True, text=True, timeout=600, check=False, env=environment()
    )


def checksums(run_dir: Path) -> dict[int, str]:
    """The weights after each step, as the engine confirmed them."""
    with JournalReader.open(run_dir) as reader:
        events = reader.events(kind="weights")
    return {event.fields["version"]: event.fields["checksum"] for event in events}


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_calculator_agent_learns(tmp_path):
    done = train(tmp_path, "trainer.total_training_steps=14", "data.val_max_samples=128")
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path)
    success = [row["validation/success"] for row in rows if "validation/success" in row]
    assert success[0] <= 0.5
    assert success[-1] >= success[0] + 0.3
    steps = [row for row in rows if "reward/mean" in row]
    assert max(row["rollout_corr/logprob_abs_diff"] for row in steps) < 1e-6
    assert max(row["rollout_corr/logprob_abs_diff_max"] for row in steps) < 1e-4, "a rare token's rounding, not more"
    assert "before (step 0)" in done.stdout


def test_a_killed_run_goes_on_to_the_same_weights_and_both_replay(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert train(straight, *SMALL).returncode == 0
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command(broken, *SMALL), env=environment(), **quiet) as process:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not list(broken.glob("checkpoints/0002-*")):
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    resumed = train(broken, *SMALL)
    assert resumed.returncode == 0, resumed.stderr
    assert checksums(broken) == checksums(straight)
    again = [sys.executable, "-m", "treadle", "replay", str(broken)]
    replayed = subprocess.run(again, capture_output=True, text=True, timeout=600, env=environment())
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count("the same weights") == 5


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path):
    words = [word for word in SMALL if not word.startswith("checkpoint")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command(tmp_path, *words), text=True, **pipes) as process:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not (tmp_path / "metrics.jsonl").exists():
            time.sleep(0.05)
        while time.monotonic() < deadline and sum('"reward/mean"' in line for line in _lines(tmp_path)) < 2:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted and saved" in output
    assert train(tmp_path, *words).returncode == 0
    assert max(checksums(tmp_path)) == 5


def _lines(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines()
