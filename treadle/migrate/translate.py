"""Translation of layers in verl's spelling: what becomes of each leaf, and why; then layers in ours.

Owns where rules, values and interpolations meet. The loader gets layers, `migration` writes a file.
Invariant: every leaf of every layer comes out under a key of ours, or is named in a warning or a mistake.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treadle.config.legacy import find_declaration, is_ours
from treadle.config.parse import UNDECIDED, UNSET, KeyPath, Layer, dotted, put_leaf
from treadle.config.root import TrainConfig
from treadle.config.section import TARGET, Leaf, Origin, fields_of
from treadle.errors import Mistake
from treadle.migrate.defaults import MISSING, Interpolations, Resolved, verl_default
from treadle.migrate.rule import BELOW, Conversion, Convert, Converted, NotNeeded, Refused, Rule, RuleKind
from treadle.migrate.rules import find_rule, is_section_of_verl, nearest_key
from treadle.migrate.rules.trainer import HYDRA

NOT_GIVEN = UNDECIDED
"""OmegaConf's word for a value that must come from elsewhere, which is ours too."""


@dataclass(frozen=True, slots=True)
class LeafTranslation:
    """What became of one leaf: the values to write by new key, or the reason why there are none."""

    path: KeyPath
    leaf: Leaf
    layer: int
    kind: RuleKind
    values: Mapping[KeyPath, Any] = field(default_factory=dict)
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
        return self.kind is RuleKind.SAME and dict(self.values) == {self.path: self.leaf.value}


def is_verls(layer: Layer) -> bool:
    """Whether a layer has a key that is verl's and not ours."""
    return any(_is_verls(path, leaf) for path, leaf in layer.items())


def _is_verls(path: KeyPath, leaf: Leaf) -> bool:
    if is_ours(path):
        return path[-1] == TARGET and str(leaf.value).startswith("verl.")
    known = find_rule(path) is not None or is_section_of_verl(path)
    return known or (path[0] not in fields_of(TrainConfig) and is_section_of_verl(path[:1]))


def translate_leaves(layers: Sequence[Layer]) -> list[LeafTranslation]:
    """What becomes of every leaf of every layer, in order."""
    reader = _LayerTranslator(layers)
    return list(reader.readings())


