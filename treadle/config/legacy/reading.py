"""Reads layers that are written in verl's spelling: what becomes of each leaf, and why.

Owns the meeting of rules, values and interpolations. Writes nothing: `translation` makes layers of it, `migration` a
file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treadle.config.legacy.defaults import verl_default
from treadle.config.legacy.interpolation import MISSING, Interpolations, Resolved
from treadle.config.legacy.ours import find_place, is_ours
from treadle.config.legacy.rule import BELOW, Answer, Convert, Kind, Nothing, Refused, Rule, Said
from treadle.config.legacy.rules import find_rule, is_section_of_verl, nearest_key
from treadle.config.legacy.rules.tools import HYDRA
from treadle.config.origin import Leaf
from treadle.config.root import TrainConfig
from treadle.config.section import TARGET, fields_of
from treadle.config.source import UNDECIDED, UNSET, Layer, Path, dotted, put

NOT_GIVEN = UNDECIDED
"""OmegaConf's word for a value that must come from elsewhere, which is ours too."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What became of one leaf: the values to write by new key, or the reason why there are none."""

    path: Path
    leaf: Leaf
    layer: int
    kind: Kind
    values: Mapping[Path, Any] = field(default_factory=dict)
    reason: str = ""
    meaning: Any = None
    """The value with interpolations resolved, to compare two keys by."""
    foreign: bool = False
    """Neither verl's key nor ours."""
    refused: bool = False
    """The key has a counterpart, its value has none."""

    @property
    def untouched(self) -> bool:
        """Whether key and value are already ours."""
        return self.kind is Kind.SAME and dict(self.values) == {self.path: self.leaf.value}


def is_verls(layer: Layer) -> bool:
    """Whether a layer has a key that is verl's and not ours."""
    return any(_is_verls(path, leaf) for path, leaf in layer.items())


def _is_verls(path: Path, leaf: Leaf) -> bool:
    if is_ours(path):
        return path[-1] == TARGET and str(leaf.value).startswith("verl.")
    known = find_rule(path) is not None or is_section_of_verl(path)
    return known or (path[0] not in fields_of(TrainConfig) and is_section_of_verl(path[:1]))


def read_layers(layers: Sequence[Layer]) -> list[Reading]:
    """What becomes of every leaf of every layer, in order."""
    reader = _Reader(layers)
    return list(reader.readings())


