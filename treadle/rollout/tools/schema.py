"""JSON schemas compiled to checks, once per tool, so that a call's arguments cost next to nothing to check.

Owns the part of JSON Schema that tools use: type, enum, const, properties, required, additionalProperties, items,
anyOf, oneOf (as anyOf), allOf, bounds on numbers and lengths, and references within the document. Other keywords are
not looked at: a server checks its own arguments again, and a `pattern` run over model text could take for ever.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from treadle.rollout.tools import fit
from treadle.rollout.tools.fit import Check

Schema = Mapping[str, Any]

_SCALARS: Mapping[str, Check] = {
    "integer": fit.fit_integer,
    "number": fit.fit_number,
    "string": fit.fit_string,
    "boolean": fit.fit_boolean,
    "null": fit.fit_null,
}

_BOUNDS: Mapping[str, Callable[[float, Any], Any]] = {
    "minimum": partial(fit.fit_bound, fit.magnitude, operator.ge, "be at least"),
    "maximum": partial(fit.fit_bound, fit.magnitude, operator.le, "be at most"),
    "exclusiveMinimum": partial(fit.fit_bound, fit.magnitude, operator.gt, "be over"),
    "exclusiveMaximum": partial(fit.fit_bound, fit.magnitude, operator.lt, "be under"),
    "minLength": partial(fit.fit_bound, fit.length, operator.ge, "have a length of at least"),
    "maxLength": partial(fit.fit_bound, fit.length, operator.le, "have a length of at most"),
    "minItems": partial(fit.fit_bound, fit.count, operator.ge, "have a length of at least"),
    "maxItems": partial(fit.fit_bound, fit.count, operator.le, "have a length of at most"),
}


def compile_check(schema: Schema, closed: bool = False) -> Check:
    """The check for an object of arguments; `closed` refuses names that the schema does not list."""
    return _Compiler(schema).compile({"additionalProperties": False, **schema} if closed else schema)


class _Compiler:
    """Turns the schemas of one document into checks. References may be circular."""

    def __init__(self, document: Schema) -> None:
        self._document = document
        self._references: dict[str, Check] = {}

    def compile(self, schema: Any) -> Check:
        if schema is False:
            return fit.fit_nothing
        if not isinstance(schema, Mapping):
            return fit.fit_anything
        checks = (*self._choices(schema), *self._types(schema), *_bounds(schema))
        if not checks:
            return fit.fit_anything
        return checks[0] if len(checks) == 1 else partial(fit.fit_all, checks)

    def _choices(self, schema: Schema) -> list[Check]:
        checks = [self.compile(part) for part in _parts(schema, "allOf")]
        if isinstance(schema.get("$ref"), str):
            checks.append(self._reference(schema["$ref"]))
        for keyword in ("anyOf", "oneOf"):
            if parts := _parts(schema, keyword):
                checks.append(partial(fit.fit_any, tuple(map(self.compile, sorted(parts, key=_takes_text)))))
        for choices in (_parts(schema, "enum"), (schema["const"],) if "const" in schema else ()):
            if choices:
                checks.append(partial(fit.fit_one_of, tuple(choices)))
        return checks

    def _reference(self, name: str) -> Check:
        """The check of a named part; while that is being compiled, one that looks it up when used."""
        if name not in self._references:
            self._references[name] = lambda value: self._references[name](value)
            target: Any = self._document
            for step in name.removeprefix("#").split("/")[1:]:
                target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
            self._references[name] = self.compile(target)
        return self._references[name]

    def _types(self, schema: Schema) -> list[Check]:
        """The check for `type`; without it, for the type that other keywords imply."""
        implied = "object" if "properties" in schema else "array" if "items" in schema else ()
        given = schema.get("type", implied)
        names = [given] if isinstance(given, str) else sorted(_names(given), key=_takes_text)
        checks = [self._type(name, schema) for name in names]
        return checks if len(checks) <= 1 else [partial(fit.fit_any, tuple(checks))]

    def _type(self, name: str, schema: Schema) -> Check:
        if name == "object":
            return self._object(schema)
        if name == "array":
            return partial(fit.fit_array, self.compile(schema.get("items", True)))
        return _SCALARS.get(name, fit.fit_anything)

    def _object(self, schema: Schema) -> Check:
        found = schema.get("properties")
        properties = {name: self.compile(part) for name, part in found.items()} if isinstance(found, Mapping) else {}
        others = schema.get("additionalProperties", True)
        rest = None if others is False else self.compile(others)
        return partial(fit.fit_object, properties, tuple(_names(schema.get("required"))), rest)


def _parts(schema: Schema, keyword: str) -> Sequence[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list | tuple) else ()


def _names(found: Any) -> list[str]:
    return [name for name in found if isinstance(name, str)] if isinstance(found, list | tuple) else []


def _takes_text(part: Any) -> bool:
    """Strings are tried last, since untyped text fits one whatever it says."""
    return part == "string" or (isinstance(part, Mapping) and part.get("type") == "string")


def _bounds(schema: Schema) -> list[Check]:
    given = {keyword: schema.get(keyword) for keyword in _BOUNDS}
    return [partial(_BOUNDS[keyword], bound) for keyword, bound in given.items() if isinstance(bound, int | float)]
