"""Which keys are ours: the cheap question every config is asked before any table of old keys is read.

Walks the section classes along one path at a time, so that a config pays only for the sections it names.
"""

from dataclasses import dataclass
from typing import Any, get_args

from treadle.config.outline import is_free_map, is_section, section_in_map, subclasses
from treadle.config.root import TrainConfig
from treadle.config.section import REQUIRED, TARGET, Section, fields_of, types_of
from treadle.config.source import Path
from treadle.config.value import UNBOUNDED, Bounds, check

UNKNOWN: Any = object()
"""The default of a place that has none: a free-form map's insides, or a required key."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a path leads in our config: the type expected there, and the value it has when nobody sets it."""

    hint: Any
    bounds: Bounds = UNBOUNDED
    default: Any = UNKNOWN

    def takes_text(self) -> bool:
        """Whether a plain scalar is read as text here: an experiment may be called 007."""
        return self.hint is str or str in get_args(self.hint)

    def problem(self, value: Any) -> str | None:
        """What keeps `value` from being written here. References are not looked into."""
        if isinstance(value, str) and "${" in value:
            return None
        return None if is_section(self.hint) and value in (None, {}) else check(value, self.hint, self.bounds).problem


def find_place(path: Path) -> Place | None:
    """Where `path` leads, or None if it is no key of ours."""
    return _in_section(TrainConfig, path, None)


def is_ours(path: Path) -> bool:
    """Whether `path` is a key or a section of ours."""
    return find_place(path) is not None


def _in_section(cls: type[Section], path: Path, default: Section | None) -> Place | None:
    if not path:
        return Place(cls)
    if path == (TARGET,):
        return Place(str)
    for variant in subclasses(cls):
        declared = fields_of(variant).get(path[0])
        if declared is not None:
            fallback = default.values().get(path[0], declared.default) if default is not None else declared.default
            place = _in_key(types_of(variant)[path[0]], path[1:], fallback)
            plain = place is not None and not path[1:] and not is_section(place.hint)
            return Place(place.hint, declared.bounds, place.default) if place is not None and plain else place
    return None


def _in_key(hint: Any, rest: Path, default: Any) -> Place | None:
    if is_section(hint):
        return _in_section(hint, rest, default if isinstance(default, Section) else None)
    if named := section_in_map(hint):
        return _in_section(named, rest[1:], None) if rest else Place(hint)
    if rest:
        return Place(Any) if is_free_map(hint) else None
    return Place(hint, default=UNKNOWN if default is REQUIRED else default)
