"""The wheel and the source distribution: they hold what is needed, and run without the repository."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import treadle
from tests.chaos import tiny_run

ROOT = Path(__file__).parents[2]


def build(source: Path, into: Path, target: str) -> Path:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", into], cwd=source, check=True)
    (made,) = into.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the source distribution, as an installer without wheels would."""
    base = tmp_path_factory.mktemp("package")
    archive = build(ROOT, base / "sdist", "sdist")
    subprocess.run(["tar", "-xzf", archive, "-C", base], check=True)
    return build(base / archive.name.removesuffix(".tar.gz"), base / "wheel", "wheel")


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        held = {name for name in packed.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", "treadle"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert held == set(tracked.stdout.split())
    assert wheel.name.startswith(f"treadle-{treadle.__version__}-")


def test_the_wheel_trains_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which sees the dependencies of this one and not its treadle."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    (site,) = place.glob("lib/python*/site-packages")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel], check=True)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = place / "bin/python"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    found = subprocess.run(
        [python, "-c", "import treadle; print(treadle.__file__)"],
        cwd=tmp_path, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert Path(found.stdout.strip()).is_relative_to(site)
    run = subprocess.run(
        [python, "-m", "treadle", "train", "calculator", "logging.run_dir=here", *tiny_run(1)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "here/journal.sqlite").exists()
