"""Migration: a verl YAML file or launch script as our YAML, with a report of every key.

Owns what a file or a script contributes beyond its keys: Hydra's defaults, the program that is launched, variables
without a value. Invariant: every key of the source has exactly one entry in the report.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from treadle.config.legacy import find_declaration, is_ours
from treadle.config.parse import UNDECIDED, UNSET, KeyPath, Layer, dotted
from treadle.config.section import TARGET, Leaf, Origin
from treadle.errors import ConfigError, Mistake
from treadle.migrate.defaults import BY_RECIPE
from treadle.migrate.report import MigratedKey, Migration, YamlLine, write_document
from treadle.migrate.rule import RuleKind
from treadle.migrate.rules import find_rule
from treadle.migrate.source import MigrationSource, read_source
from treadle.migrate.translate import (
    NOT_GIVEN,
    LeafTranslation,
    find_clashes,
    implied,
    settle,
    targets_of,
    translate_leaves,
)
from treadle.types import NOTHING

VERLS_DEFAULT = "verl's default"
BY_SOURCE = "verl scores by data source where no function is named"
BY_HAND = {
    "custom_reward_function.path": ("reward", "functions", "custom", "path"),
    "reward.custom_reward_function.path": ("reward", "functions", "custom", "path"),
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": ("rollout", "multi_turn", "tools"),
    "data.tool_config_path": ("rollout", "multi_turn", "tools"),
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": ("rollout", "multi_turn", "environment"),
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": ("rollout", "agent", "loops"),
}
"""Files of verl's that name code, which a run cannot do without, and the keys of ours that name such code."""

NAMES = frozenset({"logging", "checkpoint"})
"""Sections whose keys name runs and places: where a script does not tell them, our defaults do no harm."""
STAND_INS: Mapping[str, tuple[KeyPath, str]] = {
    "actor_rollout_ref.rollout.name": (("rollout", "name"), "vllm"),
    "actor_rollout_ref.actor.strategy": (("actor", TARGET), "treadle.config.FSDPActorConfig"),
    "actor_rollout_ref.ref.strategy": (("ref", TARGET), "treadle.config.FSDPRefConfig"),
    "critic.strategy": (("critic", TARGET), "treadle.config.FSDPCriticConfig"),
}
"""Engines and training backends that are not here do the same work as these; the report names each one."""

SCORERS = {("reward", kind) for kind in ("functions", "classifiers", "judges")}
MODES = {"main_ppo": "sync", "separate_async": "fully_async"}


def migrate(path: FilePath, variables: Mapping[str, str] = NOTHING) -> Migration:
    """Our YAML for a verl YAML file or launch script, and what became of every key. Nothing is executed.

    `variables` are those of the script's environment, such as DEVICE: they win over what the script assigns. Raises
    ConfigError if the file cannot be read.
    """
    mistakes: list[Mistake] = []
    source = read_source(path, mistakes, variables)
    if mistakes:
        raise ConfigError(mistakes)
    draft = _Draft()
    readings = translate_leaves(source.layers)
    draft.take(list(_last_words(readings, source.layers)), source.layers)
    draft.withhold(source)
    if source.recipe:
        draft.assume(source.recipe)
        draft.score_as_verl()
    title = f"Migrated from {path.name} by `treadle config migrate`."
    text = write_document(
        draft.lines, title, [_left_out(entry) for entry in draft.entries if entry.kind == RuleKind.NONE]
    )
    return Migration(text, (*source.entries, *draft.entries), tuple(source.notes))


def _last_words(readings: Sequence[LeafTranslation], layers: Sequence[Layer]) -> Iterator[LeafTranslation]:
    """The last word on each key. What was taken back is not written, and still reported."""
    given = settle(layers)
    for reading in {reading.path: reading for reading in readings}.values():
        in_force = given.get(reading.path) is reading.leaf or reading.leaf.value == NOT_GIVEN
        yield reading if in_force else replace(reading, kind=RuleKind.MAPPED, values={}, reason="taken back by ~")


