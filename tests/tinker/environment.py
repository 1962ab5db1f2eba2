"""The environment that `make test-tinker` builds, and a server for its client."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TINKER = Path(os.environ.get("TINKER", ROOT / ".venv-tinker")).absolute()
PYTHON = TINKER / "bin" / "python"

needs_client = pytest.mark.skipif(not PYTHON.exists(), reason="make test-tinker installs the tinker package")


@contextmanager
def serving(*words: str, cwd: Path) -> Iterator[dict[str, str]]:
    """The environment variables for clients of a `treadle serve --tinker`, which is ended by Ctrl-C."""
    command = [sys.executable, "-m", "treadle", "serve", *words, "--tinker", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        while "checkpoints are in" not in said:
            line = process.stdout.readline()
            assert line, said + (process.stderr.read() if process.stderr else "")
            said += line
        found = re.search(r"TINKER_BASE_URL=(\S+) TINKER_API_KEY=(\S+)", said)
        assert found is not None
        try:
            yield {"TINKER_BASE_URL": found[1], "TINKER_API_KEY": found[2]}
        finally:
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors, errors
    assert "ended" in rest


def run_client(argv: list[str], variables: dict[str, str], cwd: Path) -> str:
    """What a program of the client's environment prints."""
    environment = {
        **os.environ,
        **variables,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(cwd / "hf"),
        "TINKER_TELEMETRY": "1",
    }
    done = subprocess.run(
        [str(PYTHON), *argv], env=environment, cwd=cwd, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return done.stdout


def run_program(name: str, variables: dict[str, str], cwd: Path) -> Any:
    """What a program of this folder reports, in its last line."""
    return json.loads(run_client([str(Path(__file__).with_name(name))], variables, cwd).splitlines()[-1])
