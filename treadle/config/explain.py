"""Explains a key or a section of a loaded config: value, type, description, origin and history."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.config.origin import Leaf, Unset
from treadle.config.outline import TARGET, is_section, public_name, section_in_map
from treadle.config.section import Section, fields_of, types_of
from treadle.config.show import ABSENT, as_yaml, flatten
from treadle.config.value import describe, shorten
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
class Overview:
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


def explain(config: Section, name: str) -> Explanation | Overview:
    """A key's value, type, description, origin and history, or all keys of a section. An unknown name is an error."""
    found = _descend(config, name)
    if found is None:
        raise ConfigError([Mistake(name, "no such key", fix=_hint(config, name))])
    if isinstance(found, Section):
        return _overview(name, found)
    section, key = found
    return _map_overview(section, key, name) if _holds_sections(section, key) else _explain(section, key, name)


def _hint(config: Section, name: str) -> str | None:
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
    kind = describe(types_of(cls)[first], item.bounds)
    value = _below(section.values()[first], inside)
    return Explanation(name, value, f"in {kind}" if inside else kind, item.description, str(trace.origin), overrode)


def _past(leaf: Leaf) -> str:
    if leaf.value is Unset.UNSET:
        return f"everything before {leaf.origin}"
    return f"{as_yaml(leaf.value)} from {leaf.origin}"


def _overview(name: str, section: Section) -> Overview:
    cls = type(section)
    parts = [key for key, hint in types_of(cls).items() if is_section(hint) or section_in_map(hint)]
    keys = [_explain(section, key, f"{name}.{key}") for key in fields_of(cls) if key not in parts]
    sections = [(key, fields_of(cls)[key].description) for key in parts]
    return Overview(name, public_name(cls), summary(cls), tuple(keys), tuple(sections))


def _map_overview(section: Section, key: str, name: str) -> Overview:
    item, hint = fields_of(type(section))[key], types_of(type(section))[key]
    sections = [(inner, summary(type(below))) for inner, below in section.values()[key].items()]
    return Overview(name, describe(hint), item.description, (), tuple(sections))


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