class _LayerTranslator:
    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._given = settle(layers)
        self._interpolations = Interpolations(self._given, self._new_key, verl_default)
        self._asked: list[KeyPath] = []

    def readings(self) -> Iterator[LeafTranslation]:
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

    def _new_key(self, path: KeyPath) -> str | None:
        """The key of ours that an old key is written to with its value unchanged, if there is one."""
        found = find_rule(path)
        if found is None:
            return dotted(path) if is_ours(path) else None
        targets = targets_of(path, *found)
        if not targets or found[1].convert is None:
            return dotted(targets[0]) if targets else None
        return dotted(targets[0]) if self._keeps_value(path, found[1].convert) else None

    def _keeps_value(self, path: KeyPath, convert: Convert) -> bool:
        if path not in self._given or path in self._asked:
            return False
        self._asked.append(path)
        value = self._interpolations.resolve(self._given[path].value, path).value
        answer = NotNeeded("") if value is MISSING else convert(value, self.look)
        self._asked.pop()
        return isinstance(answer, Converted) and _alike(answer.value, value) and not answer.also

    def _read(self, path: KeyPath, leaf: Leaf, layer: int, verls: bool) -> LeafTranslation:
        found = find_rule(path)
        if found is None:
            return self._without_rule(path, leaf, layer)
        name, rule = found
        targets = targets_of(path, name, rule)
        if self._is_plainly_ours(rule, path, leaf, verls):
            return LeafTranslation(path, leaf, layer, RuleKind.SAME, {path: leaf.value}, meaning=leaf.value)
        if leaf.value is UNSET:
            return LeafTranslation(path, leaf, layer, RuleKind.MAPPED, dict.fromkeys(targets, UNSET))
        if rule.kind is RuleKind.NONE:
            return LeafTranslation(path, leaf, layer, RuleKind.NONE, {}, rule.reason)
        if leaf.value == NOT_GIVEN:
            return LeafTranslation(path, leaf, layer, RuleKind.MAPPED, {}, "??? says that it is not given")
        resolved = self._interpolations.resolve(leaf.value, path)
        return self._written(
            LeafTranslation(path, leaf, layer, rule.kind, meaning=resolved.value), rule, targets, resolved
        )

    def _is_plainly_ours(self, rule: Rule, path: KeyPath, leaf: Leaf, verls: bool) -> bool:
        """A key that is spelled alike keeps its value, unless verl's words are spoken where it stands."""
        if path[-1] == TARGET and is_ours(path) and not str(leaf.value).startswith("verl."):
            return True
        if rule.kind is not RuleKind.SAME or leaf.value is UNSET:
            return rule.kind is RuleKind.SAME
        place = find_declaration(path)
        return not verls and place is not None and place.problem(leaf.value) is None

    def _written(
        self, reading: LeafTranslation, rule: Rule, targets: Sequence[KeyPath], resolved: Resolved
    ) -> LeafTranslation:
        answer = self._answer(rule, targets, resolved)
        if isinstance(answer, Refused):
            return replace(reading, kind=RuleKind.NONE, reason=answer.reason, refused=True)
        if isinstance(answer, NotNeeded):
            return replace(reading, kind=RuleKind.MAPPED, reason=answer.note)
        values = {targets[0]: answer.value} | {tuple(key.split(".")): value for key, value in answer.also.items()}
        kind = (
            RuleKind.SAME
            if rule.kind is RuleKind.SAME and values == {reading.path: reading.leaf.value}
            else RuleKind.MAPPED
        )
        return replace(reading, kind=kind, values=values, reason=answer.note)

    def _answer(self, rule: Rule, targets: Sequence[KeyPath], resolved: Resolved) -> Conversion:
        if resolved.problem:
            return Refused(resolved.problem)
        answer: Conversion = Converted(resolved.value)
        if rule.convert is not None:
            if resolved.value is MISSING:
                return Refused("It refers to a key that is not given: give the value.")
            answer = rule.convert(resolved.value, self.look)
        if not isinstance(answer, Converted) or not targets:
            return answer
        place = find_declaration(targets[0])
        if not resolved.given and place is not None and _alike(answer.value, place.default) and not answer.also:
            return NotNeeded("what verl assumes here is our default too")
        if rule.convert is None or (_alike(answer.value, resolved.value) and not answer.also):
            itself = resolved.written == f"${{{dotted(targets[0])}}}"
            return NotNeeded("a copy of the same key") if itself else Converted(resolved.written, answer.note)
        return answer

    def _without_rule(self, path: KeyPath, leaf: Leaf, layer: int) -> LeafTranslation:
        if is_ours(path):
            return LeafTranslation(path, leaf, layer, RuleKind.SAME, {path: leaf.value}, meaning=leaf.value)
        if is_section_of_verl(path):
            if leaf.value is UNSET:
                return LeafTranslation(path, leaf, layer, RuleKind.MAPPED, self._taken_back(path, layer))
            if leaf.value in (None, {}):
                return LeafTranslation(path, leaf, layer, RuleKind.MAPPED, {}, "an empty section")
            return LeafTranslation(path, leaf, layer, RuleKind.NONE, {}, "This is a section of verl's, not a value.")
        if any("@" in part or "/" in part for part in path):
            return LeafTranslation(path, leaf, layer, RuleKind.NONE, {}, HYDRA)
        close = nearest_key(path)
        reason = f"verl 0.9.1 has no such key{f'; {close}' if close else '.'}"
        foreign = path[0] in fields_of(TrainConfig) or not is_section_of_verl(path[:1])
        return LeafTranslation(path, leaf, layer, RuleKind.NONE, {}, reason, foreign=foreign)

    def _taken_back(self, section: KeyPath, layer: int) -> dict[KeyPath, Any]:
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
                put_leaf(given, path, leaf)
    return given


def targets_of(path: KeyPath, name: str, rule: Rule) -> list[KeyPath]:
    """The keys of ours that `rule`, called `name` in the table, writes `path` to."""
    if rule.kind is RuleKind.SAME:
        return [path]
    rest = path[name.removesuffix(BELOW).count(".") + 1 :]
    return [(*target.removesuffix(BELOW).split("."), *rest) for target in rule.targets]


RECIPE_MARKS = frozenset({"async_training", "hydra", "defaults"})
"""Where one of these is given, the top-level `rollout` section may be verl's."""

SHARDED = {"actor": "FSDPActorConfig", "ref": "FSDPRefConfig", "critic": "FSDPCriticConfig"}


@dataclass(slots=True)
class TranslatedLayers:
    """Translated layers, and what there is to say about them."""

    layers: list[Layer]
    warnings: list[str] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)


def translate_layers(layers: Sequence[Layer]) -> TranslatedLayers:
    """Layers in our spelling, of which there are as many."""
    readings = translate_leaves(layers)
    result = TranslatedLayers([{} for _ in layers])
    for reading in readings:
        _write(result.layers, reading)
    result.warnings = list(_warnings(readings))
    result.mistakes = [*_without_counterpart(readings, settle(layers)), *find_clashes(readings, layers)]
    for path, value, reading in implied(readings):
        if not any(path in layer for layer in result.layers):
            result.layers[reading.layer][path] = Leaf(value, _origin(reading))
    return result


