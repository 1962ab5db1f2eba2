"""Resolves `${section.key}` references, once, after every layer is merged and every default is known.

A value that is nothing but a reference takes the target's value and type; inside a longer string it takes its text.
`$${…}` is not a reference: it stands for the text `${…}`.
Invariant: all that references bring into a config is at most `MAX_EXPANDED` characters and values, however they are
nested: a few lines that double each other would otherwise take all memory.
"""

import re
from collections.abc import Mapping
from typing import Any

from treadle.config.origin import Leaf
from treadle.config.outline import Outline
from treadle.config.source import Path, dotted
from treadle.config.value import show
from treadle.errors import Mistake, nearest

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


def resolve(outline: Outline, mistakes: list[Mistake]) -> None:
    """Replace every leaf that holds a reference by what it refers to."""
    resolver = _Resolver(outline, mistakes)
    for path, slot in outline.slots():
        for below in list(slot.leaves):
            resolver.settle((*path, *below))


class _Resolver:
    def __init__(self, outline: Outline, mistakes: list[Mistake]) -> None:
        self._slots = dict(outline.slots())
        self._places = {(*path, *below): (slot, below) for path, slot in self._slots.items() for below in slot.leaves}
        self._mistakes = mistakes
        self._pending: list[Path] = []
        self._done: set[Path] = set()
        self._expanded = 0

    def settle(self, path: Path) -> None:
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
        """What a reference stands for, counted; the first one too many is told, and nothing is taken after it."""
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

    def _settled(self, path: Path) -> Leaf:
        if path in self._pending:
            circle = " → ".join(dotted(item) for item in (*self._pending[self._pending.index(path) :], path))
            raise _Unresolved(f"refers to itself: {circle}", "give one of them a value")
        self.settle(path)
        slot, below = self._places[path]
        if slot.broken:
            raise _Unresolved
        return slot.leaves[below]

    def _missing(self, name: str, path: Path) -> _Unresolved:
        if ":" in name:
            fix = f"give {dotted(self._pending[-1])}=… on the command line"
            return _Unresolved(f"${{{name}}}: only ${{section.key}} is understood", fix)
        if any(other[: len(path)] == path for other in self._slots):
            return _Unresolved(f"${{{name}}} is a whole section", "refer to one of its keys")
        fix = nearest(name, map(dotted, self._places)) or "write $${…} for text that is no reference"
        return _Unresolved(f"${{{name}}} is no key with a value", fix)


def nested(values: Mapping[Path, Any]) -> dict[str, Any]:
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
