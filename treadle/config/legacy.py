"""Legacy keys: verl's spellings in a config, translated by `treadle.migrate` before layers are merged.

The loader calls `translate`. A config without legacy keys pays only for a walk over its keys, one path of section
classes at a time: `treadle.migrate` and its tables are imported when a key is not ours, and only from here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from treadle.config.parse import KeyPath, Layer
from treadle.config.root import SFTRunConfig
from treadle.config.section import REQUIRED, TARGET, Leaf, Section, fields_of, types_of
from treadle.config.tree import is_free_map, is_section, section_in_map, subclasses
from treadle.config.validate import UNBOUNDED, Bounds, check_value
from treadle.errors import Mistake

UNKNOWN_DEFAULT: Any = object()
"""The default of a place that has none: a free-form map's insides, or a required key."""


@dataclass(frozen=True, slots=True)
class KeyDeclaration:
    """Where a path leads in our config: the type expected there, and its default."""

    hint: Any
    bounds: Bounds = UNBOUNDED
    default: Any = UNKNOWN_DEFAULT

    def takes_text(self) -> bool:
        """Whether a plain scalar is read as text here: an experiment may be called 007."""
        return self.hint is str or str in get_args(self.hint)

    def problem(self, value: Any) -> str | None:
        """What keeps `value` from being written here. References are not looked into."""
        if isinstance(value, str) and "${" in value:
            return None
        return (
            None
            if is_section(self.hint) and value in (None, {})
            else check_value(value, self.hint, self.bounds).problem
        )


def find_declaration(path: KeyPath) -> KeyDeclaration | None:
    """Where `path` leads, or None if it is no key of ours."""
    return _in_section(SFTRunConfig, path, None)


def is_ours(path: KeyPath) -> bool:
    """Whether `path` is a key or a section of ours."""
    return find_declaration(path) is not None


def _in_section(cls: type[Section], path: KeyPath, default: Section | None) -> KeyDeclaration | None:
    if not path:
        return KeyDeclaration(cls)
    if path == (TARGET,):
        return KeyDeclaration(str)
    for variant in subclasses(cls):
        declared = fields_of(variant).get(path[0])
        if declared is not None:
            fallback = default.values().get(path[0], declared.default) if default is not None else declared.default
            place = _in_key(types_of(variant)[path[0]], path[1:], fallback)
            plain = place is not None and not path[1:] and not is_section(place.hint)
            return KeyDeclaration(place.hint, declared.bounds, place.default) if place is not None and plain else place
    return None


def _in_key(hint: Any, rest: KeyPath, default: Any) -> KeyDeclaration | None:
    if is_section(hint):
        return _in_section(hint, rest, default if isinstance(default, Section) else None)
    if named := section_in_map(hint):
        return _in_section(named, rest[1:], None) if rest else KeyDeclaration(hint)
    if rest:
        return KeyDeclaration(Any) if is_free_map(hint) else None
    return KeyDeclaration(hint, default=UNKNOWN_DEFAULT if default is REQUIRED else default)


@dataclass(frozen=True, slots=True)
class Translation:
    """Layers in our spelling, and what there is to say about the old keys that were in them."""

    layers: tuple[Layer, ...]
    warnings: tuple[str, ...] = ()
    mistakes: tuple[Mistake, ...] = ()


def translate(layers: Sequence[Layer]) -> Translation:
    """The layers with verl's keys replaced by ours. A mistake names each key that cannot be replaced."""
    if not any(is_legacy(layer) for layer in layers):
        return Translation(tuple(layers))
    from treadle.migrate.translate import translate_layers

    result = translate_layers(layers)
    return Translation(tuple(result.layers), tuple(result.warnings), tuple(result.mistakes))


def is_legacy(layer: Layer) -> bool:
    """Whether a layer has a key that is verl's and not ours."""
    if all(_is_plain(path, leaf) for path, leaf in layer.items()):
        return False
    from treadle.migrate.translate import is_verls

    return is_verls(layer)


def _is_plain(path: KeyPath, leaf: Leaf) -> bool:
    return is_ours(path) and not (path[-1] == TARGET and str(leaf.value).startswith("verl."))
