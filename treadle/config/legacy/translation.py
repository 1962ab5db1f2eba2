"""Turns layers with verl's spellings into layers with ours only.

Invariant: every leaf of every layer comes out under a key of ours, or is named in a warning or a mistake.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.config.legacy.reading import Reading, is_verls, read_layers, settle
from treadle.config.legacy.rule import Kind
from treadle.config.legacy.rules import find_rule
from treadle.config.origin import Leaf, Origin
from treadle.config.section import TARGET
from treadle.config.source import UNSET, Layer, Path, dotted, put
from treadle.errors import Mistake

RECIPE_MARKS = frozenset({"async_training", "hydra", "defaults"})
"""Where one of these is given, the top-level `rollout` section may be verl's."""

SHARDED = {"actor": "FSDPActorConfig", "ref": "FSDPRefConfig", "critic": "FSDPCriticConfig"}


@dataclass(slots=True)
class Result:
    """Translated layers, and what there is to say about them."""

    layers: list[Layer]
    warnings: list[str] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)


def translate_layers(layers: Sequence[Layer]) -> Result:
    """Layers in our spelling, of which there are as many."""
    readings = read_layers(layers)
    result = Result([{} for _ in layers])
    for reading in readings:
        _write(result.layers, reading)
    result.warnings = list(_warnings(readings))
    result.mistakes = [*_without_counterpart(readings, settle(layers)), *find_clashes(readings, layers)]
    for path, value, reading in implied(readings):
        if not any(path in layer for layer in result.layers):
            result.layers[reading.layer][path] = Leaf(value, _origin(reading))
    return result


def _write(layers: list[Layer], reading: Reading) -> None:
    layer = layers[reading.layer]
    if reading.untouched or reading.foreign:
        put(layer, reading.path, reading.leaf)
        return
    for path, value in reading.values.items():
        earlier = any(path in before for before in layers[: reading.layer])
        if path in layer or (value is UNSET and not earlier and len(reading.values) > 1):
            continue
        text = reading.leaf.text if value is reading.leaf.value else None
        put(layer, path, Leaf(value, _origin(reading), text))


def _origin(reading: Reading) -> Origin:
    return reading.leaf.origin.through(f"legacy key {dotted(reading.path)}")


def _warnings(readings: Sequence[Reading]) -> Iterator[str]:
    """One for each old key; where several layers give it, the last one speaks."""
    last = {reading.path: reading for reading in readings if not reading.untouched and reading.kind is not Kind.NONE}
    for path, reading in last.items():
        old, place = dotted(path), reading.leaf.origin
        new = ", ".join(dotted(target) for target in reading.values)
        if reading.values and tuple(reading.values) != (path,):
            yield f"{old} is called {new} here{_aside(reading.reason)} ({place})"
        elif reading.values:
            yield f"{old}: {reading.reason or 'the value is spelled otherwise here'} ({place})"
        else:
            yield f"{old} needs no key here: {reading.reason or 'taken back'} ({place})"


def _aside(note: str) -> str:
    return f"; {note}" if note else ""


def _without_counterpart(readings: Sequence[Reading], given: Layer) -> Iterator[Mistake]:
    for reading in readings:
        in_force = given.get(reading.path) is reading.leaf
        if reading.kind is Kind.NONE and in_force and not reading.foreign:
            value = reading.leaf.value
            problem = f"{value!r} has no counterpart" if reading.refused else "has no counterpart"
            yield Mistake(dotted(reading.path), problem, value, reading.leaf.origin, reading.reason)


@dataclass(frozen=True, slots=True)
class _Spelling:
    reading: Reading
    value: Any


def find_clashes(readings: Sequence[Reading], layers: Sequence[Layer]) -> list[Mistake]:
    """Keys of ours that are given in both spellings, or by two old keys that disagree."""
    is_shared = _counts_as_verls(layers)
    old: dict[Path, dict[Path, _Spelling]] = {}
    new: dict[Path, Reading] = {}
    for reading in readings:
        for path, value in reading.values.items():
            if reading.kind is Kind.SAME and path == reading.path and not is_shared(reading):
                new[path] = reading
            elif value is not UNSET:
                meaning = reading.meaning if isinstance(value, str) and value.startswith("${") else value
                old.setdefault(path, {})[reading.path] = _Spelling(reading, meaning)
    both = [_both(path, new[path], next(iter(old[path].values())).reading) for path in old if path in new]
    return both + [_disagree(path, names) for path, names in old.items() if path not in new and _differ(names)]


def _counts_as_verls(layers: Sequence[Layer]) -> Callable[[Reading], bool]:
    """Whether a key that is spelled alike is verl's here: it is beside verl's other keys, if verl has it at all."""
    recipe = any(path[0] in RECIPE_MARKS or path[-1] == "total_rollout_steps" for layer in layers for path in layer)
    verls = [is_verls(layer) for layer in layers]
    elsewhere = {"model"} if recipe else {"model", "rollout"}

    def counts(reading: Reading) -> bool:
        return verls[reading.layer] and reading.path[0] not in elsewhere and find_rule(reading.path) is not None

    return counts


def _differ(names: dict[Path, _Spelling]) -> bool:
    first, *others = names.values()
    return any(other.value != first.value for other in others)


def _both(path: Path, new: Reading, old: Reading) -> Mistake:
    problem = f"given in both spellings: here, and as {dotted(old.path)} at {old.leaf.origin}"
    return Mistake(dotted(path), problem, new.leaf.value, new.leaf.origin, f"keep {dotted(path)} and remove the other")


def _disagree(path: Path, names: dict[Path, _Spelling]) -> Mistake:
    given = [f"{dotted(old)} = {item.value!r} ({item.reading.leaf.origin})" for old, item in names.items()]
    return Mistake(
        dotted(path), f"two old keys mean this one and disagree: {' and '.join(given)}", fix="give one value"
    )


def implied(readings: Sequence[Reading]) -> Iterator[tuple[Path, str, Reading]]:
    """What verl decides by other means than the key itself: a sharded section's class, a recipe's schedule, Ray."""
    for reading in readings:
        if reading.kind is not Kind.MAPPED:
            continue
        if reading.path[0] in ("ray_kwargs", "ray_init"):
            yield ("cluster", "backend"), "ray", reading
        for path in (path for path, value in reading.values.items() if value is not UNSET):
            if path[0] in SHARDED and path[1:2] == ("fsdp_config",):
                yield (path[0], TARGET), f"treadle.config.{SHARDED[path[0]]}", reading
            if reading.path[0] == "async_training":
                yield ("trainer", "mode"), "fully_async", reading
