"""Tool signatures: a typed function's parameters as a JSON schema, and JSON values converted to the annotated types.

Owns the annotations a tool may use, and what a docstring says of parameters: Google style (`Args:`) and plain
`:param name:`. Refuses other annotations by name: a parameter that cannot be described cannot be called.
"""

import enum
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from inspect import cleandoc
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from treadle.rollout.tools.validators import InvalidArgument, compile_validator

_SECTION = re.compile(
    r"(args|arguments|parameters|params|returns?|yields?|raises|examples?|notes?|keyword args|attributes):\s*$",
    re.IGNORECASE,
)
_ARGUMENT_SECTIONS = ("args", "arguments", "parameters", "params", "keyword args")
_GOOGLE = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_FIELD = re.compile(r":(\w+)(?:\s+([^:]*?))?:\s*(.*)")


@dataclass(frozen=True, slots=True)
class ParsedDocstring:
    """The description of a function, and those of its parameters by name."""

    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> ParsedDocstring:
    """The parts of a docstring; lines of one part are joined."""
    reader = _DocstringReader()
    for line in cleandoc(text or "").splitlines():
        reader.take(line)
    described = {name: _join_lines(lines) for name, lines in reader.parameters.items()}
    return ParsedDocstring(_join_lines(reader.description), {name: text for name, text in described.items() if text})


class _DocstringReader:
    """Docstring parser: assigns each line to its part."""

    def __init__(self) -> None:
        self.description: list[str] = []
        self.parameters: dict[str, list[str]] = {}
        self._part: list[str] = self.description
        self._in_arguments = False
        self._indent: int | None = None

    def take(self, line: str) -> None:
        indent = len(line) - len(line.lstrip())
        if indent == 0 and (section := _SECTION.match(line)):
            self._in_arguments = section[1].lower() in _ARGUMENT_SECTIONS
            self._part, self._indent = [], None
        elif indent == 0 and (found := _FIELD.match(line)):
            self._start_field(found[1], found[2] or "", found[3])
        elif self._in_arguments and line.strip():
            self._take_argument(line.strip(), indent)
        else:
            self._part.append(line)

    def _start_field(self, kind: str, subject: str, text: str) -> None:
        """A `:param int name: words` line, or another field, which describes no parameter."""
        self._in_arguments = False
        self._part = [text]
        if kind in ("param", "parameter", "arg", "argument") and subject:
            self.parameters[subject.split()[-1]] = self._part

    def _take_argument(self, text: str, indent: int) -> None:
        """A line of an `Args:` section: a new parameter, or more about the last one where it is indented further."""
        self._indent = indent if self._indent is None else self._indent
        if indent <= self._indent and (found := _GOOGLE.match(text)):
            self._part = [found[2]]
            self.parameters[found[1]] = self._part
        else:
            self._part.append(text)


def _join_lines(lines: Iterable[str]) -> str:
    return " ".join(" ".join(lines).split())


T = TypeVar("T")


class InjectedMarker:
    """Marks a parameter that the task fills in and the model never sees."""


Injected = Annotated[T, InjectedMarker()]
"""`secret: Injected[str]`: filled from `task.tool_kwargs[tool]["secret"]`, and left out of the schema."""

Convert = Callable[[Any], Any]

SUPPORTED = (
    "str, int, float, bool, None, Any, Literal, Enum, list, tuple[T, ...], dict[str, T], unions, dataclass, TypedDict"
)

_SCALARS: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


@dataclass(frozen=True, slots=True)
class TypeSchema:
    """A type as JSON schema, and what turns a fitting JSON value into it; None where that is the value itself."""

    schema: dict[str, Any]
    convert: Convert | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes from the model, and what from the task."""

    description: str
    parameters: dict[str, Any]
    converts: tuple[tuple[str, Convert], ...]
    injected: Mapping[str, bool]
    """Injected parameters, and whether each must be given."""


def read_signature(function: Callable[..., Any], where: str, skip_first: bool = False) -> Signature:
    """The signature of `function`; a ValueError names `where` and the parameter if it cannot be described."""
    hints = _hints(function, where)
    docs = read_docstring(function.__doc__)
    properties: dict[str, Any] = {}
    required: list[str] = []
    converts: list[tuple[str, Convert]] = []
    injected: dict[str, bool] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]:
        name, needed = parameter.name, parameter.default is parameter.empty
        hint = _checked_hint(parameter, hints, where)
        if _is_injected(hint):
            injected[name] = needed
            continue
        typed = type_schema(hint, f"{where}: parameter {name!r}")
        properties[name] = _describe_parameter(typed.schema, name, docs, parameter.default)
        required += [name] if needed else []
        converts += [(name, typed.convert)] if typed.convert else []
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    return Signature(docs.description, parameters, tuple(converts), injected)


def _hints(function: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ValueError(f"{where}: its annotations cannot be read: {error}") from error


def _checked_hint(parameter: inspect.Parameter, hints: Mapping[str, Any], where: str) -> Any:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ValueError(f"{where}: parameter {str(parameter).partition(':')[0]!r} cannot be given by name")
    if parameter.name not in hints:
        raise ValueError(
            f"{where}: parameter {parameter.name!r} has no annotation; add one, such as {parameter.name}: str"
        )
    return hints[parameter.name]


def _is_injected(hint: Any) -> bool:
    return any(isinstance(extra, InjectedMarker) for extra in getattr(hint, "__metadata__", ()))


def _describe_parameter(schema: dict[str, Any], name: str, docs: ParsedDocstring, default: Any) -> dict[str, Any]:
    """The schema of one parameter with its description, and its default where JSON can express it."""
    found = dict(schema)
    if name in docs.parameters:
        found["description"] = docs.parameters[name]
    if isinstance(default, str | int | float | bool) and not isinstance(default, enum.Enum):
        found["default"] = default
    return found


def type_schema(hint: Any, where: str, seen: tuple[Any, ...] = ()) -> TypeSchema:
    """The schema and converter of an annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        text = next((extra for extra in arguments[1:] if isinstance(extra, str)), None)
        inner = type_schema(arguments[0], where, seen)
        return TypeSchema({**inner.schema, "description": text}, inner.convert) if text else inner
    if hint is Any:
        return TypeSchema({})
    if hint in _SCALARS:
        return TypeSchema({"type": _SCALARS[hint]}, float if hint is float else None)
    if origin is Literal:
        return _choice(list(arguments), None, where)
    if origin in (Union, types.UnionType):
        return _union([type_schema(part, where, seen) for part in arguments])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choice([member.value for member in hint], hint, where)
    return _compound(hint, origin or hint, arguments, where, seen)


