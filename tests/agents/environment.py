"""The environment that `make test-agents` builds: where its programs are, and whether it is there."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
AGENTS = Path(os.environ.get("AGENTS", ROOT / ".venv-agents")).absolute()
PYTHON = AGENTS / "bin" / "python"


def _folders() -> list[Path]:
    """Where its programs are: Claude Code's is in a package, Codex's in npm's folder."""
    return [*AGENTS.glob("lib/python*/site-packages/claude_agent_sdk/_bundled"), AGENTS / "npm/node_modules/.bin"]


PATH = os.pathsep.join(map(str, [AGENTS / "bin", *_folders()]))
"""To put before the PATH of a test."""


def has(program: str) -> bool:
    return any((Path(folder) / program).exists() for folder in PATH.split(os.pathsep))


def needs(program: str) -> pytest.MarkDecorator:
    """A test that runs a program of the environment."""
    return pytest.mark.skipif(not has(program), reason=f"make test-agents installs {program}; codex needs npm")
