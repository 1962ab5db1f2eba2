"""The wheel in a new environment: pip resolves its dependencies, and the command trains without the repository.

Most of its time is pip's, which installs torch. `make test-install` runs it. What needs no index of packages is in
`tests/integration/test_package.py`.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import treadle

ROOT = Path(__file__).parents[2]
SHORT = ("trainer.total_training_steps=1", "rollout.n=2", "data.train_batch_size=2", "actor.ppo_mini_batch_size=2",
         "data.val_max_samples=2", "logging.run_dir=here")  # fmt: skip


def run(*words: object, at: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(list(map(str, words)), cwd=at, env=environment, capture_output=True, text=True, timeout=1200)


def build(source: Path, into: Path, target: str, pattern: str) -> Path:
    done = run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", into, at=source)
    assert done.returncode == 0, done.stderr
    (made,) = into.glob(pattern)
    return made


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that holds the wheel and what it asks for, and nothing else."""
    base = tmp_path_factory.mktemp("install")
    archive = build(ROOT, base, "sdist", "*.tar.gz")
    assert run("tar", "-xzf", archive, "-C", base, at=base).returncode == 0
    wheel = build(base / archive.name.removesuffix(".tar.gz"), base, "wheel", "*.whl")
    assert run(sys.executable, "-m", "venv", base / "venv", at=base).returncode == 0
    done = run(base / "venv/bin/pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, at=base)
    assert done.returncode == 0, done.stderr
    return base / "venv/bin"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--version"], f"treadle {treadle.__version__}"),
        (["recipes"], "treadle train calculator"),
        (["train", "calculator", *SHORT], "1 steps, 1 of them now; everything is in here"),
    ],
)
def test_the_command_works(installed: Path, tmp_path: Path, words: Sequence[str], told: str) -> None:
    done = run(installed / "treadle", *words, at=tmp_path)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


def test_a_project_is_written_and_checked(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "treadle", "init", "project", at=tmp_path).returncode == 0
    checked = run(installed / "treadle", "check", "train.yaml", at=tmp_path / "project")
    assert checked.returncode == 0, checked.stderr
