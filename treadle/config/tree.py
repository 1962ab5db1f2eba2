"""Config tree: layers merged, later ones winning; and the outline of sections that the tree is bound to.

Owns the record of what each value replaced, and what can be asked of section classes: which sections and keys are
declared where. Checks no value and reads no source.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from treadle.config.parse import UNSET, KeyPath, Layer, dotted
from treadle.config.section import Key, Leaf, Section, Source, fields_of, types_of
from treadle.errors import Mistake

Tree = dict[str, "Tree | Leaf"]
"""Leaves by the parts of their paths."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The leaves in force, and for each path the leaves that were replaced there, newest first."""

    tree: Tree
    overrode: dict[KeyPath, tuple[Leaf, ...]]


def merge(layers: Sequence[Layer], is_section: Callable[[KeyPath], bool], mistakes: list[Mistake]) -> Merged:
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


def leaves_of(node: Tree | Leaf, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Leaf]]:
    """Every leaf at or below a node."""
    if isinstance(node, Leaf):
        yield path, node
        return
    for name, below in node.items():
        yield from leaves_of(below, (*path, name))


def _put(tree: Tree, path: KeyPath, given: Leaf | Tree) -> list[tuple[KeyPath, Leaf]]:
    """Set a node and return the leaves that gave way: at the same path, below it, or above it."""
    replaced: list[tuple[KeyPath, Leaf]] = []
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


def _mention(tree: Tree, path: KeyPath, leaf: Leaf, mistakes: list[Mistake]) -> None:
    node = _find(tree, path)
    if node is None:
        _put(tree, path, {})
    elif node and leaf.origin.source is Source.COMMAND_LINE:
        fix = f"write ~{dotted(path)} to take back what was said before"
        mistakes.append(Mistake(dotted(path), "an empty section changes nothing", leaf.value, leaf.origin, fix))


def _take_back(merged: Merged, path: KeyPath, leaf: Leaf, mistakes: list[Mistake]) -> None:
    node, parent = _find(merged.tree, path), _find(merged.tree, path[:-1])
    if node is None or not isinstance(parent, dict):
        mistakes.append(Mistake(dotted(path), "is not set, so it cannot be taken back", origin=leaf.origin))
        return
    for where, old in leaves_of(node, path):
        merged.overrode[where] = (leaf, old, *merged.overrode.pop(where, ()))
    del parent[path[-1]]


def _find(tree: Tree, path: KeyPath) -> Tree | Leaf | None:
    node: Tree | Leaf | None = tree
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    return node


@dataclass(slots=True)
class KeySlot:
    """One key: its declaration and the leaves that give its value, by the path below the key."""

    key: Key
    hint: Any
    leaves: dict[KeyPath, Leaf]
    broken: bool = False
    """It has no value, and the mistake is written down."""


@dataclass(slots=True)
class SectionOutline:
    """One section to be built: its class, and what fills each key."""

    cls: type[Section]
    path: KeyPath
    target: Leaf
    parts: dict[str, "KeySlot | SectionOutline | dict[str, SectionOutline]"] = field(default_factory=dict)

    def slots(self) -> Iterator[tuple[KeyPath, KeySlot]]:
        """Every slot at or below this section, with its full path."""
        for name, part in self.parts.items():
            if isinstance(part, KeySlot):
                yield (*self.path, name), part
            else:
                for inner in [part] if isinstance(part, SectionOutline) else part.values():
                    yield from inner.slots()


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def section_in_map(hint: Any) -> type[Section] | None:
    """The section class of a key that holds sections by name."""
    arguments = get_args(hint)
    return arguments[1] if len(arguments) == 2 and is_section(arguments[1]) else None


def is_free_map(hint: Any) -> bool:
    """Whether a key holds a map whose names the user chooses and whose values are plain."""
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping) and section_in_map(hint) is None


def subclasses(cls: type[Section]) -> list[type[Section]]:
    """A section class and everything derived from it, as far as it is imported: config imports nothing by name."""
    return [cls, *(below for child in cls.__subclasses__() for below in subclasses(child))]


def full_name(cls: type[Section]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def public_name(cls: type[Section]) -> str:
    """The name to write in `_target_`."""
    return f"treadle.config.{cls.__name__}" if cls.__module__.startswith("treadle.config.") else full_name(cls)


def usual_class(cls: type[Section], name: str) -> type[Section]:
    """The class of the section at `name` when no `_target_` says otherwise."""
    default, hint = fields_of(cls)[name].default, types_of(cls)[name]
    declared: type[Section] = section_in_map(hint) or hint
    return type(default) if isinstance(default, Section) else declared


def hints_at(cls: type[Section], path: KeyPath) -> Iterator[Any]:
    """The types `path` may have in a section class and its variants."""
    for variant in subclasses(cls):
        hint: Any = types_of(variant).get(path[0])
        rest = path[1:]
        if section_in_map(hint) and rest:
            hint, rest = section_in_map(hint), rest[1:]
        if hint is not None and not rest:
            yield hint
        elif is_section(hint):
            yield from hints_at(hint, rest)


def key_paths(cls: type[Section], path: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key of a section class and its variants, sections themselves aside; `*` stands for a name in a map."""
    seen: dict[KeyPath, None] = {}
    for variant in subclasses(cls):
        for name, hint in types_of(variant).items():
            inner = hint if is_section(hint) else section_in_map(hint)
            below = (*path, name) if is_section(hint) else (*path, name, "*")
            seen.update(dict.fromkeys(key_paths(inner, below) if inner else [(*path, name)]))
    yield from seen
