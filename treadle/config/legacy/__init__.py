"""Reads verl's spellings of config keys, so that its users can move without starting over.

    translate(layers)     layers in our spelling, with a warning for each old key; the loader calls this
    migrate(path)         a verl YAML file or launch script as our YAML, with a report of every key

A config without old keys pays only for a walk over its keys: the tables are imported when one is not ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from treadle.config.legacy.ours import is_ours
from treadle.config.legacy.report import Entry, Migration
from treadle.config.origin import Leaf
from treadle.config.section import TARGET
from treadle.config.source import Layer, Path
from treadle.errors import Mistake
from treadle.types import NOTHING

__all__ = ["Entry", "Migration", "Translation", "is_legacy", "migrate", "translate"]


@dataclass(frozen=True, slots=True)
class Translation:
    """Layers in our spelling, and what there is to say about the old keys that were in them."""

    layers: tuple[Layer, ...]
    warnings: tuple[str, ...] = ()
    mistakes: tuple[Mistake, ...] = ()


def translate(layers: Sequence[Layer]) -> Translation:
    """The same layers with verl's keys replaced by ours. A mistake names each key that cannot be replaced."""
    if not any(is_legacy(layer) for layer in layers):
        return Translation(tuple(layers))
    from treadle.config.legacy.translation import translate_layers

    result = translate_layers(layers)
    return Translation(tuple(result.layers), tuple(result.warnings), tuple(result.mistakes))


def is_legacy(layer: Layer) -> bool:
    """Whether a layer has a key that is verl's and not ours."""
    if all(_is_plain(path, leaf) for path, leaf in layer.items()):
        return False
    from treadle.config.legacy.reading import is_verls

    return is_verls(layer)


def _is_plain(path: Path, leaf: Leaf) -> bool:
    return is_ours(path) and not (path[-1] == TARGET and str(leaf.value).startswith("verl."))


def migrate(path: FilePath, variables: Mapping[str, str] = NOTHING) -> Migration:
    """Our YAML for a verl YAML file or launch script, and what became of every key. Nothing is executed.

    `variables` are those of the script's environment, such as DEVICE: they win over what the script assigns.
    """
    from treadle.config.legacy.migration import migrate_file

    return migrate_file(path, variables)
