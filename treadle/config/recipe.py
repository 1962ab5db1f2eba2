"""Finds configs by name: shipped recipes come with the package; anything else is a path."""

from pathlib import Path

from treadle.config.source import Layer, read_file
from treadle.config.value import shorten
from treadle.errors import Mistake, nearest

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


def recipe_names() -> list[str]:
    """The names a command accepts in place of a path."""
    return sorted(path.parent.name for path in RECIPES.glob("*/recipe.yaml"))


def read_config(name: str | Path, mistakes: list[Mistake]) -> Layer:
    """The leaves of a file or of a shipped recipe. A file of the same name wins."""
    path = Path(name)
    try:
        is_directory, is_there = path.is_dir(), path.exists()
    except OSError as error:
        mistakes.append(Mistake(shorten(str(path)), f"cannot be read: {error.strerror}"))
        return {}
    if is_there and not is_directory:
        return read_file(path, mistakes)
    if str(name) in recipe_names():
        return read_file(RECIPES / path / "recipe.yaml", mistakes, name=f"recipe {name}")
    problem = "is a directory" if is_directory else "no such file or recipe"
    mistakes.append(Mistake(shorten(str(path)), problem, fix=_hint(path, is_directory)))
    return {}


def _hint(path: Path, is_directory: bool) -> str:
    beside = path if is_directory else path.parent
    files = sorted(str(file) for file in beside.glob("*.y*ml")) if beside.is_dir() else []
    if is_directory and files:
        return f"give a file: {', '.join(files[:5])}"
    return nearest(str(path), [*files, *recipe_names()]) or f"give a YAML file or a recipe: {', '.join(recipe_names())}"
