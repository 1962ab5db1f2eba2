"""The recipe running_sum, shortened: an environment, a tool and reasoning-gym's tasks, and it learns."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from treadle.journal import JournalReader

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")


def test_the_agent_learns_to_keep_a_running_total(tmp_path):
    words = ("trainer.total_training_steps=16", "trainer.test_freq=0", f"logging.run_dir={tmp_path}")
    done = subprocess.run(
        [sys.executable, "-m", "treadle", "train", "running_sum", *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    success = [row["validation/success"] for row in rows if "validation/success" in row]
    assert success[0] <= 0.3
    assert success[-1] >= success[0] + 0.2
    assert max(row["rollout_corr/logprob_abs_diff"] for row in rows if "reward/mean" in row) < 1e-5
    with JournalReader.open(tmp_path) as reader:
        _check_questions([entry.trajectory for entry in reader.trajectories()])


def _check_questions(trajectories):
    """A sum of n terms takes n - 1 questions, each on top of the answer before it."""
    asked = [(trajectory, _said(trajectory, "user")) for trajectory in trajectories]
    wanted = [int(trajectory.data_source.partition(" ")[0]) - 1 for trajectory in trajectories]
    assert all(len(questions) <= most for (_, questions), most in zip(asked, wanted, strict=True))
    whole = [pair for pair, most in zip(asked, wanted, strict=True) if len(pair[1]) == most == 3]
    assert any(trajectory.reward.value == 1.0 for trajectory, _ in whole)


def _said(trajectory, role):
    return [message["content"] for message in trajectory.messages if message["role"] == role]
