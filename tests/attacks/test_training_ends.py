"""How a training run ends and goes on: every signal saves, a vanished directory is a cause, changes are named."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos import hear_signals
from treadle.cluster.signals import StopSignals
from treadle.inspect.audit import audit
from treadle.journal import Journal, JournalReader, RunStatus, read_starts

SMALL = (
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4",
    "rollout.n=2",
    "data.val_max_samples=4",
    "trainer.val_before_train=false",
    "trainer.total_training_steps=400",
)


def command(run_dir: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "treadle", "train", "calculator", f"logging.run_dir={run_dir}", *SMALL, *words]


def start(run_dir: Path, *words: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(run_dir, *words), text=True, preexec_fn=hear_signals, **pipes)


def train(run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(run_dir, *words), capture_output=True, text=True, timeout=300, check=False)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert condition()


def has_steps(run_dir: Path, count: int) -> Callable[[], bool]:
    path = run_dir / "metrics.jsonl"
    return lambda: path.exists() and path.read_text().count('"reward/mean"') >= count


def test_a_signal_saves_says_so_and_a_changed_config_is_named_before_it_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    with start(run_dir) as process:
        wait_for(has_steps(run_dir, 2), process)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "interrupted and saved" in output and "SIGTERM: stopping" in errors
    assert json.loads((run_dir / "run.json").read_text())["status"] == "interrupted"
    assert json.loads((run_dir / "run.json").read_text())["cause"] == "SIGTERM"
    (saved,) = (run_dir / "checkpoints").glob("[0-9]*")
    done = int(saved.name.partition("-step-")[2])
    assert done >= 2
    told = (run_dir / "run.log").read_text()
    assert (
        "step 1/400: reward" in told and "received SIGTERM" in told and f"saved a checkpoint after step {done}" in told
    )

    journal = (run_dir / "journal.sqlite").read_bytes()
    refused = train(run_dir, "actor.optim.lr=0.5", "rollout.n=4", f"trainer.total_training_steps={done + 1}")
    assert refused.returncode == 2
    assert "actor.optim.lr: 0.5 now, but the run in" in refused.stderr and f"has {done} steps with" in refused.stderr
    assert "rollout.n: 4 now" in refused.stderr and "--allow-changes" in refused.stderr
    assert "trainer.total_training_steps" not in refused.stderr
    assert (run_dir / "journal.sqlite").read_bytes() == journal

    moved = train(run_dir, "data.seed=7", "--allow-changes")
    assert moved.returncode == 2 and "data.seed: 7 now" in moved.stderr, "never: positions would be other tasks"

    goes_on = train(run_dir, "actor.optim.lr=0.5", f"trainer.total_training_steps={done + 1}", "--allow-changes")
    assert goes_on.returncode == 0, goes_on.stderr
    assert "changed since the last start: actor.optim.lr" in goes_on.stderr
    assert f"{done + 1} steps, 1 of them now" in goes_on.stdout
    with JournalReader.open(run_dir) as reader:
        (event,) = reader.events(kind="config_changed")
    assert {change[0] for change in event.fields["changes"]} >= {"actor.optim.lr", "trainer.total_training_steps"}
    assert audit(run_dir).problems == ()

    again = train(run_dir, "actor.optim.lr=0.5", f"trainer.total_training_steps={done + 1}")
    assert "nothing was trained: the run was done already" in again.stdout
    steps = [path.name.partition("-step-")[2] for path in (run_dir / "checkpoints").glob("[0-9]*")]
    assert sorted(steps, key=int) == [str(done), str(done + 1)]

    rolled_out = [sys.executable, "-m", "treadle", "rollout", "calculator", f"logging.run_dir={run_dir}"]
    refused = subprocess.run(rolled_out, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode == 2 and "holds a training run" in refused.stderr


@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM", "SIGINT"])
def test_a_signal_while_a_run_is_put_together_ends_it_in_order(tmp_path, name):
    run_dir = tmp_path / "run"
    with start(run_dir) as process:
        wait_for((run_dir / "journal.sqlite").exists, process)
        process.send_signal(signal.Signals[name])
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    (only,) = read_starts(run_dir)
    assert (only.status, only.cause) == (RunStatus.INTERRUPTED, name)


def test_a_run_directory_that_is_deleted_ends_the_run_with_that_cause(tmp_path):
    run_dir = tmp_path / "run"
    with start(run_dir) as process:
        wait_for(has_steps(run_dir, 1), process)
        run_dir.rename(tmp_path / "gone")
        shutil.rmtree(tmp_path / "gone")
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "deleted, moved or unmounted" in errors and "everything is in" not in output
    assert not (run_dir / "checkpoints").exists()


def test_a_step_that_outlasts_the_grace_ends_the_process_and_run_json_says_interrupted(tmp_path):
    left: list[int] = []

    async def endless() -> None:
        over = asyncio.Event()

        def leave(status: int) -> None:
            left.append(status)
            assert read_starts(tmp_path)[0].ended_at is not None, "the last records are written before the process ends"
            over.set()

        with Journal.open(tmp_path, max_mb=16) as journal, StopSignals(0.05, leave) as signals:
            signals.journal = journal
            signals.stop_with(lambda: None)
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(60):
                await over.wait()

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(endless())
    assert left == [130]
    assert (read_starts(tmp_path)[0].status, read_starts(tmp_path)[0].cause) == (RunStatus.INTERRUPTED, "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    async def live() -> None:
        with StopSignals(60.0, lambda status: None) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
            assert signals.received is None

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(live())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
