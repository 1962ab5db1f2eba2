"""Tool signatures: a typed function's parameters as a JSON schema, and JSON values converted to the annotated types.

Owns the annotations a tool may use. Plain types are described here; everything else that pydantic can describe (its
models and constraints, dates, UUIDs, paths) is left to it, where it is installed. Refuses other annotations by name: a
parameter that cannot be described cannot be called.
"""

import enum
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from treadle.rollout.parsers.base import escape_special_tokens
from treadle.rollout.tools.validators import InvalidArgument, compile_validator
from treadle.terminal import warn


@dataclass(frozen=True, slots=True)
class ParsedDocstring:
    """The description of a function, and those of its parameters by name."""

    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> ParsedDocstring:
    """The parts of a docstring, in Google, NumPy, reST or Epydoc style; lines of one part are joined."""
    from docstring_parser import DocstringStyle, ParseError, parse  # only where tools are configured

    readings = []
    for style in (DocstringStyle.REST, DocstringStyle.GOOGLE, DocstringStyle.NUMPYDOC, DocstringStyle.EPYDOC):
        with suppress(ParseError):
            readings.append(_parse_google(text) if style is DocstringStyle.GOOGLE else parse(text or "", style))
    parsed = max(readings, key=lambda reading: len(reading.meta))
    described = {item.arg_name: _join_lines(item.description) for item in parsed.params}
    return ParsedDocstring(
        _join_lines(parsed.description), {name.lstrip("*"): words for name, words in described.items() if words}
    )


def _parse_google(text: str | None) -> Any:
    """A docstring in Google style. An entry without a colon describes nothing, and costs the others nothing."""
    from docstring_parser import DocstringMeta, ParseError
    from docstring_parser.google import GoogleParser

    class LenientParser(GoogleParser):
        def _build_meta(self, text: str, title: str) -> DocstringMeta:
            try:
                return super()._build_meta(text, title)
            except ParseError:
                return DocstringMeta(args=[title], description=text)

    parser = LenientParser()
    titles = "|".join(parser.sections)
    without_empty = re.sub(rf"^(?:{titles}):[ \t]*$(?=\n*(?:\S|\Z))", "", inspect.cleandoc(text or ""), flags=re.M)
    return parser.parse(without_empty)


def _join_lines(text: str | None) -> str:
    return " ".join((text or "").split())


T = TypeVar("T")


class InjectedMarker:
    """Marks a parameter that the task fills in and the model never sees."""


Injected = Annotated[T, InjectedMarker()]
"""`secret: Injected[str]`: filled from `task.tool_kwargs[tool]["secret"]`, and left out of the schema."""

Convert = Callable[[Any], Any]

SUPPORTED = (
    "str, int, float, bool, None, Any, Literal, Enum, list, tuple[T, ...], dict[str, T], unions, dataclass, TypedDict, "
    "and with pydantic installed what it can describe"
)

_SCALARS: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


@dataclass(frozen=True, slots=True)
class TypeSchema:
    """A type as JSON schema, and what turns a fitting JSON value into it; None where that is the value itself.

    A conversion may still refuse a value, with InvalidArgument.
    """

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
    definitions: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]:
        name, needed = parameter.name, parameter.default is parameter.empty
        hint = _checked_hint(parameter, hints, where)
        if _is_injected(hint):
            injected[name] = needed
            continue
        typed = type_schema(hint, f"{where}: parameter {name!r}")
        _collect_definitions(typed.schema, definitions, where)
        properties[name] = _describe_parameter(typed.schema, name, docs, parameter.default)
        required += [name] if needed else []
        converts += [(name, typed.convert)] if typed.convert else []
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if definitions:
        parameters["$defs"] = definitions
    if (
        properties
        and not docs.parameters
        and re.search(r"^\s*(Args|Arguments|Parameters):", function.__doc__ or "", re.M)
    ):
        warn(f"note: {where}: its docstring describes no parameter; write each on a line of its own, as `name: words`")
    return Signature(docs.description, parameters, tuple(converts), injected)


def _collect_definitions(schema: Any, definitions: dict[str, Any], where: str) -> None:
    """Move the named parts of a parameter's schema to where its references look for them: the top."""
    for part in schema if isinstance(schema, list) else [*schema.values()] if isinstance(schema, dict) else ():
        _collect_definitions(part, definitions, where)
    if isinstance(schema, dict) and isinstance(schema.get("$defs"), dict):
        for name, part in schema.pop("$defs").items():
            if definitions.setdefault(name, part) != part:
                raise ValueError(f"{where}: two of its types are called {name!r}; rename one")


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
        if any(not isinstance(extra, str) for extra in arguments[1:]) and (found := _pydantic_schema(hint)):
            return found
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
    if found := _pydantic_schema(hint):
        return found
    raise ValueError(f"{where} has a type that JSON arguments cannot have: {hint!r}; supported: {SUPPORTED}")


def _pydantic_schema(hint: Any) -> TypeSchema | None:
    """What pydantic makes of a type; None where it is not installed, or cannot describe it either."""
    try:
        from pydantic import PydanticUserError, TypeAdapter, ValidationError
    except ImportError:
        return None
    try:
        adapter = TypeAdapter(hint)
        schema = _without_titles(adapter.json_schema())
    except PydanticUserError:
        return None

    def convert(value: Any) -> Any:
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            path = tuple(escape_special_tokens(str(step)) for step in first["loc"])
            raise InvalidArgument(escape_special_tokens(first["msg"]), path) from None

    return TypeSchema(schema, convert)


def _without_titles(schema: Any) -> Any:
    """A schema without the titles that pydantic makes from names: they cost tokens and say nothing."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: {key: _without_titles(item) for key, item in value.items()}
        if name in ("properties", "$defs") and isinstance(value, dict)
        else _without_titles(value)
        for name, value in schema.items()
        if not (name == "title" and isinstance(value, str))
    }


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
