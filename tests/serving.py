"""A `treadle serve` of its own for a test: started, waited for, and ended by Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def serving(*words: str, cwd: Path = ROOT, end: signal.Signals = signal.SIGINT) -> Iterator[tuple[str, str]]:
    """The address and the key of a server that is ended by Ctrl-C, or killed."""
    command = [sys.executable, "-m", "treadle", "serve", *words, "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        while "ANTHROPIC_API_KEY" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        found = re.search(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)", said)
        assert found is not None
        try:
            yield found[1], found[2]
        finally:
            process.send_signal(end)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == (0 if end is signal.SIGINT else -end) and "Traceback" not in errors
