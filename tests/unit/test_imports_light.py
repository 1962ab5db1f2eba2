"""Config, records and errors come up without torch and its friends; so do help and config commands."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "transformers", "pydantic", "numpy", "safetensors", "httpx", "rich")

REPORT = f"""
import sys
heavy = [name for name in {HEAVY!r} if name in sys.modules]
print("heavy:", heavy)
"""


def heavy_after(code: str) -> str:
    """Which heavy packages a fresh interpreter has loaded after running `code`."""
    done = subprocess.run([sys.executable, "-c", code + REPORT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "module",
    ["treadle", "treadle.types", "treadle.errors", "treadle.config", "treadle.config.explain", "treadle.cli.main"],
)
def test_importing_it_loads_nothing_heavy(module):
    assert heavy_after(f"import {module}") == "heavy: []"


def test_importing_treadle_imports_none_of_its_modules():
    code = "import sys, treadle; print(sorted(name for name in sys.modules if name.startswith('treadle')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['treadle']"


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["config", "check", "calculator"],
        ["config", "check", "calculator", "actor_rollout_ref.rollout.n=4"],
        ["config", "check", "calculator", "rollout.nn=4"],
        ["config", "show", "calculator", "--origins"],
        ["config", "explain", "calculator", "rollout.n"],
        ["config", "schema"],
        ["plan", "calculator"],
    ],
    ids=" ".join,
)
def test_running_it_loads_nothing_heavy(words):
    code = f"""
from treadle.cli.main import main
try:
    main({words!r})
except SystemExit:
    pass
"""
    assert heavy_after(code) == "heavy: []"
