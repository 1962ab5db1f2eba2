"""Real SIGKILLs in the middle of saving: what is found afterwards is always whole, and goes on to the same weights."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.policies import make_policy, save_tiny_model
from treadle.checkpoint import Checkpoints, latest
from treadle.config.rollout import ModelConfig
from treadle.config.training import CheckpointConfig
from treadle.model.checksum import checksum

WORK = """
import sys
from pathlib import Path
from tests.policies import make_groups, make_policy
from treadle.checkpoint import Checkpoints
from treadle.config.training import AlgorithmConfig
from treadle.config.rollout import ModelConfig
from treadle.config.training import CheckpointConfig, TrainerConfig
from treadle.model.checksum import checksum
from treadle.trainer.step import StepParts, train_step

directory, run_dir = Path(sys.argv[1]), Path(sys.argv[2])
policy = make_policy(directory, total_steps=1000)
checkpoints = Checkpoints(run_dir, checkpoint=CheckpointConfig(keep_last=2), model=ModelConfig(path=str(directory)))
progress = checkpoints.restore(policy, None)
parts = StepParts(policy, policy._actor, AlgorithmConfig(), TrainerConfig())
for step in range(progress.step + 1 if progress else 1, 1000):
    train_step(parts, make_groups(step, num_groups=1), step=step)
    print(step, checksum(policy.tensors()), flush=True)
    checkpoints.save(policy, None, step, {"position": step})
"""

ROUNDS = 12


def start(directory: Path, run_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORK, str(directory), str(run_dir)], stdout=subprocess.PIPE, text=True
    )


def test_kill_dash_nine_never_leaves_half_a_checkpoint(tmp_path: Path) -> None:
    """Each life is killed at a random moment of its saves; weights by step must agree over all lives."""
    directory, run_dir = save_tiny_model(tmp_path / "model"), tmp_path / "run"
    rng, seen, last_step = random.Random(0), {}, 0
    for _ in range(ROUNDS):
        process = start(directory, run_dir)
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            time.sleep(rng.random() * 0.3)
        finally:
            process.send_signal(signal.SIGKILL)
            rest, _ = process.communicate(timeout=60)
        for line in [first, *rest.splitlines()]:
            if len(line.split()) == 2:
                step, word = line.split()
                assert seen.setdefault(int(step), word) == word, f"step {step} differs after a resume"
        last_step = check_whole(directory, run_dir, seen, last_step)
    assert last_step > ROUNDS


def check_whole(directory: Path, run_dir: Path, seen: dict[int, str], last_step: int) -> int:
    """What is found is whole, no older than before, and holds the weights that were announced; returns its step."""
    saved = list((run_dir / "checkpoints").glob("[0-9]*")) if (run_dir / "checkpoints").is_dir() else []
    if latest(run_dir) is None:
        assert not saved, "a name without a dot is a whole checkpoint"
        return last_step
    policy = make_policy(directory, total_steps=1000)
    checkpoints = Checkpoints(run_dir, checkpoint=CheckpointConfig(), model=ModelConfig(path=str(directory)))
    progress = checkpoints.restore(policy, None)
    assert progress is not None and progress.step >= last_step
    assert len(saved) <= 3, "two are kept, and a third while the oldest is on its way out"
    assert checksum(policy.tensors()) == seen[progress.step]
    return progress.step