def _write(layers: list[Layer], reading: LeafTranslation) -> None:
    layer = layers[reading.layer]
    if reading.untouched or reading.foreign:
        put_leaf(layer, reading.path, reading.leaf)
        return
    for path, value in reading.values.items():
        earlier = any(path in before for before in layers[: reading.layer])
        if path in layer or (value is UNSET and not earlier and len(reading.values) > 1):
            continue
        text = reading.leaf.text if value is reading.leaf.value else None
        put_leaf(layer, path, Leaf(value, _origin(reading), text))


def _origin(reading: LeafTranslation) -> Origin:
    return reading.leaf.origin.through(f"legacy key {dotted(reading.path)}")


def _warnings(readings: Sequence[LeafTranslation]) -> Iterator[str]:
    """One for each old key; where several layers give it, the last one speaks."""
    last = {
        reading.path: reading for reading in readings if not reading.untouched and reading.kind is not RuleKind.NONE
    }
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


def _without_counterpart(readings: Sequence[LeafTranslation], given: Layer) -> Iterator[Mistake]:
    for reading in readings:
        in_force = given.get(reading.path) is reading.leaf
        if reading.kind is RuleKind.NONE and in_force and not reading.foreign:
            value = reading.leaf.value
            problem = f"{value!r} has no counterpart" if reading.refused else "has no counterpart"
            yield Mistake(dotted(reading.path), problem, value, reading.leaf.origin, reading.reason)


@dataclass(frozen=True, slots=True)
class _Spelling:
    reading: LeafTranslation
    value: Any


def find_clashes(readings: Sequence[LeafTranslation], layers: Sequence[Layer]) -> list[Mistake]:
    """Keys of ours that are given in both spellings, or by two old keys that disagree."""
    is_shared = _counts_as_verls(layers)
    old: dict[KeyPath, dict[KeyPath, _Spelling]] = {}
    new: dict[KeyPath, LeafTranslation] = {}
    for reading in readings:
        for path, value in reading.values.items():
            if reading.kind is RuleKind.SAME and path == reading.path and not is_shared(reading):
                new[path] = reading
            elif value is not UNSET:
                meaning = reading.meaning if isinstance(value, str) and value.startswith("${") else value
                old.setdefault(path, {})[reading.path] = _Spelling(reading, meaning)
    both = [_both(path, new[path], next(iter(old[path].values())).reading) for path in old if path in new]
    return both + [_disagree(path, names) for path, names in old.items() if path not in new and _differ(names)]


def _counts_as_verls(layers: Sequence[Layer]) -> Callable[[LeafTranslation], bool]:
    """Whether a key that is spelled alike is verl's here: it is beside verl's other keys, if verl has it at all."""
    recipe = any(path[0] in RECIPE_MARKS or path[-1] == "total_rollout_steps" for layer in layers for path in layer)
    verls = [is_verls(layer) for layer in layers]
    elsewhere = {"model"} if recipe else {"model", "rollout"}

    def counts(reading: LeafTranslation) -> bool:
        return verls[reading.layer] and reading.path[0] not in elsewhere and find_rule(reading.path) is not None

    return counts


def _differ(names: dict[KeyPath, _Spelling]) -> bool:
    first, *others = names.values()
    return any(other.value != first.value for other in others)


def _both(path: KeyPath, new: LeafTranslation, old: LeafTranslation) -> Mistake:
    problem = f"given in both spellings: here, and as {dotted(old.path)} at {old.leaf.origin}"
    return Mistake(dotted(path), problem, new.leaf.value, new.leaf.origin, f"keep {dotted(path)} and remove the other")


def _disagree(path: KeyPath, names: dict[KeyPath, _Spelling]) -> Mistake:
    given = [f"{dotted(old)} = {item.value!r} ({item.reading.leaf.origin})" for old, item in names.items()]
    return Mistake(
        dotted(path), f"two old keys mean this one and disagree: {' and '.join(given)}", fix="give one value"
    )


def implied(readings: Sequence[LeafTranslation]) -> Iterator[tuple[KeyPath, str, LeafTranslation]]:
    """What verl decides by other means than the key itself: a sharded section's class, a recipe's schedule, Ray."""
    for reading in readings:
        if reading.kind is not RuleKind.MAPPED:
            continue
        if reading.path[0] in ("ray_kwargs", "ray_init"):
            yield ("cluster", "backend"), "ray", reading
        for path in (path for path, value in reading.values.items() if value is not UNSET):
            if path[0] in SHARDED and path[1:2] == ("fsdp_config",):
                yield (path[0], TARGET), f"treadle.config.{SHARDED[path[0]]}", reading
            if reading.path[0] == "async_training":
                yield ("trainer", "mode"), "fully_async", reading
