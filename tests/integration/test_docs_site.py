"""The documentation site builds without a warning, and its generated pages hold every key and every public name."""

import re
import subprocess
import sys
from pathlib import Path

import treadle
import treadle.config
import treadle.rollout
import treadle.rollout.tools
from docs.site import API
from tests.unit.test_surface import ERRORS, TYPES
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
    shown = [f"{module}.{name}" for modules in API.values() for module, names in modules.items() for name in names]
    assert not [path for path in shown if f'id="{path}"' not in api]
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").glob("*.md")}
    navigated = (ROOT / "mkdocs.yml").read_text()
    assert not [page for page in pages if f"{page}.md" not in navigated], "a page that no menu leads to"
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and not path.name.startswith("_")}
    listed = (tmp_path / "examples/index.html").read_text()
    assert not [name for name in folders if f"<code>examples/{name}</code>" not in listed]
    for notebook in (ROOT / "examples/notebooks").glob("*.ipynb"):
        assert f"examples/{notebook.stem}.md" in navigated
        shown = re.sub(r"<[^>]+>", "", (tmp_path / f"examples/{notebook.stem}/index.html").read_text())
        assert "import treadle" in shown


def test_the_page_of_the_interface_has_every_name_that_users_may_import() -> None:
    """What the surface test locks, and what packages export; sections of configs have the page of keys."""
    sections = {
        name
        for name in treadle.config.__all__
        if isinstance(held := getattr(treadle.config, name), type)
        and issubclass(held, treadle.config.Section)
        and held is not treadle.config.Section
    }
    shown: dict[str, set[str]] = {}
    for modules in API.values():
        for module, names in modules.items():
            shown.setdefault(module, set()).update(names)
    assert shown["treadle"] == set(treadle.__all__)
    assert shown["treadle.rollout"] == set(treadle.rollout.__all__)
    assert shown["treadle.rollout.tools"] == set(treadle.rollout.tools.__all__)
    assert shown["treadle.config"] == set(treadle.config.__all__) - sections
    assert shown["treadle.errors"] == set(ERRORS.split())
    assert shown["treadle.types"] == set(TYPES.split())
