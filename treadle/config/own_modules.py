"""User's own modules: told from Python's, installed packages' and treadle's by their files, and parsed; none imported

A part of a package is looked for in the package's directories, since Python would import the package to find it.
Sources are parsed under a lock, and again after a SystemError: CPython counts the depth of all syntax trees that are
being made in one place, so that two threads which make one each may fail where either alone would not.
"""

import ast
import sys
import sysconfig
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = frozenset({"site-packages", "dist-packages"})

_INSTALLED: Sequence[str] = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def is_own_module(module: str) -> bool:
    """Whether a module has a source file that is the user's own."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "treadle":
        return False
    file = find_source(module)
    return file is not None and not _is_installed(file)


def find_source(module: str) -> Path | None:
    """The source file of a module by its dotted name; None where there is none, or it is not found."""
    top, *parts = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # a module that says nothing of itself; the real import reports it
        return None
    if spec is None:
        return None
    file = Path(spec.origin) if spec.origin and spec.has_location else None
    places = list(map(Path, spec.submodule_search_locations or ()))
    for part in parts:
        file, places = _find_part(part, places)
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _find_part(part: str, places: Sequence[Path]) -> tuple[Path | None, list[Path]]:
    """A module of a package: its file, and where its own parts are."""
    for place in places:
        if (package := place / part / "__init__.py").is_file():
            return package, [place / part]
        if (file := place / f"{part}.py").is_file():
            return file, []
    return None, [place / part for place in places if (place / part).is_dir()]


def _is_installed(file: Path) -> bool:
    """In a directory of installed packages, of this environment or of another one that this one shows."""
    return not _PACKAGES.isdisjoint(file.parts) or any(file.is_relative_to(place) for place in _INSTALLED)


_LOCK = threading.Lock()
"""For our own threads; those of other packages do not know it."""
_TRIES = 5


def parse_source(source: str | bytes) -> ast.Module:
    """The tree; SyntaxError or ValueError where it is no Python."""
    with _LOCK:
        for _ in range(_TRIES - 1):
            try:
                return ast.parse(source)
            except SystemError:
                continue
        return ast.parse(source)
