"""Binding: leaves to section classes and keys; then `${section.key}` references (interpolation).

Owns `_target_`, defaults and unknown keys. References are resolved once, after every layer is merged and every default
is known: a value that is nothing but a reference takes the target's value and type; inside a longer string it takes its
text. `$${…}` is not a reference: it stands for the text `${…}`. Values are not checked here.
Invariant: after `bind`, every key of every section has exactly one slot, and every given leaf is in a slot or in a
mistake. All that references bring in is at most `MAX_EXPANDED` characters and values, however they are nested: a few
lines that double each other would otherwise take all memory.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from treadle.config.parse import KeyPath, Layer, dotted, put_leaf
from treadle.config.root import Config, SFTRunConfig, TrainConfig
from treadle.config.section import TARGET, Key, Leaf, Origin, Section, fields_of, types_of
from treadle.config.tree import (
    KeySlot,
    SectionOutline,
    Tree,
    full_name,
    is_free_map,
    is_section,
    key_paths,
    leaves_of,
    public_name,
    section_in_map,
    subclasses,
)
from treadle.config.validate import describe_type, show
from treadle.errors import Mistake, nearest

TreeNode = Tree | Leaf | None
OutlineEntry = KeySlot | SectionOutline | dict[str, SectionOutline]

_MAX_SEARCHES = 20
"""Unknown keys for which the whole config is searched for a similar one."""


def bind(tree: Tree, mistakes: list[Mistake]) -> SectionOutline:
    """Fit leaves to SFT where they have an sft section, to a training run where they have a trainer section, and to a
    stand-alone rollout otherwise."""
    root = SFTRunConfig if "sft" in tree else TrainConfig if "trainer" in tree else Config
    return _Binder(root, mistakes).section(root, (), tree, None, "")


class _Binder:
    def __init__(self, root: type[Section], mistakes: list[Mistake]) -> None:
        self._root = root
        self._mistakes = mistakes
        self._searches = 0

    def section(
        self, declared: type[Section], path: KeyPath, node: TreeNode, default: Section | None, owner: str
    ) -> SectionOutline:
        """The outline of one section. `default` is its value where `owner` declares it, if it has one there."""
        tree = {} if node is None or isinstance(node, Leaf) else dict(node)
        cls, target = self._target(declared, path, tree.pop(TARGET, None) if path else None, default)
        if default is not None and type(default) is not cls:
            default = None
        found = SectionOutline(cls, path, target)
        for name, item in fields_of(cls).items():
            value = item.default if default is None else default.values()[name]
            place = f"{cls.__name__}.{name}" if value == item.default else f"{owner}.{name}"
            found.parts[name] = self._part((*path, name), item, types_of(cls)[name], tree.pop(name, None), value, place)
        self._mistakes += [self._unknown(declared, cls, (*path, name), rest) for name, rest in tree.items()]
        if isinstance(node, Leaf):
            self._refuse_value(node, f"is a section ({cls.__name__}), not a value", found)
        return found

    def _part(self, path: KeyPath, item: Key, hint: Any, node: TreeNode, default: Any, place: str) -> OutlineEntry:
        if is_section(hint):
            return self.section(hint, path, node, default if isinstance(default, Section) else None, place)
        if named := section_in_map(hint):
            return self._named(path, named, node, default, place)
        section, _, name = place.rpartition(".")
        fallback = {} if item.required else dict(_spread(default, Origin.default(section, name)))
        slot = KeySlot(item, hint, fallback)
        if isinstance(node, Leaf):
            slot.leaves = {(): node}
        elif node and is_free_map(hint):
            slot.leaves = _over(slot.leaves, dict(leaves_of(node)))
        elif node:
            slot.broken = True
            where, leaf = next(leaves_of(node, path))
            problem = f"no such key: {dotted(path)} is {describe_type(hint, item.bounds)}"
            self._mistakes.append(Mistake(dotted(where), problem, leaf.value, leaf.origin))
        return slot

    def _named(
        self, path: KeyPath, cls: type[Section], node: TreeNode, default: Mapping[str, Section], place: str
    ) -> dict[str, SectionOutline]:
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
        self, declared: type[Section], path: KeyPath, node: TreeNode, default: Section | None
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

    def _refuse_value(self, leaf: Leaf, problem: str, found: SectionOutline) -> None:
        for _, slot in found.slots():
            slot.broken = True
        fix = f"its keys: {', '.join(fields_of(found.cls))}"
        self._mistakes.append(
            Mistake(dotted(found.path), f"{problem}; got {show(leaf.value)}", leaf.value, leaf.origin, fix)
        )

    def _unknown(self, declared: type[Section], cls: type[Section], path: KeyPath, node: Tree | Leaf) -> Mistake:
        """One mistake for an unknown key, or for an unknown section and everything in it."""
        leaves = list(leaves_of(node, path))
        where, leaf = leaves[0] if len(leaves) == 1 else (path, leaves[0][1] if leaves else None)
        problem, fix = self._why(declared, cls, path, where)
        if leaf is not None and len(leaves) == 1:
            return Mistake(dotted(where), f"{problem} (given {show(leaf.value)})", leaf.value, leaf.origin, fix)
        return Mistake(dotted(where), problem, None, leaf.origin if leaf else None, fix)

    def _why(
        self, declared: type[Section], cls: type[Section], path: KeyPath, where: KeyPath
    ) -> tuple[str, str | None]:
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

    def _similar(self, cls: type[Section], path: KeyPath, where: KeyPath) -> str | None:
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


def _spread(value: Any, origin: Origin, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Leaf]]:
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
        put_leaf(default, path, leaf)
    return default


_REFERENCE = re.compile(r"(\$+)\{([^{}]*)\}")

MAX_EXPANDED = 1_000_000
"""Characters and values that the references of one config bring in, together."""


class _Unresolved(Exception):
    """A reference that has no value: what is wrong, and how to mend it; no words if its target is at fault."""

    def __init__(self, problem: str = "", fix: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix


def escape(text: str) -> str:
    """Text that reads back as it is, whatever looks like a reference in it."""
    return _REFERENCE.sub(r"$\g<0>", text)


def resolve(outline: SectionOutline, mistakes: list[Mistake]) -> None:
    """Replace every leaf that holds a reference by what it refers to."""
    resolver = _Resolver(outline, mistakes)
    for path, slot in outline.slots():
        for below in list(slot.leaves):
            resolver.settle((*path, *below))


class _Resolver:
    def __init__(self, outline: SectionOutline, mistakes: list[Mistake]) -> None:
        self._slots = dict(outline.slots())
        self._places = {(*path, *below): (slot, below) for path, slot in self._slots.items() for below in slot.leaves}
        self._mistakes = mistakes
        self._pending: list[KeyPath] = []
        self._done: set[KeyPath] = set()
        self._expanded = 0

    def settle(self, path: KeyPath) -> None:
        """Resolve the leaf at `path`, or write down why it cannot be."""
        slot, below = self._places[path]
        leaf = slot.leaves[below]
        if slot.broken or path in self._done:  # once: what an escape leaves behind looks like a reference
            return
        self._done.add(path)
        self._pending.append(path)
        try:
            slot.leaves[below] = self._resolved(leaf)
        except _Unresolved as error:
            slot.broken = True
            if error.problem:
                self._mistakes.append(Mistake(dotted(path), error.problem, leaf.value, leaf.origin, error.fix))
        finally:
            self._pending.pop()

    def _resolved(self, leaf: Leaf) -> Leaf:
        if not _mentions_dollar(leaf.value):
            return leaf
        if not _refers(leaf.value):
            return Leaf(self._substitute(leaf.value), leaf.origin)
        origin = leaf.origin.through(f"reference {leaf.value}")
        if isinstance(leaf.value, str) and (whole := _REFERENCE.fullmatch(leaf.value)):
            target = self._taken(whole.group(2))
            return Leaf(target.value, origin, target.text if target.text is not None else plain_text(target.value))
        return Leaf(self._substitute(leaf.value), origin)

    def _substitute(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._substitute(item) for item in value]
        if isinstance(value, dict):
            return {name: self._substitute(item) for name, item in value.items()}
        if not isinstance(value, str):
            return value
        if (whole := _REFERENCE.fullmatch(value)) and _refers(value):
            return self._taken(whole.group(2)).value
        return _REFERENCE.sub(self._text, value)

    def _text(self, found: re.Match[str]) -> str:
        if len(found.group(1)) > 1:
            return found.group(0)[1:]
        target = self._taken(found.group(2))
        text = target.text if isinstance(target.text, str) else plain_text(target.value)
        if text is None or target.value is None:
            raise _Unresolved(f"{found.group(0)} is {show(target.value)}, which cannot be part of a text")
        return text

    def _taken(self, name: str) -> Leaf:
        """What a reference stands for, counted; the first one too many is a mistake, and the rest are not resolved."""
        target = self._target(name)
        told = self._expanded > MAX_EXPANDED
        self._expanded += _size(target.value)
        if self._expanded > MAX_EXPANDED:
            problem = f"${{{name}}} takes the references of this config to more than {MAX_EXPANDED:,} characters"
            raise _Unresolved() if told else _Unresolved(problem, "refer to fewer or smaller values")
        return target

    def _target(self, name: str) -> Leaf:
        path = tuple(name.split("."))
        slot = self._slots.get(path)
        if path in self._places:
            return self._settled(path)
        if slot is not None and slot.leaves:  # a free-form map, as one value
            leaves = {below: self._settled((*path, *below)) for below in list(slot.leaves)}
            value = nested({below: leaf.value for below, leaf in leaves.items()})
            return Leaf(value, next(iter(leaves.values())).origin)
        raise self._missing(name, path)

    def _settled(self, path: KeyPath) -> Leaf:
        if path in self._pending:
            circle = " → ".join(dotted(item) for item in (*self._pending[self._pending.index(path) :], path))
            raise _Unresolved(f"refers to itself: {circle}", "give one of them a value")
        self.settle(path)
        slot, below = self._places[path]
        if slot.broken:
            raise _Unresolved
        return slot.leaves[below]

    def _missing(self, name: str, path: KeyPath) -> _Unresolved:
        if ":" in name:
            fix = f"give {dotted(self._pending[-1])}=… on the command line"
            return _Unresolved(f"${{{name}}}: only ${{section.key}} is understood", fix)
        if any(other[: len(path)] == path for other in self._slots):
            return _Unresolved(f"${{{name}}} is a whole section", "refer to one of its keys")
        fix = nearest(name, map(dotted, self._places)) or "write $${…} for text that is no reference"
        return _Unresolved(f"${{{name}}} is no key with a value", fix)


def nested(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Values by path as one value, maps within maps."""
    found: dict[str, Any] = {}
    for path, value in values.items():
        inner = found
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return found


def plain_text(value: Any) -> str | None:
    """A string, number or boolean as a config writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | float) else None


def _size(value: Any) -> int:
    """Characters and values in a value."""
    if isinstance(value, list | tuple):
        return 1 + sum(map(_size, value))
    if isinstance(value, dict):
        return 1 + sum(len(str(name)) + _size(item) for name, item in value.items())
    return len(value) if isinstance(value, str) else 1


def _strings(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def _mentions_dollar(value: Any) -> bool:
    return any("${" in text for text in _strings(value))


def _refers(value: Any) -> bool:
    return any(len(found.group(1)) == 1 for text in _strings(value) for found in _REFERENCE.finditer(text))