def _compound(hint: Any, origin: Any, arguments: tuple[Any, ...], where: str, seen: tuple[Any, ...]) -> TypeSchema:
    if hint in seen:
        raise ValueError(f"{where}: {hint.__name__} refers to itself, which a schema cannot show; use dict")
    if is_dataclass(hint) or is_typeddict(hint):
        return _record(hint, where, (*seen, hint))
    if origin in (list, Sequence) or (origin is tuple and arguments[1:] in ((), (Ellipsis,))):
        item = type_schema(arguments[0], where, seen) if arguments else TypeSchema({})
        schema: dict[str, Any] = {"type": "array", "items": item.schema} if item.schema else {"type": "array"}
        made = tuple if origin is tuple else list
        plain = item.convert is None and made is list
        return TypeSchema(schema, None if plain else partial(_convert_list, item.convert, made))
    if origin in (dict, Mapping) and (not arguments or arguments[0] is str):
        item = type_schema(arguments[1], where, seen) if arguments else TypeSchema({})
        schema = {"type": "object", "additionalProperties": item.schema} if item.schema else {"type": "object"}
        return TypeSchema(schema, partial(_convert_dict, item.convert) if item.convert else None)
    raise ValueError(f"{where} has a type that JSON arguments cannot have: {hint!r}; supported: {SUPPORTED}")


def _choice(values: list[Any], convert: Convert | None, where: str) -> TypeSchema:
    foreign = [value for value in values if type(value) not in _SCALARS]
    if foreign:
        raise ValueError(f"{where} offers {foreign[0]!r}, which is no plain JSON value")
    kinds = {_SCALARS[type(value)] for value in values}
    return TypeSchema({"type": kinds.pop(), "enum": values} if len(kinds) == 1 else {"enum": values}, convert)


def _union(typed_fields: list[TypeSchema]) -> TypeSchema:
    """Plain types as a list of their names, anything richer as alternatives."""
    plain = [typed.schema["type"] for typed in typed_fields if typed.schema.keys() == {"type"}]
    schema = {"type": plain} if len(plain) == len(typed_fields) else {"anyOf": [typed.schema for typed in typed_fields]}
    if not any(typed.convert for typed in typed_fields):
        return TypeSchema(schema)
    tries = tuple((compile_validator(typed.schema), typed.convert) for typed in typed_fields)
    return TypeSchema(schema, partial(_convert_union, tries))


def _record(hint: Any, where: str, seen: tuple[Any, ...]) -> TypeSchema:
    hints = get_type_hints(hint, include_extras=True)
    if is_dataclass(hint):
        needed = [f.name for f in fields(hint) if f.default is MISSING and f.default_factory is MISSING and f.init]
        names = [f.name for f in fields(hint) if f.init]
    else:
        needed, names = sorted(hint.__required_keys__), list(hints)
    typed_fields = {name: type_schema(hints[name], f"{where}, field {name!r}", seen) for name in names}
    schema = {
        "type": "object",
        "properties": {name: typed.schema for name, typed in typed_fields.items()},
        "required": needed,
        "additionalProperties": False,
    }
    converts = {name: typed.convert for name, typed in typed_fields.items() if typed.convert}
    made = hint if is_dataclass(hint) else dict
    return TypeSchema(schema, partial(_convert_record, made, converts) if converts or made is not dict else None)


def _convert_list(convert: Convert | None, made: type, value: list[Any]) -> Any:
    return made(map(convert, value) if convert else value)


def _convert_dict(convert: Convert, value: dict[str, Any]) -> dict[str, Any]:
    return {name: convert(item) for name, item in value.items()}


def _convert_record(made: Any, converts: Mapping[str, Convert], value: dict[str, Any]) -> Any:
    return made(**{name: converts[name](item) if name in converts else item for name, item in value.items()})


def _convert_union(tries: tuple[tuple[Convert, Convert | None], ...], value: Any) -> Any:
    """The first alternative that fits; the arguments were checked, so one does."""
    for check, convert in tries:
        try:
            check(value)
        except InvalidArgument:
            continue
        return convert(value) if convert else value
    raise AssertionError("a checked value fits one of its alternatives")
