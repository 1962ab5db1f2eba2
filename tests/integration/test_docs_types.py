"""The Python of the README and of docs/python.md passes a type checker, as in the project of a user who has one."""

import re
import subprocess
import sys
from pathlib import Path

import treadle

ROOT = Path(treadle.__file__).parents[1]
MEANT_TO_FAIL = "except treadle.errors.ConfigError"
"""In the block that shows what mistakes look like."""


def script_of(page: str) -> str:
    """The blocks of a page as one script: they are run in one go."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return "\n\n".join(block for block in blocks if MEANT_TO_FAIL not in block)


def test_the_python_of_the_front_pages_passes_mypy(tmp_path):
    (tmp_path / "readme.py").write_text(script_of("README.md"))
    (tmp_path / "python_page.py").write_text(script_of("docs/python.md"))
    (tmp_path / "wrong.py").write_text('import treadle\n\ntreadle.train(steps="many")\n')
    options = ["--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={ROOT / '.mypy_cache' / 'pages'}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "readme.py", "python_page.py", "wrong.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1 and errors[0].startswith('wrong.py:3: error: Argument "steps" to "train"'), done
