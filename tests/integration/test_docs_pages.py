"""Short guides as they stand: their files are written, their Python runs, and their commands end with status 0."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import treadle

ROOT = Path(treadle.__file__).parents[1]
BLOCK = re.compile(r"(?:<!-- file: (\S+) -->\n)?```(\w+)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", ["write.md", "evaluate.md", "asynchronous.md"])
def test_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    ran = 0
    found = BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    for name, _, text in found:
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
    for name, language, text in found:
        if name:
            continue
        if language == "python":
            commands = [[sys.executable, "-c", text]]
        else:
            assert language == "console", f"a block of {page} in {language} that nothing runs"
            words = [line.removeprefix("$ treadle ") for line in text.splitlines()]
            commands = [[sys.executable, "-m", "treadle", *map(_unquoted, line.split())] for line in words]
        for command in commands:
            done = subprocess.run(
                command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=_environment()
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            ran += 1
    assert ran >= 3


def _unquoted(word: str) -> str:
    return word.strip("'")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
