"""The shape of a config: which sections and keys are declared where, and an outline of one that is being filled.

Owns what can be asked of section classes. Looks at no value and reads no source.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from treadle.config.origin import Leaf
from treadle.config.section import TARGET as TARGET
from treadle.config.section import Key, Section, fields_of, types_of
from treadle.config.source import Path


@dataclass(slots=True)
class Slot:
    """One key: its declaration and the leaves that give its value, by the path below the key."""

    key: Key
    hint: Any
    leaves: dict[Path, Leaf]
    broken: bool = False
    """It has no value, and the mistake is written down."""


@dataclass(slots=True)
class Outline:
    """One section to be built: its class, and what fills each key."""

    cls: type[Section]
    path: Path
    target: Leaf
    parts: dict[str, "Slot | Outline | dict[str, Outline]"] = field(default_factory=dict)

    def slots(self) -> Iterator[tuple[Path, Slot]]:
        """Every slot at or below this section, with its full path."""
        for name, part in self.parts.items():
            if isinstance(part, Slot):
                yield (*self.path, name), part
            else:
                for inner in [part] if isinstance(part, Outline) else part.values():
                    yield from inner.slots()


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def section_in_map(hint: Any) -> type[Section] | None:
    """The section class of a key that holds sections by name."""
    arguments = get_args(hint)
    return arguments[1] if len(arguments) == 2 and is_section(arguments[1]) else None


def is_free_map(hint: Any) -> bool:
    """Whether a key holds a map whose names the user chooses and whose values are plain."""
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping) and section_in_map(hint) is None


def subclasses(cls: type[Section]) -> list[type[Section]]:
    """A section class and everything derived from it, as far as it is imported: config imports nothing by name."""
    return [cls, *(below for child in cls.__subclasses__() for below in subclasses(child))]


def full_name(cls: type[Section]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def public_name(cls: type[Section]) -> str:
    """The name to write in `_target_`."""
    return f"treadle.config.{cls.__name__}" if cls.__module__.startswith("treadle.config.") else full_name(cls)


def usual_class(cls: type[Section], name: str) -> type[Section]:
    """The class of the section at `name` when no `_target_` says otherwise."""
    default, hint = fields_of(cls)[name].default, types_of(cls)[name]
    declared: type[Section] = section_in_map(hint) or hint
    return type(default) if isinstance(default, Section) else declared


def hints_at(cls: type[Section], path: Path) -> Iterator[Any]:
    """The types `path` may have in a section class and its variants."""
    for variant in subclasses(cls):
        hint: Any = types_of(variant).get(path[0])
        rest = path[1:]
        if section_in_map(hint) and rest:
            hint, rest = section_in_map(hint), rest[1:]
        if hint is not None and not rest:
            yield hint
        elif is_section(hint):
            yield from hints_at(hint, rest)


def key_paths(cls: type[Section], path: Path = ()) -> Iterator[Path]:
    """Every key of a section class and its variants, sections themselves aside; `*` stands for a name in a map."""
    seen: dict[Path, None] = {}
    for variant in subclasses(cls):
        for name, hint in types_of(variant).items():
            inner = hint if is_section(hint) else section_in_map(hint)
            below = (*path, name) if is_section(hint) else (*path, name, "*")
            seen.update(dict.fromkeys(key_paths(inner, below) if inner else [(*path, name)]))
    yield from seen
