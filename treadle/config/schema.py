"""The config as JSON Schema, for completion and checking in an editor's YAML plugin."""

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from treadle.config.explain import summary
from treadle.config.outline import is_section, public_name, subclasses
from treadle.config.root import TrainConfig
from treadle.config.section import Key, Section, fields_of, types_of
from treadle.config.value import Bounds

Schema = dict[str, Any]

_REFERENCE: Schema = {"type": "string", "pattern": r"\$\{.*\}"}
_IMPORT_PATH: Schema = {"type": "string", "pattern": ".+:.+"}
_SIMPLE = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}


def json_schema() -> Schema:
    """One schema for training and stand-alone rollout, and for files that say only some of it: nothing is required."""
    definitions: Schema = {}
    root = _section(TrainConfig, definitions)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "treadle config",
        **root,
        "definitions": definitions,
    }


def _section(cls: type[Section], definitions: Schema) -> Schema:
    """The keys of a section class and of all its variants; `_target_` chooses among them."""
    variants = subclasses(cls)
    properties: Schema = {}
    for variant in variants:
        for name, item in fields_of(variant).items():
            properties[name] = _property(types_of(variant)[name], item, definitions)
    if cls is not TrainConfig:
        names = [public_name(variant) for variant in variants]
        properties["_target_"] = {"enum": names, "description": "class of this section", "default": names[0]}
    kinds = ["object", "null"]  # an empty section is null in YAML
    return {"type": kinds, "description": summary(cls), "additionalProperties": False, "properties": properties}


def _property(hint: Any, item: Key, definitions: Schema) -> Schema:
    if is_section(hint):
        return {**_type(hint, item.bounds, definitions), "description": item.description}
    found = {"anyOf": [_type(hint, item.bounds, definitions), _REFERENCE], "description": item.description}
    return found if item.required else {**found, "default": _plain(item.default)}


def _type(hint: Any, bounds: Bounds, definitions: Schema) -> Schema:
    origin, arguments = get_origin(hint), get_args(hint)
    if is_section(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}
            definitions[hint.__name__].update(_section(hint, definitions))
        return {"allOf": [{"$ref": f"#/definitions/{hint.__name__}"}]}
    if origin in (Union, UnionType):
        return {"anyOf": [_type(part, bounds, definitions) for part in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return _list(arguments, bounds, definitions)
    if origin is not None and issubclass(origin, Mapping):
        inner = arguments[1]
        return {"type": "object", "additionalProperties": True if inner is Any else _type(inner, bounds, definitions)}
    if bounds.names is not None and hint is str:
        return {"anyOf": [{"enum": list(bounds.names)}, _IMPORT_PATH]}
    names = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    limits = {names[word]: getattr(bounds, word) for word in names if getattr(bounds, word) is not None}
    return {"type": _SIMPLE[hint], **(limits if hint in (int, float) else {})}


def _list(arguments: tuple[Any, ...], bounds: Bounds, definitions: Schema) -> Schema:
    item = _type(arguments[0], bounds, definitions)
    if arguments[-1] is Ellipsis:
        return {"anyOf": [{"type": "array", "items": item}, item]}
    return {"type": "array", "items": item, "minItems": len(arguments), "maxItems": len(arguments)}


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return {name: _plain(item) for name, item in value.values().items()}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
