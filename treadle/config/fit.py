"""Fits leaves to sections: which class each section has, which keys exist, and what nobody set.

Owns `_target_`, defaults and unknown keys. Does not look at values.
Invariant: after `fit`, every key of every section has exactly one slot, and every given leaf is in a slot or in a
mistake.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from treadle.config.merge import Tree, leaves_of
from treadle.config.origin import Leaf, Origin
from treadle.config.outline import (
    TARGET,
    Outline,
    Slot,
    full_name,
    is_free_map,
    is_section,
    key_paths,
    public_name,
    section_in_map,
    subclasses,
)
from treadle.config.root import Config, TrainConfig
from treadle.config.section import Key, Section, fields_of, types_of
from treadle.config.source import Layer, Path, dotted, put
from treadle.config.value import describe, show
from treadle.errors import Mistake, nearest

Node = Tree | Leaf | None
Part = Slot | Outline | dict[str, Outline]

_MAX_SEARCHES = 20
"""Unknown keys for which the whole config is searched for a similar one."""


def fit(tree: Tree, mistakes: list[Mistake]) -> Outline:
    """Fit leaves to a training run where they have a trainer section, and to a stand-alone rollout otherwise."""
    root = TrainConfig if "trainer" in tree else Config
    return _Fitter(root, mistakes).section(root, (), tree, None, "")


class _Fitter:
    def __init__(self, root: type[Section], mistakes: list[Mistake]) -> None:
        self._root = root
        self._mistakes = mistakes
        self._searches = 0

    def section(self, declared: type[Section], path: Path, node: Node, default: Section | None, owner: str) -> Outline:
        """The outline of one section. `default` is its value where `owner` declares it, if it has one there."""
        tree = {} if node is None or isinstance(node, Leaf) else dict(node)
        cls, target = self._target(declared, path, tree.pop(TARGET, None) if path else None, default)
        if default is not None and type(default) is not cls:
            default = None
        found = Outline(cls, path, target)
        for name, item in fields_of(cls).items():
            value = item.default if default is None else default.values()[name]
            place = f"{cls.__name__}.{name}" if value == item.default else f"{owner}.{name}"
            found.parts[name] = self._part((*path, name), item, types_of(cls)[name], tree.pop(name, None), value, place)
        self._mistakes += [self._unknown(declared, cls, (*path, name), rest) for name, rest in tree.items()]
        if isinstance(node, Leaf):
            self._refuse_value(node, f"is a section ({cls.__name__}), not a value", found)
        return found

    def _part(self, path: Path, item: Key, hint: Any, node: Node, default: Any, place: str) -> Part:
        if is_section(hint):
            return self.section(hint, path, node, default if isinstance(default, Section) else None, place)
        if named := section_in_map(hint):
            return self._named(path, named, node, default, place)
        section, _, name = place.rpartition(".")
        fallback = {} if item.required else dict(_spread(default, Origin.default(section, name)))
        slot = Slot(item, hint, fallback)
        if isinstance(node, Leaf):
            slot.leaves = {(): node}
        elif node and is_free_map(hint):
            slot.leaves = _over(slot.leaves, dict(leaves_of(node)))
        elif node:
            slot.broken = True
            where, leaf = next(leaves_of(node, path))
            problem = f"no such key: {dotted(path)} is {describe(hint, item.bounds)}"
            self._mistakes.append(Mistake(dotted(where), problem, leaf.value, leaf.origin))
        return slot

    def _named(
        self, path: Path, cls: type[Section], node: Node, default: Mapping[str, Section], place: str
    ) -> dict[str, Outline]:
        if isinstance(node, Leaf):
            if node.value != {}:
                problem = f"must be a map from names to sections ({cls.__name__}), got {show(node.value)}"
                self._mistakes.append(Mistake(dotted(path), problem, node.value, node.origin, "write {} for none"))
            return {}
        given = node or {}
        for name in [name for name in given if "." in name]:
            origin = next((leaf.origin for _, leaf in leaves_of(given[name])), None)
            self._mistakes.append(Mistake(dotted((*path, name)), "a name may hold no dot", origin=origin))
        names = dict.fromkeys((*default, *given))
        return {
            name: self.section(cls, (*path, name), given.get(name), default.get(name), f"{place}.{name}")
            for name in names
        }

    def _target(
        self, declared: type[Section], path: Path, node: Node, default: Section | None
    ) -> tuple[type[Section], Leaf]:
        usual = type(default) if default is not None else declared
        if node is None:
            return usual, Leaf(public_name(usual), Origin.default(declared.__name__, TARGET))
        _, leaf = next(leaves_of(node))
        known = {name: cls for cls in subclasses(declared) for name in (public_name(cls), full_name(cls))}
        if isinstance(node, Leaf) and isinstance(leaf.value, str) and leaf.value in known:
            return known[leaf.value], leaf
        names = [public_name(cls) for cls in subclasses(declared)]
        problem = f"must name a {declared.__name__}: {', '.join(names)}; got {show(leaf.value)}"
        fix = nearest(str(leaf.value), names) or "a class of your own must be imported before the config is loaded"
        self._mistakes.append(Mistake(dotted((*path, TARGET)), problem, leaf.value, leaf.origin, fix))
        return usual, leaf

    def _refuse_value(self, leaf: Leaf, problem: str, found: Outline) -> None:
        for _, slot in found.slots():
            slot.broken = True
        fix = f"its keys: {', '.join(fields_of(found.cls))}"
        self._mistakes.append(
            Mistake(dotted(found.path), f"{problem}; got {show(leaf.value)}", leaf.value, leaf.origin, fix)
        )

    def _unknown(self, declared: type[Section], cls: type[Section], path: Path, node: Tree | Leaf) -> Mistake:
        """One mistake for an unknown key, or for an unknown section and everything in it."""
        leaves = list(leaves_of(node, path))
        where, leaf = leaves[0] if len(leaves) == 1 else (path, leaves[0][1] if leaves else None)
        problem, fix = self._why(declared, cls, path, where)
        if leaf is not None and len(leaves) == 1:
            return Mistake(dotted(where), f"{problem} (given {show(leaf.value)})", leaf.value, leaf.origin, fix)
        return Mistake(dotted(where), problem, None, leaf.origin if leaf else None, fix)

    def _why(self, declared: type[Section], cls: type[Section], path: Path, where: Path) -> tuple[str, str | None]:
        name = path[-1]
        if self._root is Config and len(path) == 1 and name in fields_of(TrainConfig):
            fix = "add `trainer: {}` to train, or remove it for a rollout that stands alone"
            return "nothing reads this: the config has no trainer section", fix
        if path == (TARGET,):
            return "only sections have a class; a config with a trainer section is a training run", None
        owner = next((other for other in subclasses(declared) if name in fields_of(other)), None)
        if owner is not None:
            fix = f"set {dotted((*path[:-1], TARGET))}={public_name(owner)}"
            return f"{cls.__name__} has no such key; {owner.__name__} has it", fix
        return "no such key", self._similar(cls, path, where)

    def _similar(self, cls: type[Section], path: Path, where: Path) -> str | None:
        """A hint: the key that was probably meant, or the keys there are."""
        name = path[-1]
        if "." in name:
            return f"write its parts nested: {name.replace('.', ': {')}: …{'}' * name.count('.')}"
        keys = list(key_paths(self._root))
        if close := get_close_matches(name, fields_of(cls), n=1):
            meant = (*path[:-1], close[0])
            whole = (*meant, *where[len(path) :])
            return f"did you mean {dotted(whole if whole in keys else meant)!r}?"
        self._searches += 1
        if self._searches <= _MAX_SEARCHES:
            same = [dotted(key).replace("*", "NAME") for key in keys if key[-1] == where[-1]]
            close = get_close_matches(dotted(where), same, n=3, cutoff=0.0)
            if close:
                return f"did you mean {' or '.join(map(repr, close))}?"
            if hint := nearest(dotted(where), map(dotted, keys)):
                return hint
        return f"{'its keys' if path[:-1] else 'the sections'}: {', '.join(fields_of(cls))}"


def _spread(value: Any, origin: Origin, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """A default as leaves: a map gives one for each of its values, so that each can be replaced alone."""
    if not isinstance(value, Mapping) or not value:
        yield path, Leaf(value, origin)
        return
    for name, below in value.items():
        yield from _spread(below, origin, (*path, name))


def _over(default: Layer, given: Layer) -> Layer:
    """The leaves of a map: those given, over those of the default."""
    if set(default) <= {()}:
        return given
    for path, leaf in given.items():
        put(default, path, leaf)
    return default