@dataclass(slots=True)
class _Draft:
    """The migrated config while it is written, and the report on it."""

    lines: dict[KeyPath, YamlLine] = field(default_factory=dict)
    entries: list[MigratedKey] = field(default_factory=list)
    withheld: set[KeyPath] = field(default_factory=set)
    """Keys whose value the source has and cannot tell: nothing is assumed for them."""

    def take(self, readings: Sequence[LeafTranslation], layers: Sequence[Layer]) -> None:
        clashes = {tuple(mistake.key.split(".")) for mistake in find_clashes(readings, layers)}
        for reading in readings:
            self._take(reading, clashes)
        for path, value, _ in implied(readings):
            self.lines.setdefault(path, YamlLine(value, VERLS_DEFAULT if path[-1] == "_target_" else ""))

    def _take(self, reading: LeafTranslation, clashes: set[KeyPath]) -> None:
        reading = replace(
            reading, values={path: _as_text(path, value, reading) for path, value in reading.values.items()}
        )
        problem = self._problem(reading, clashes)
        if problem:
            reading = replace(reading, kind=RuleKind.NONE, values={}, reason=problem)
        if reading.kind is RuleKind.NONE and dotted(reading.path) in BY_HAND:
            self.lines[BY_HAND[dotted(reading.path)]] = YamlLine(
                UNDECIDED, f"{reading.leaf.value} is not read: see below"
            )
        if reading.kind is RuleKind.NONE and dotted(reading.path) in STAND_INS:
            target, value = STAND_INS[dotted(reading.path)]
            self.lines[target] = YamlLine(value, f"in place of {reading.leaf.value}: see below")
        if reading.kind is RuleKind.NONE or reading.leaf.value is UNSET:
            self.withheld.update(_targets(reading.path))
        for path, value in reading.values.items():
            self.lines.setdefault(path, YamlLine(value))
        self.entries.append(_entry(reading))

    def _problem(self, reading: LeafTranslation, clashes: set[KeyPath]) -> str:
        for path, value in reading.values.items():
            place = find_declaration(path)
            assert place is not None, f"{dotted(path)} is no key of ours"
            if problem := place.problem(value):
                return f"{dotted(path)} {problem}."
            if path in clashes and path in self.lines and self.lines[path].value != value:
                return f"{dotted(path)} has another value already, from a key that means the same."
        return ""

    def withhold(self, source: MigrationSource) -> None:
        """Leave out what the script does not tell, and say so."""
        for name, word in source.unknown.items():
            path = tuple(name.split("."))
            leaf = Leaf(word.text.partition("=")[2], Origin.file(source.name, word.line))
            targets = _targets(path)
            (reading,) = translate_leaves([{path: leaf}])
            if targets:
                keys = " and ".join(map(dotted, targets))
                why = "; ".join((*word.unknown, word.only_if) if word.only_if else word.unknown)
                reading = replace(reading, kind=RuleKind.NONE, values={}, reason=f"{why}: set {keys} yourself.")
                if word.unknown and not word.only_if and targets[0][0] not in NAMES and targets[0][-1] != TARGET:
                    self.lines[targets[0]] = YamlLine(UNDECIDED, f"line {word.line}: {why}")
            if not word.only_if:
                self.withheld.update(targets)
            self.entries.append(_entry(reading))

    def assume(self, recipe: str) -> None:
        """Write down what verl assumes for keys that the source does not name."""
        if recipe == "main_ppo" and self.value("trainer.mode") == "fully_async":
            recipe = "separate_async"
        self.lines.setdefault(("trainer", "mode"), YamlLine(MODES.get(recipe, recipe)))
        for default in BY_RECIPE[recipe]:
            path = tuple(default.key.split("."))
            if path not in self.lines and path not in self.withheld and default.when(self.value):
                value = default.value(self.value) if callable(default.value) else default.value
                self.lines[path] = YamlLine(value, VERLS_DEFAULT)

    def score_as_verl(self) -> None:
        """Name the reward where the source names none: verl then goes by the data source of each row."""
        if any(path[:2] in SCORERS for path in self.lines):
            return
        self.lines["reward", "functions", "by_source", "path"] = YamlLine("by_source", BY_SOURCE)

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key of ours so far; see `View`."""
        line = self.lines.get(tuple(key.split(".")))
        return default if line is None or line.value is None else line.value


def _as_text(path: KeyPath, value: Any, reading: LeafTranslation) -> Any:
    """A plain scalar takes the type of its key, as it does when it is loaded."""
    place, text = find_declaration(path), reading.leaf.text
    number = isinstance(value, bool | int | float) and value is reading.leaf.value
    return text if number and isinstance(text, str) and place is not None and place.takes_text() else value


def _targets(path: KeyPath) -> list[KeyPath]:
    found = find_rule(path)
    return targets_of(path, *found) if found else [path] if is_ours(path) else []


def _left_out(entry: MigratedKey) -> str:
    value = "null" if entry.before is None else " ".join(str(entry.before).split())
    return f"{entry.old}: {value}  # {entry.reason} ({entry.place.rpartition('/')[2]})"


def _entry(reading: LeafTranslation) -> MigratedKey:
    values: Mapping[KeyPath, Any] = reading.values
    after = list(values.values())
    return MigratedKey(
        old=dotted(reading.path),
        kind=reading.kind,
        new=tuple(dotted(path) for path in values),
        before=None if reading.leaf.value is UNSET else reading.leaf.value,
        after=after[0] if len(after) == 1 else after or None,
        reason=reading.reason,
        place=str(reading.leaf.origin),
    )
