"""Source of the package as syntax trees, each file read and walked once for all tests that look at it."""

import ast
import gc
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "treadle"

FILES = tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def _nodes() -> dict[Path, tuple[ast.AST, ...]]:
    """Made without the garbage collector, which takes longer to look at half a million new nodes than they to make."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return {path: tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in FILES}
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, in the order of `ast.walk`."""
    return _nodes()[path]


def tree(path: Path) -> ast.Module:
    module = nodes(path)[0]
    assert isinstance(module, ast.Module)
    return module
