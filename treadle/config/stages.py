"""Two stages in one file: supervised fine-tuning, then the training run that goes on from it.

A section inside `sft` (`sft.data`, `sft.actor`, …) is that section of the whole config for `treadle sft` alone, key by
key; every other command reads the file as if there were no `sft`. Works on leaves, before they are bound to sections.
Invariant: the two stages never share a run directory, unless the command line says so.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from treadle.config.parse import KeyPath, Layer, dotted
from treadle.config.section import Leaf, Origin, Source, fields_of
from treadle.config.training import SFTConfig
from treadle.errors import Mistake, nearest

STAGE = "sft"

STAGE_SECTIONS = ("model", "data", "rollout", "actor", "trainer", "checkpoint", "logging", "cluster")
"""The sections that the first stage may have of its own: those that it reads."""

_ORIGIN = Origin(Source.DEFAULT, "the stage sft")
_OWN_NAMES = (("logging", "experiment_name"), ("logging", "run_dir"))


def has_stages(layers: Iterable[Layer]) -> bool:
    """Whether `sft` has sections of its own, so that the rest is another run."""
    return any(_is_staged(path) for layer in layers for path in layer)


def first_stage(layers: Sequence[Layer]) -> list[Layer]:
    """The layers of `treadle sft`: what is inside `sft` takes the place of what it is called."""
    return [part for layer in layers for part in _lift(layer)]


def own_names(layers: Sequence[Layer]) -> Layer:
    """What the first stage must not take from the second: its run directory, and tasks to validate on."""
    given = {path[1:]: leaf for layer in layers for path, leaf in layer.items() if _is_staged(path)}
    shared = {path: leaf for layer in layers for path, leaf in layer.items()}
    own: Layer = {
        path: Leaf(f"{shared[path].value}-{STAGE}", _ORIGIN)
        for path in _OWN_NAMES
        if path in shared and shared[path].value is not None and path not in given
    }
    if ("data", "train_files") in given and ("data", "val_files") not in given:
        own[("data", "val_files")] = Leaf([], _ORIGIN)
        if ("trainer", "test_freq") not in given:
            own[("trainer", "test_freq")] = Leaf(-1, _ORIGIN)
    return own


def second_stage(layers: Sequence[Layer], mistakes: list[Mistake]) -> list[Layer]:
    """The layers of every other command: without `sft`, whose names are checked all the same."""
    known = (*STAGE_SECTIONS, *fields_of(SFTConfig))
    for path, leaf in ((path, leaf) for layer in layers for path, leaf in layer.items() if path[0] == STAGE):
        if len(path) > 1 and path[1] not in known:
            fix = nearest(path[1], known) or f"sft has {', '.join(known)}"
            mistakes.append(Mistake(dotted(path), "no such key", leaf.value, leaf.origin, fix))
    return [{path: leaf for path, leaf in layer.items() if path[0] != STAGE} for layer in layers]


def _lift(layer: Layer) -> list[Layer]:
    inside = {path[1:]: leaf for path, leaf in layer.items() if _is_staged(path)}
    if not inside:
        return [layer]
    marker: dict[KeyPath, Any] = {(STAGE,): Leaf({}, _ORIGIN)}  # it stays fine-tuning without any other key of sft
    rest = {path: leaf for path, leaf in layer.items() if not _is_staged(path)}
    if any(path[0] == STAGE for path in rest):
        marker = {}
    return [{**marker, **rest}, inside]


def _is_staged(path: KeyPath) -> bool:
    return len(path) > 1 and path[0] == STAGE and path[1] in STAGE_SECTIONS
