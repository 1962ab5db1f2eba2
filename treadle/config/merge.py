"""Lays config layers over each other: later ones win, and what they replaced is remembered."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from treadle.config.origin import Leaf, Source
from treadle.config.source import UNSET, Layer, Path, dotted
from treadle.errors import Mistake

Tree = dict[str, "Tree | Leaf"]
"""Leaves by the parts of their paths."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The leaves in force, and for each path the leaves that were replaced there, newest first."""

    tree: Tree
    overrode: dict[Path, tuple[Leaf, ...]]


def merge(layers: Sequence[Layer], is_section: Callable[[Path], bool], mistakes: list[Mistake]) -> Merged:
    """Merge `layers`, left to right. Where `is_section`, null or {} says nothing beyond "it is there"."""
    merged = Merged({}, {})
    for layer in layers:
        for path, leaf in layer.items():
            if leaf.value in (None, {}) and is_section(path):
                _mention(merged.tree, path, leaf, mistakes)
            elif leaf.value is UNSET:
                _take_back(merged, path, leaf, mistakes)
            else:
                replaced = _put(merged.tree, path, leaf)
                history = [old for where, last in replaced for old in (last, *merged.overrode.pop(where, ()))]
                history += merged.overrode.pop(path, ())
                merged.overrode[path] = tuple(old for old in history if old.value != {})
    return merged


def leaves_of(node: Tree | Leaf, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """Every leaf at or below a node."""
    if isinstance(node, Leaf):
        yield path, node
        return
    for name, below in node.items():
        yield from leaves_of(below, (*path, name))


def _put(tree: Tree, path: Path, given: Leaf | Tree) -> list[tuple[Path, Leaf]]:
    """Set a node and return the leaves that gave way: at the same path, below it, or above it."""
    replaced: list[tuple[Path, Leaf]] = []
    node = tree
    for end, part in enumerate(path[:-1], 1):
        below = node.get(part)
        if isinstance(below, Leaf):
            replaced.append((path[:end], below))
        if not isinstance(below, dict):
            below = node[part] = {}
        node = below
    replaced += leaves_of(node.get(path[-1], {}), path)
    node[path[-1]] = given
    return replaced


def _mention(tree: Tree, path: Path, leaf: Leaf, mistakes: list[Mistake]) -> None:
    node = _find(tree, path)
    if node is None:
        _put(tree, path, {})
    elif node and leaf.origin.source is Source.COMMAND_LINE:
        fix = f"write ~{dotted(path)} to take back what was said before"
        mistakes.append(Mistake(dotted(path), "an empty section changes nothing", leaf.value, leaf.origin, fix))


def _take_back(merged: Merged, path: Path, leaf: Leaf, mistakes: list[Mistake]) -> None:
    node, parent = _find(merged.tree, path), _find(merged.tree, path[:-1])
    if node is None or not isinstance(parent, dict):
        mistakes.append(Mistake(dotted(path), "is not set, so it cannot be taken back", origin=leaf.origin))
        return
    for where, old in leaves_of(node, path):
        merged.overrode[where] = (leaf, old, *merged.overrode.pop(where, ()))
    del parent[path[-1]]


def _find(tree: Tree, path: Path) -> Tree | Leaf | None:
    node: Tree | Leaf | None = tree
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    return node
