"""The documentation site builds without a warning, and its generated pages hold every key and every public name."""

import re
import subprocess
import sys
from pathlib import Path

import treadle
from treadle.config.root import TrainConfig
from treadle.config.tree import key_paths

ROOT = Path(__file__).parents[2]


def test_the_site_is_built_from_the_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    keys = set(re.findall(r"<code>([a-z_.]+)</code>", (tmp_path / "reference/config/index.html").read_text()))
    plain = {".".join(path) for path in key_paths(TrainConfig) if "*" not in path}
    assert not {key for key in plain if key not in keys and "<" not in key}
    api = (tmp_path / "reference/api/index.html").read_text()
    assert not [name for name in treadle.__all__ if f'id="treadle.{name}"' not in api and f">{name}<" not in api]
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").glob("*.md")}
    navigated = (ROOT / "mkdocs.yml").read_text()
    assert not [page for page in pages if f"{page}.md" not in navigated], "a page that no menu leads to"
