"""What OmegaConf's interpolations mean: `${a.b}`, `${.sibling}`, `${oc.select:a.b,fallback}`.

Owns the old reference syntax. A reference to a key that moved unchanged becomes a reference to the new key; any other
takes the value it has. Nothing is read from the environment.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from treadle.config.source import Layer, Path, dotted

MISSING: Any = object()
"""The value of a key that nobody gave."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a value comes to: the value itself, and how to write it here."""

    value: Any = None
    written: Any = None
    given: bool = True
    """False where the key referred to is not given, so that this is verl's fallback."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Expression:
    text: str


class Interpolations:
    """Resolves values against the old keys that are given.

    `new_key` names the key of ours that an old key is written to unchanged; `verl_default` is what verl assumes for a
    key of ours, or MISSING.
    """

    def __init__(self, given: Layer, new_key: Callable[[Path], str | None], verl_default: Callable[[str], Any]) -> None:
        self._given = given
        self._new_key = new_key
        self._verl_default = verl_default
        self._pending: list[Path] = []

    def resolve(self, value: Any, path: Path) -> Resolved:
        """What `value`, written at the old key `path`, comes to."""
        if isinstance(value, list | tuple):
            return _joined([self.resolve(item, path) for item in value], list)
        if not isinstance(value, str) or "${" not in value:
            return Resolved(value, value)
        try:
            pieces = list(_pieces(value))
        except ValueError:
            return Resolved(problem=f"{value!r} has a brace that is not closed.")
        if len(pieces) == 1 and isinstance(pieces[0], _Expression):
            return self._expression(pieces[0].text, path)
        parts = [
            Resolved(item, item) if isinstance(item, str) else self._expression(item.text, path) for item in pieces
        ]
        return _joined(parts, lambda items: "".join(map(_text, items)))

    def _expression(self, text: str, path: Path) -> Resolved:
        resolver, colon, rest = text.partition(":")
        if not colon:
            return self._reference(text.strip(), path)
        if resolver.strip() != "oc.select":
            where = "the environment" if resolver.strip() in ("oc.env", "env") else f"the resolver {resolver.strip()}"
            return Resolved(problem=f"Nothing is read from {where}: give the value on the command line.")
        name, comma, fallback = rest.partition(",")
        target = _absolute(name.strip(), path)
        if target in self._given:
            return self._taken(target)
        return replace(self.resolve(_plain(fallback.strip()) if comma else None, path), given=False)

    def _reference(self, name: str, path: Path) -> Resolved:
        target = _absolute(name, path)
        if target in self._given:
            return self._taken(target)
        new = self._new_key(target)
        if new is None:
            return Resolved(problem=f"${{{name}}} refers to a key that is not given and has no counterpart.")
        value = self._verl_default(new)
        return Resolved(value, f"${{{new}}}" if value is MISSING else value, given=False)

    def _taken(self, target: Path) -> Resolved:
        if target in self._pending:
            return Resolved(problem=f"${{{dotted(target)}}} refers to itself.")
        self._pending.append(target)
        try:
            found = self.resolve(self._given[target].value, target)
        finally:
            self._pending.pop()
        new = self._new_key(target)
        return replace(found, written=f"${{{new}}}" if new else found.value, given=True)


def _joined(parts: list[Resolved], join: Callable[[list[Any]], Any]) -> Resolved:
    problem = next((part.problem for part in parts if part.problem), "")
    values = [part.value for part in parts]
    value = MISSING if any(item is MISSING for item in values) else join(values)
    return Resolved(value, join([part.written for part in parts]), problem=problem)


def _pieces(text: str) -> Iterator[str | _Expression]:
    """Literal text and interpolations, in order; an interpolation may hold others."""
    while text:
        start = text.find("${")
        if start != 0:
            yield text if start < 0 else text[:start]
            text = "" if start < 0 else text[start:]
            continue
        end = _closing(text)
        yield _Expression(text[2:end])
        text = text[end + 1 :]


def _closing(text: str) -> int:
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if letter == "}" and depth == 0:
            return at
    raise ValueError(text)


def _absolute(name: str, path: Path) -> Path:
    """`.x` is a sibling of the key it is written at, `..x` a sibling of the key above."""
    dots = len(name) - len(name.lstrip("."))
    base = path[: len(path) - dots] if dots else ()
    return (*base, *name[dots:].split("."))


def _plain(text: str) -> Any:
    return text if "${" in text else yaml.safe_load(text)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
