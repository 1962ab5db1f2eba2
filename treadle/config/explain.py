"""Explanation of a key or section: value, type, description, origin and history; and the JSON Schema for editors."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from treadle.config.root import SFTRunConfig
from treadle.config.section import TARGET, Key, Leaf, Section, Unset, fields_of, types_of
from treadle.config.show import ABSENT, as_yaml, flatten
from treadle.config.stages import STAGE_SECTIONS
from treadle.config.tree import is_section, public_name, section_in_map, subclasses
from treadle.config.validate import Bounds, describe_type, shorten
from treadle.errors import ConfigError, Mistake, nearest


@dataclass(frozen=True, slots=True)
class Explanation:
    """All there is to say about one key."""

    key: str
    value: Any
    type: str
    description: str
    origin: str
    overrode: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.key} = {as_yaml(self.value)}",
            f"  {self.description}",
            f"  type      {self.type}",
            f"  origin    {self.origin}",
        ]
        lines += [f"  overrode  {item}" for item in self.overrode]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class SectionOverview:
    """All keys of one section, and the sections in it."""

    key: str
    cls: str
    description: str
    keys: tuple[Explanation, ...]
    sections: tuple[tuple[str, str], ...]
    """Name and description of each section below."""

    def __str__(self) -> str:
        lines = [f"{self.key}: {self.description} ({self.cls})"]
        for item in self.keys:
            name = item.key.removeprefix(f"{self.key}.")
            lines += [f"  {name} = {shorten(as_yaml(item.value))}  # {item.origin}"]
            lines += [f"      {item.description} ({item.type})"]
        lines += [f"  {name}: section\n      {description}" for name, description in self.sections]
        return "\n".join(lines)


def explain(config: Section, name: str) -> Explanation | SectionOverview:
    """A key's value, type, description, origin and history, or all keys of a section. An unknown name is an error."""
    found = _descend(config, name)
    if found is None:
        raise ConfigError([Mistake(name, "no such key", fix=_nearest_key(config, name))])
    if isinstance(found, Section):
        return _overview(name, found)
    section, key = found
    return _map_overview(section, key, name) if _holds_sections(section, key) else _explain(section, key, name)


def _nearest_key(config: Section, name: str) -> str | None:
    """The key that was probably meant: the same one without a parent it had elsewhere, or one that looks like it."""
    keys = flatten(config)
    known = {*keys, *(key.rpartition(".")[0] for key in keys)}
    parts = name.split(".")
    shorter = (".".join(parts[start:]) for start in range(1, len(parts)))
    return next((f"did you mean {key!r}?" for key in shorter if key in known), None) or nearest(name, sorted(known))


def _descend(section: Section, name: str) -> Section | tuple[Section, str] | None:
    """The section that `name` leads to, or the section that holds such a key and the key's name there."""
    first, _, rest = name.partition(".")
    if name == TARGET:
        return section, name
    if first not in fields_of(type(section)):
        return None
    value = section.values()[first]
    if rest and _holds_sections(section, first):
        inner, _, rest = rest.partition(".")
        return (_descend(value[inner], rest) if rest else value[inner]) if inner in value else None
    if isinstance(value, Section):
        return _descend(value, rest) if rest else value
    return None if _below(value, rest) is ABSENT else (section, name)


def _holds_sections(section: Section, name: str) -> bool:
    return section_in_map(types_of(type(section)).get(name)) is not None


def _explain(section: Section, key: str, name: str) -> Explanation:
    trace = section.trace(key)
    overrode = tuple(_past(leaf) for leaf in trace.overrode)
    cls = type(section)
    if key == TARGET:
        return Explanation(name, public_name(cls), "a class", summary(cls), str(trace.origin), overrode)
    first, _, inside = key.partition(".")
    item = fields_of(cls)[first]
    kind = describe_type(types_of(cls)[first], item.bounds)
    value = _below(section.values()[first], inside)
    return Explanation(name, value, f"in {kind}" if inside else kind, item.description, str(trace.origin), overrode)


def _past(leaf: Leaf) -> str:
    if leaf.value is Unset.UNSET:
        return f"everything before {leaf.origin}"
    return f"{as_yaml(leaf.value)} from {leaf.origin}"


def _overview(name: str, section: Section) -> SectionOverview:
    cls = type(section)
    parts = [key for key, hint in types_of(cls).items() if is_section(hint) or section_in_map(hint)]
    keys = [_explain(section, key, f"{name}.{key}") for key in fields_of(cls) if key not in parts]
    sections = [(key, fields_of(cls)[key].description) for key in parts]
    return SectionOverview(name, public_name(cls), summary(cls), tuple(keys), tuple(sections))


def _map_overview(section: Section, key: str, name: str) -> SectionOverview:
    item, hint = fields_of(type(section))[key], types_of(type(section))[key]
    sections = [(inner, summary(type(below))) for inner, below in section.values()[key].items()]
    return SectionOverview(name, describe_type(hint), item.description, (), tuple(sections))


def summary(cls: type[Section]) -> str:
    """What a section is for, in a line."""
    return (cls.__doc__ or cls.__name__).partition("\n")[0].removesuffix(".")


def _below(value: Any, name: str) -> Any:
    """What a free-form map holds at a dotted name; names in it may hold dots themselves."""
    if not name:
        return value
    for key in value if isinstance(value, Mapping) else ():
        if name == key or name.startswith(f"{key}."):
            found = _below(value[key], name[len(key) + 1 :])
            if found is not ABSENT:
                return found
    return ABSENT


Schema = dict[str, Any]

_REFERENCE: Schema = {"type": "string", "pattern": r"\$\{.*\}"}
_IMPORT_PATH: Schema = {"type": "string", "pattern": ".+:.+"}
_SIMPLE = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}


def json_schema() -> Schema:
    """One schema for training and stand-alone rollout, and for files that say only some of it: nothing is required."""
    definitions: Schema = {}
    root = _section(SFTRunConfig, definitions)
    stages = {name: root["properties"][name] for name in STAGE_SECTIONS}
    definitions["SFTConfig"]["properties"].update(stages)  # a section of the first stage alone
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
    if cls is not SFTRunConfig:
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
