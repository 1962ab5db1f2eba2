"""Argument validators: JSON schemas compiled once per tool, so that checking a call's arguments is cheap.

Owns the part of JSON Schema that tools use: type, enum, const, properties, required, additionalProperties, items,
anyOf, oneOf (as anyOf), allOf, bounds on numbers and lengths, and references within the document. Other keywords are
ignored: a server checks its own arguments again, and a `pattern` run over model text could take forever. Owns the
messages a model reads when an argument is wrong, and how untyped text becomes a value: as JSON, or as Python spells
it, where the schema asks for anything but a string.
Invariant: a validator returns the value in the type that was asked for, or raises InvalidArgument; it never changes
its input.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from treadle.rollout.parsers.base import MalformedCall, Untyped, decode_all, escape_special_tokens, quote

ArgumentValidator = Callable[[Any], Any]

_SHOWN = 80


class InvalidArgument(Exception):
    """A value that does not fit: what is wrong, and where, as a path from the arguments down."""

    def __init__(self, problem: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path

    def under(self, step: str) -> "InvalidArgument":
        return InvalidArgument(self.problem, (step, *self.path))

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.problem}" if self.path else self.problem


def validate_object(
    properties: Mapping[str, ArgumentValidator], required: tuple[str, ...], rest: ArgumentValidator | None, value: Any
) -> Any:
    """An object; `rest` checks what `properties` do not name, and None refuses it."""
    given = _resolve(value, dict, "an object")
    for name in required:
        if name not in given:
            raise InvalidArgument(f"missing: {', '.join(name for name in required if name not in given)}")
    changed: dict[str, Any] = {}
    for name, item in given.items():
        check = properties.get(name, rest)
        if check is None:
            raise InvalidArgument(f"there is no {quote(name[:_SHOWN])}; known: {', '.join(properties) or 'none'}")
        try:
            validated = check(item)
        except InvalidArgument as error:
            raise error.under(escape_special_tokens(name[:_SHOWN])) from None
        if validated is not item:
            changed[name] = validated
    return {**given, **changed} if changed else given


def validate_array(check: ArgumentValidator, value: Any) -> Any:
    validated = []
    for at, item in enumerate(_resolve(value, list, "a list")):
        try:
            validated.append(check(item))
        except InvalidArgument as error:
            raise error.under(str(at)) from None
    return validated


def validate_integer(value: Any) -> Any:
    """A whole number; `2.0` is one."""
    if type(value) is int:
        return value
    number = value if type(value) is float else _resolve(value, int, "a whole number", float)
    if type(number) is float and not number.is_integer():
        raise _invalid_argument("a whole number", value)
    return int(number)


def validate_number(value: Any) -> Any:
    return value if type(value) is int or type(value) is float else _resolve(value, int, "a number", float)


def validate_string(value: Any) -> Any:
    if type(value) is str:
        return value
    if type(value) is Untyped:
        return str(value)
    raise _invalid_argument("a string", value)


def validate_boolean(value: Any) -> Any:
    return value if type(value) is bool else _resolve(value, bool, "true or false")


def validate_null(value: Any) -> Any:
    return None if value is None else _resolve(value, type(None), "null")


def validate_anything(value: Any) -> Any:
    if type(value) is not Untyped:
        return value
    try:
        return _from_text(value)
    except MalformedCall:
        return str(value)


def validate_nothing(value: Any) -> Any:
    raise InvalidArgument("no value fits")


def validate_all(checks: tuple[ArgumentValidator, ...], value: Any) -> Any:
    for check in checks:
        value = check(value)
    return value


def validate_any(checks: tuple[ArgumentValidator, ...], value: Any) -> Any:
    problems = []
    for check in checks:
        try:
            return check(value)
        except InvalidArgument as error:
            problems.append(str(error))
    raise InvalidArgument(" or ".join(dict.fromkeys(problems)))


def validate_one_of(choices: tuple[Any, ...], value: Any) -> Any:
    candidates = (str(value), validate_anything(value)) if type(value) is Untyped else (value,)
    for choice in choices:
        if any(choice == candidate and type(choice) is type(candidate) for candidate in candidates):
            return choice
    raise InvalidArgument(f"must be one of {', '.join(map(_show, choices))}, got {_show(value)}")


def _resolve(value: Any, kind: type, words: str, other: type | None = None) -> Any:
    """`value`, if it is of the kind asked for; untyped text is read first."""
    if type(value) is Untyped:
        try:
            value = _from_text(value)
        except MalformedCall:
            raise _invalid_argument(words, value) from None
    if type(value) is kind or type(value) is other:
        return value
    if kind is dict and isinstance(value, Mapping):
        return dict(value)
    if kind is list and isinstance(value, tuple):
        return list(value)
    raise _invalid_argument(words, value)


def _from_text(value: str) -> Any:
    words = {"True": True, "False": False, "None": None}
    stripped = value.strip()
    return words[stripped] if stripped in words else decode_all(stripped)


def _invalid_argument(words: str, value: Any) -> InvalidArgument:
    return InvalidArgument(f"must be {words}, got {_show(value)}")


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    shown = repr(str(value) if isinstance(value, str) else value)
    return escape_special_tokens(shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…")


def validate_bound(
    measure: Callable[[Any], float | None], fits: Callable[[Any, Any], bool], words: str, bound: float, value: Any
) -> Any:
    """A limit on the measure of a value; a measure of None: the limit does not apply."""
    size = measure(value)
    if size is not None and not fits(size, bound):
        raise InvalidArgument(f"must {words} {bound}, got {_show(value)}")
    return value


def magnitude(value: Any) -> float | None:
    return value if type(value) is int or type(value) is float else None


def length(value: Any) -> float | None:
    return len(value) if isinstance(value, str) else None


def count(value: Any) -> float | None:
    return len(value) if isinstance(value, list) else None


Schema = Mapping[str, Any]

_SCALARS: Mapping[str, ArgumentValidator] = {
    "integer": validate_integer,
    "number": validate_number,
    "string": validate_string,
    "boolean": validate_boolean,
    "null": validate_null,
}

_BOUNDS: Mapping[str, Callable[[float, Any], Any]] = {
    "minimum": partial(validate_bound, magnitude, operator.ge, "be at least"),
    "maximum": partial(validate_bound, magnitude, operator.le, "be at most"),
    "exclusiveMinimum": partial(validate_bound, magnitude, operator.gt, "be over"),
    "exclusiveMaximum": partial(validate_bound, magnitude, operator.lt, "be under"),
    "minLength": partial(validate_bound, length, operator.ge, "have a length of at least"),
    "maxLength": partial(validate_bound, length, operator.le, "have a length of at most"),
    "minItems": partial(validate_bound, count, operator.ge, "have a length of at least"),
    "maxItems": partial(validate_bound, count, operator.le, "have a length of at most"),
}


def compile_validator(schema: Schema, closed: bool = False) -> ArgumentValidator:
    """The check for an object of arguments; `closed` refuses names that the schema does not list."""
    return _SchemaCompiler(schema).compile({"additionalProperties": False, **schema} if closed else schema)


class _SchemaCompiler:
    """Turns the schemas of one document into checks. References may be circular."""

    def __init__(self, document: Schema) -> None:
        self._document = document
        self._references: dict[str, ArgumentValidator] = {}

    def compile(self, schema: Any) -> ArgumentValidator:
        if schema is False:
            return validate_nothing
        if not isinstance(schema, Mapping):
            return validate_anything
        checks = (*self._choices(schema), *self._types(schema), *_bounds(schema))
        if not checks:
            return validate_anything
        return checks[0] if len(checks) == 1 else partial(validate_all, checks)

    def _choices(self, schema: Schema) -> list[ArgumentValidator]:
        checks = [self.compile(part) for part in _parts(schema, "allOf")]
        if isinstance(schema.get("$ref"), str):
            checks.append(self._reference(schema["$ref"]))
        for keyword in ("anyOf", "oneOf"):
            if parts := _parts(schema, keyword):
                checks.append(partial(validate_any, tuple(map(self.compile, sorted(parts, key=_takes_text)))))
        for choices in (_parts(schema, "enum"), (schema["const"],) if "const" in schema else ()):
            if choices:
                checks.append(partial(validate_one_of, tuple(choices)))
        return checks

    def _reference(self, name: str) -> ArgumentValidator:
        """The check of a named part; while that is being compiled, one that looks it up when used."""
        if name not in self._references:
            self._references[name] = lambda value: self._references[name](value)
            target: Any = self._document
            for step in name.removeprefix("#").split("/")[1:]:
                target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
            self._references[name] = self.compile(target)
        return self._references[name]

    def _types(self, schema: Schema) -> list[ArgumentValidator]:
        """The check for `type`; without it, for the type that other keywords imply."""
        implied = "object" if "properties" in schema else "array" if "items" in schema else ()
        given = schema.get("type", implied)
        names = [given] if isinstance(given, str) else sorted(_names(given), key=_takes_text)
        checks = [self._type(name, schema) for name in names]
        return checks if len(checks) <= 1 else [partial(validate_any, tuple(checks))]

    def _type(self, name: str, schema: Schema) -> ArgumentValidator:
        if name == "object":
            return self._object(schema)
        if name == "array":
            return partial(validate_array, self.compile(schema.get("items", True)))
        return _SCALARS.get(name, validate_anything)

    def _object(self, schema: Schema) -> ArgumentValidator:
        found = schema.get("properties")
        properties = {name: self.compile(part) for name, part in found.items()} if isinstance(found, Mapping) else {}
        others = schema.get("additionalProperties", True)
        rest = None if others is False else self.compile(others)
        return partial(validate_object, properties, tuple(_names(schema.get("required"))), rest)


def _parts(schema: Schema, keyword: str) -> Sequence[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list | tuple) else ()


def _names(found: Any) -> list[str]:
    return [name for name in found if isinstance(name, str)] if isinstance(found, list | tuple) else []


def _takes_text(part: Any) -> bool:
    """Strings are tried last, since untyped text is always a valid string."""
    return part == "string" or (isinstance(part, Mapping) and part.get("type") == "string")


def _bounds(schema: Schema) -> list[ArgumentValidator]:
    given = {keyword: schema.get(keyword) for keyword in _BOUNDS}
    return [partial(_BOUNDS[keyword], bound) for keyword, bound in given.items() if isinstance(bound, int | float)]