class _Reader:
    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._given = settle(layers)
        self._interpolations = Interpolations(self._given, self._new_key, verl_default)
        self._asked: list[Path] = []

    def readings(self) -> Iterator[Reading]:
        for at, layer in enumerate(self._layers):
            verls = is_verls(layer)
            for path, leaf in layer.items():
                yield self._read(path, leaf, at, verls)

    def look(self, old: str, default: Any = None) -> Any:
        """The value of another old key; see `Look`."""
        path = tuple(old.split("."))
        if path not in self._given:
            return default
        value = self._interpolations.resolve(self._given[path].value, path).value
        return default if value is None or value is MISSING else value

    def _new_key(self, path: Path) -> str | None:
        """The key of ours that an old key is written to with its value unchanged, if there is one."""
        found = find_rule(path)
        if found is None:
            return dotted(path) if is_ours(path) else None
        targets = targets_of(path, *found)
        if not targets or found[1].convert is None:
            return dotted(targets[0]) if targets else None
        return dotted(targets[0]) if self._keeps_value(path, found[1].convert) else None

    def _keeps_value(self, path: Path, convert: Convert) -> bool:
        if path not in self._given or path in self._asked:
            return False
        self._asked.append(path)
        value = self._interpolations.resolve(self._given[path].value, path).value
        answer = Nothing("") if value is MISSING else convert(value, self.look)
        self._asked.pop()
        return isinstance(answer, Said) and _alike(answer.value, value) and not answer.also

    def _read(self, path: Path, leaf: Leaf, layer: int, verls: bool) -> Reading:
        found = find_rule(path)
        if found is None:
            return self._without_rule(path, leaf, layer)
        name, rule = found
        targets = targets_of(path, name, rule)
        if self._is_plainly_ours(rule, path, leaf, verls):
            return Reading(path, leaf, layer, Kind.SAME, {path: leaf.value}, meaning=leaf.value)
        if leaf.value is UNSET:
            return Reading(path, leaf, layer, Kind.MAPPED, dict.fromkeys(targets, UNSET))
        if rule.kind is Kind.NONE:
            return Reading(path, leaf, layer, Kind.NONE, {}, rule.reason)
        if leaf.value == NOT_GIVEN:
            return Reading(path, leaf, layer, Kind.MAPPED, {}, "??? says that it is not given")
        resolved = self._interpolations.resolve(leaf.value, path)
        return self._written(Reading(path, leaf, layer, rule.kind, meaning=resolved.value), rule, targets, resolved)

    def _is_plainly_ours(self, rule: Rule, path: Path, leaf: Leaf, verls: bool) -> bool:
        """A key that is spelled alike keeps its value, unless verl's words are spoken where it stands."""
        if path[-1] == TARGET and is_ours(path) and not str(leaf.value).startswith("verl."):
            return True
        if rule.kind is not Kind.SAME or leaf.value is UNSET:
            return rule.kind is Kind.SAME
        place = find_place(path)
        return not verls and place is not None and place.problem(leaf.value) is None

    def _written(self, reading: Reading, rule: Rule, targets: Sequence[Path], resolved: Resolved) -> Reading:
        answer = self._answer(rule, targets, resolved)
        if isinstance(answer, Refused):
            return replace(reading, kind=Kind.NONE, reason=answer.reason, refused=True)
        if isinstance(answer, Nothing):
            return replace(reading, kind=Kind.MAPPED, reason=answer.note)
        values = {targets[0]: answer.value} | {tuple(key.split(".")): value for key, value in answer.also.items()}
        kind = Kind.SAME if rule.kind is Kind.SAME and values == {reading.path: reading.leaf.value} else Kind.MAPPED
        return replace(reading, kind=kind, values=values, reason=answer.note)

    def _answer(self, rule: Rule, targets: Sequence[Path], resolved: Resolved) -> Answer:
        if resolved.problem:
            return Refused(resolved.problem)
        answer: Answer = Said(resolved.value)
        if rule.convert is not None:
            if resolved.value is MISSING:
                return Refused("It refers to a key that is not given: give the value.")
            answer = rule.convert(resolved.value, self.look)
        if not isinstance(answer, Said) or not targets:
            return answer
        place = find_place(targets[0])
        if not resolved.given and place is not None and _alike(answer.value, place.default) and not answer.also:
            return Nothing("what verl assumes here is our default too")
        if rule.convert is None or (_alike(answer.value, resolved.value) and not answer.also):
            itself = resolved.written == f"${{{dotted(targets[0])}}}"
            return Nothing("a copy of the same key") if itself else Said(resolved.written, answer.note)
        return answer

    def _without_rule(self, path: Path, leaf: Leaf, layer: int) -> Reading:
        if is_ours(path):
            return Reading(path, leaf, layer, Kind.SAME, {path: leaf.value}, meaning=leaf.value)
        if is_section_of_verl(path):
            if leaf.value is UNSET:
                return Reading(path, leaf, layer, Kind.MAPPED, self._taken_back(path, layer))
            if leaf.value in (None, {}):
                return Reading(path, leaf, layer, Kind.MAPPED, {}, "an empty section")
            return Reading(path, leaf, layer, Kind.NONE, {}, "This is a section of verl's, not a value.")
        if any("@" in part or "/" in part for part in path):
            return Reading(path, leaf, layer, Kind.NONE, {}, HYDRA)
        close = nearest_key(path)
        reason = f"verl 0.9.1 has no such key{f'; {close}' if close else '.'}"
        foreign = path[0] in fields_of(TrainConfig) or not is_section_of_verl(path[:1])
        return Reading(path, leaf, layer, Kind.NONE, {}, reason, foreign=foreign)

    def _taken_back(self, section: Path, layer: int) -> dict[Path, Any]:
        below = [path for earlier in self._layers[:layer] for path in earlier if path[: len(section)] == section]
        found = [(path, find_rule(path)) for path in below]
        return {target: UNSET for path, rule in found if rule for target in targets_of(path, *rule)}


def _alike(left: Any, right: Any) -> bool:
    """Equal, and not merely as False equals 0."""
    return type(left) is type(right) and bool(left == right)


def settle(layers: Sequence[Layer]) -> Layer:
    """The old leaves in force when all layers are laid over each other."""
    given: Layer = {}
    for layer in layers:
        for path, leaf in layer.items():
            below = [other for other in given if other[: len(path)] == path]
            if leaf.value is UNSET:
                for other in below:
                    del given[other]
            elif leaf.value != NOT_GIVEN and not (leaf.value == {} and below):
                put(given, path, leaf)
    return given


def targets_of(path: Path, name: str, rule: Rule) -> list[Path]:
    """The keys of ours that `rule`, called `name` in the table, writes `path` to."""
    if rule.kind is Kind.SAME:
        return [path]
    rest = path[name.removesuffix(BELOW).count(".") + 1 :]
    return [(*target.removesuffix(BELOW).split("."), *rest) for target in rule.targets]
