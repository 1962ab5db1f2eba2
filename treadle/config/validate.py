"""Validation of config values: checked against an annotation, and made immutable.

Owns the small set of types a key may have: `bool`, `int`, `float`, `str`, `Literal`, `X | None`, `tuple[X, ...]`,
`tuple[X, Y]`, maps by name, and sections. Numbers are never guessed from strings, nor booleans from numbers, and every
number is finite.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Self, Union, get_args, get_origin

Clashes = Iterator[tuple[str, str, str | None]]
"""What a rule between keys yields: the key to blame, what is wrong, and how to mend it."""

_IMPORT_PATH = re.compile(r"([^\W\d]\w*(\.[^\W\d]\w*)*|[^:\0]+\.(?:py|pkl)):[^\W\d]\w*(\.[^\W\d]\w*)*")
_LONGEST_SHOWN = 120


class FrozenDict(dict[str, Any]):
    """A dict that cannot change, so that a free-form value is as immutable as the section that holds it."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("config does not change after loading")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type["FrozenDict"], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


def freeze(value: Any) -> Any:
    """A value with dicts and lists made immutable, all the way down."""
    if isinstance(value, Mapping):
        return FrozenDict({name: freeze(item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a value must be beyond its type: a range for numbers; for strings, a known name or an import path."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    names: tuple[str, ...] | None = None
    schemes: tuple[str, ...] = ()

    def problem(self, value: Any) -> str | None:
        fits = self._has_name(value) if isinstance(value, str) else self._in_range(value)
        return None if fits else f"must be {self}, got {show(value)}"

    def _has_name(self, value: str) -> bool:
        scheme, _, name = value.partition(":")
        if name and scheme in self.schemes:
            return True
        return self.names is None or value in self.names or _IMPORT_PATH.fullmatch(value) is not None

    def _in_range(self, value: float) -> bool:
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        if self.names is not None:
            path = "an import path (package.module:name or file.py:name)"
            if self.schemes:
                path += f", or {', '.join(f'{scheme}:NAME' for scheme in self.schemes)}"
            return f"one of {', '.join(self.names)}, or {path}" if self.names else path
        words = (("≥", self.ge), (">", self.gt), ("≤", self.le), ("<", self.lt))
        return " and ".join(f"{word} {bound:g}" for word, bound in words if bound is not None)


UNBOUNDED = Bounds()


@dataclass(frozen=True, slots=True)
class CheckedValue:
    """A value in its final form, or the problem that keeps it from having one."""

    value: Any
    problem: str | None = None


def check_value(value: Any, hint: Any, bounds: Bounds = UNBOUNDED) -> CheckedValue:
    """Check `value` against the annotation `hint`. Lists become tuples, and whole numbers floats where it is float."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return CheckedValue(freeze(value))
    if origin in (Union, UnionType):
        return _check_optional(value, arguments, bounds)
    if origin is Literal:
        fits = any(value == choice and type(value) is type(choice) for choice in arguments)
        return CheckedValue(value) if fits else _wrong(value, hint)
    if origin is tuple:
        return _check_tuple(value, hint, arguments, bounds)
    if origin is not None and issubclass(origin, Mapping):
        return _check_mapping(value, hint, arguments[1], bounds)
    if hint is float and type(value) in (int, float):
        return _check_float(value, bounds)
    if hint in (bool, int, str):
        return CheckedValue(value, bounds.problem(value)) if type(value) is hint else _wrong(value, hint)
    return CheckedValue(value) if isinstance(value, hint) else _wrong(value, hint)


def _check_float(value: float, bounds: Bounds) -> CheckedValue:
    try:
        number = float(value)
    except OverflowError:
        return _wrong(value, float)
    return CheckedValue(number, bounds.problem(number)) if isfinite(number) else _wrong(value, float)


def _check_optional(value: Any, arguments: tuple[Any, ...], bounds: Bounds) -> CheckedValue:
    (inner,) = (argument for argument in arguments if argument is not NoneType)
    if value is None:
        return CheckedValue(None)
    checked = check_value(value, inner, bounds)
    return CheckedValue(checked.value, f"{checked.problem} (null is allowed too)" if checked.problem else None)


def _check_tuple(value: Any, hint: Any, arguments: tuple[Any, ...], bounds: Bounds) -> CheckedValue:
    any_length = arguments[-1] is Ellipsis
    if any_length and not isinstance(value, list | tuple | Mapping) and value is not None:
        value = (value,)  # a single one may be written without the list
    if not isinstance(value, list | tuple) or not (any_length or len(value) == len(arguments)):
        return _wrong(value, hint)
    parts = [check_value(item, arguments[0 if any_length else at], bounds) for at, item in enumerate(value)]
    problem = next((f"item {at}: {part.problem}" for at, part in enumerate(parts) if part.problem), None)
    return CheckedValue(tuple(part.value for part in parts), problem)


def _check_mapping(value: Any, hint: Any, inner: Any, bounds: Bounds) -> CheckedValue:
    if not isinstance(value, Mapping):
        return _wrong(value, hint)
    parts = {name: check_value(item, inner, bounds) for name, item in value.items()}
    problem = next((f"{name}: {part.problem}" for name, part in parts.items() if part.problem), None)
    return CheckedValue(FrozenDict({name: part.value for name, part in parts.items()}), problem)


def _wrong(value: Any, hint: Any) -> CheckedValue:
    return CheckedValue(value, f"must be {describe_type(hint)}, got {show(value)}")


def show(value: Any) -> str:
    """A value with its kind, short enough for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean {str(value).lower()}"
    names = {int: "whole number", float: "number", str: "string"}
    kind = names.get(type(value), "list" if isinstance(value, list | tuple) else "map")
    return f"{kind} {shorten(repr(value))}" if kind != "map" or isinstance(value, Mapping) else shorten(repr(value))


def shorten(text: str) -> str:
    """Text that fits a line of a report."""
    line = one_line(text)
    return line if len(line) <= _LONGEST_SHOWN else f"{line[: _LONGEST_SHOWN - 20]} … {line[-10:]}"


def one_line(text: str) -> str:
    """Text without line breaks and other characters that move the cursor."""
    return text if text.isprintable() else repr(text)[1:-1]


def choices(hint: Any, bounds: Bounds = UNBOUNDED) -> list[str]:
    """The values a key takes, where it takes only some."""
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [*(bounds.names or ()), *(word for part in get_args(hint) for word in choices(part))]


def describe_type(hint: Any, bounds: Bounds = UNBOUNDED) -> str:
    """An annotation in a config author's words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join("null" if part is NoneType else describe_type(part, bounds) for part in arguments)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list, each item {describe_type(arguments[0], bounds)}"
        return f"a list of {len(arguments)}: " + ", ".join(describe_type(part, bounds) for part in arguments)
    if origin is not None and issubclass(origin, Mapping):
        inner = {Any: "a map", str: "a map from names to strings", float: "a map from names to numbers"}
        return inner.get(arguments[1]) or f"a map from names to sections ({arguments[1].__name__})"
    if bounds.names is not None:
        return str(bounds)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Any: "anything"}
    word = words.get(hint) or f"a section ({hint.__name__})"
    return f"{word} {bounds}" if str(bounds) else word
