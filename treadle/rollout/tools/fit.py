"""Does a value fit? The checks that schemas are compiled to, one per kind of value.

Owns the words a model reads when an argument is wrong, and how untyped text becomes a value: as JSON, or as Python
spells it, where the schema asks for anything but a string.
Invariant: a check returns the value in the type that was asked for, or raises Misfit; it never changes its input.
"""

from collections.abc import Callable, Mapping
from typing import Any

from treadle.rollout.parsers.payload import Malformed, decode_all, defuse, quote
from treadle.rollout.parsers.protocol import Untyped

Check = Callable[[Any], Any]

_SHOWN = 80


class Misfit(Exception):
    """A value that does not fit: what is wrong, and where, as a path from the arguments down."""

    def __init__(self, problem: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path

    def under(self, step: str) -> "Misfit":
        return Misfit(self.problem, (step, *self.path))

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.problem}" if self.path else self.problem


def fit_object(properties: Mapping[str, Check], required: tuple[str, ...], rest: Check | None, value: Any) -> Any:
    """An object; `rest` checks what `properties` do not name, and None refuses it."""
    given = _resolve(value, dict, "an object")
    for name in required:
        if name not in given:
            raise Misfit(f"missing: {', '.join(name for name in required if name not in given)}")
    changed: dict[str, Any] = {}
    for name, item in given.items():
        check = properties.get(name, rest)
        if check is None:
            raise Misfit(f"there is no {quote(name[:_SHOWN])}; known: {', '.join(properties) or 'none'}")
        try:
            fitted = check(item)
        except Misfit as misfit:
            raise misfit.under(defuse(name[:_SHOWN])) from None
        if fitted is not item:
            changed[name] = fitted
    return {**given, **changed} if changed else given


def fit_array(check: Check, value: Any) -> Any:
    fitted = []
    for at, item in enumerate(_resolve(value, list, "a list")):
        try:
            fitted.append(check(item))
        except Misfit as misfit:
            raise misfit.under(str(at)) from None
    return fitted


def fit_integer(value: Any) -> Any:
    """A whole number; `2.0` is one."""
    if type(value) is int:
        return value
    number = value if type(value) is float else _resolve(value, int, "a whole number", float)
    if type(number) is float and not number.is_integer():
        raise _misfit("a whole number", value)
    return int(number)


def fit_number(value: Any) -> Any:
    return value if type(value) is int or type(value) is float else _resolve(value, int, "a number", float)


def fit_string(value: Any) -> Any:
    if type(value) is str:
        return value
    if type(value) is Untyped:
        return str(value)
    raise _misfit("a string", value)


def fit_boolean(value: Any) -> Any:
    return value if type(value) is bool else _resolve(value, bool, "true or false")


def fit_null(value: Any) -> Any:
    return None if value is None else _resolve(value, type(None), "null")


def fit_anything(value: Any) -> Any:
    if type(value) is not Untyped:
        return value
    try:
        return _from_text(value)
    except Malformed:
        return str(value)


def fit_nothing(value: Any) -> Any:
    raise Misfit("no value fits")


def fit_all(checks: tuple[Check, ...], value: Any) -> Any:
    for check in checks:
        value = check(value)
    return value


def fit_any(checks: tuple[Check, ...], value: Any) -> Any:
    problems = []
    for check in checks:
        try:
            return check(value)
        except Misfit as misfit:
            problems.append(str(misfit))
    raise Misfit(" or ".join(dict.fromkeys(problems)))


def fit_one_of(choices: tuple[Any, ...], value: Any) -> Any:
    candidates = (str(value), fit_anything(value)) if type(value) is Untyped else (value,)
    for choice in choices:
        if any(choice == candidate and type(choice) is type(candidate) for candidate in candidates):
            return choice
    raise Misfit(f"must be one of {', '.join(map(_show, choices))}, got {_show(value)}")


def _resolve(value: Any, kind: type, words: str, other: type | None = None) -> Any:
    """`value`, if it is of the kind asked for; untyped text is read first."""
    if type(value) is Untyped:
        try:
            value = _from_text(value)
        except Malformed:
            raise _misfit(words, value) from None
    if type(value) is kind or type(value) is other:
        return value
    if kind is dict and isinstance(value, Mapping):
        return dict(value)
    if kind is list and isinstance(value, tuple):
        return list(value)
    raise _misfit(words, value)


def _from_text(value: str) -> Any:
    words = {"True": True, "False": False, "None": None}
    stripped = value.strip()
    return words[stripped] if stripped in words else decode_all(stripped)


def _misfit(words: str, value: Any) -> Misfit:
    return Misfit(f"must be {words}, got {_show(value)}")


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    shown = repr(str(value) if isinstance(value, str) else value)
    return defuse(shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…")


def fit_bound(
    measure: Callable[[Any], float | None], fits: Callable[[Any, Any], bool], words: str, bound: float, value: Any
) -> Any:
    """A limit on what `measure` says of the value; None where the limit does not apply."""
    size = measure(value)
    if size is not None and not fits(size, bound):
        raise Misfit(f"must {words} {bound}, got {_show(value)}")
    return value


def magnitude(value: Any) -> float | None:
    return value if type(value) is int or type(value) is float else None


def length(value: Any) -> float | None:
    return len(value) if isinstance(value, str) else None


def count(value: Any) -> float | None:
    return len(value) if isinstance(value, list) else None
