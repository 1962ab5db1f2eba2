"""`treadle sft` as a person runs it: it learns, ends by Ctrl-C and goes on, on one rank or two."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import treadle
from tests.sft_runs import Steps, run_sft, sft_config, sums, write_rows
from treadle.checkpoint.store import latest

LIMIT_S = 300


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "treadle", *words]


def run(*words: str, status: int = 0) -> str:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == status, done.stderr[-3000:]
    return done.stdout + done.stderr


def model_of(run_dir: Path) -> dict[str, torch.Tensor]:
    checkpoint = latest(run_dir)
    assert checkpoint is not None
    return load_file(checkpoint / "model.safetensors")


def test_fine_tuning_then_training_from_its_best_checkpoint(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", sums(16))
    run_dir = tmp_path / "sft"
    words = (
        "model.path=treadle/tiny-calculator",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        "data.train_batch_size=8",
        "actor.dtype=fp32",
        "actor.optim.lr=1e-3",
        "trainer.total_epochs=2",
    )
    told = run("sft", *words, f"logging.run_dir={run_dir}")
    assert "16 rows of" in told and "validation loss" in told and f"model.path={run_dir}" in told
    assert "nothing was trained" in run("sft", *words, f"logging.run_dir={run_dir}")
    assert "sft/loss" in run("metrics", str(run_dir), "--list")
    run("export", str(run_dir), str(tmp_path / "model"))
    assert "supervised fine-tuning" in (tmp_path / "model" / "README.md").read_text()
    assert "is supervised fine-tuning" in run("replay", str(run_dir), status=2)
    small = ("data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "trainer.total_training_steps=1")
    quiet = ("data.val_files=[]", "trainer.test_freq=-1", "trainer.val_before_train=false")
    run("train", "calculator", f"model.path={run_dir}", f"logging.run_dir={tmp_path / 'rl'}", *small, *quiet)
    assert treadle.Run(tmp_path / "rl").steps == 1


def test_an_interrupt_saves_and_the_same_command_goes_on(tmp_path):
    rows, run_dir = write_rows(tmp_path / "rows.jsonl", sums(16)), tmp_path / "run"
    words = (
        "model.path=treadle/tiny-calculator",
        f"data.train_files={rows}",
        "data.train_batch_size=4",
        "actor.dtype=fp32",
        "trainer.total_training_steps=100000",
        f"logging.run_dir={run_dir}",
    )
    with subprocess.Popen(command("sft", *words), stderr=subprocess.PIPE, text=True, env={**os.environ}) as started:
        assert started.stderr is not None
        for line in started.stderr:
            if line.startswith("step 2/"):
                started.send_signal(signal.SIGINT)
                break
        started.stderr.read()
        assert started.wait(LIMIT_S) == 130
    done = treadle.Run(run_dir).steps
    told = run("sft", *words[:-2], f"trainer.total_training_steps={done + 2}", words[-1])
    assert f"{done + 2} steps, 2 of them now" in told


def test_two_ranks_learn_what_one_does(tmp_path):
    one, two = Steps(), Steps()
    run_sft(sft_config(tmp_path / "one"), one)
    sharded = ("actor._target_=treadle.config.FSDPActorConfig", "trainer.processes_per_node=2")
    run_sft(sft_config(tmp_path / "two", *sharded), two)
    assert {step: round(loss, 4) for step, loss in one.losses.items()} == {
        step: round(loss, 4) for step, loss in two.losses.items()
    }
    here, there = model_of(tmp_path / "one" / "run"), model_of(tmp_path / "two" / "run")
    for name, tensor in here.items():
        torch.testing.assert_close(tensor, there[name], atol=1e-4, rtol=0)
