"""The words the tables of old keys are written in: same, to, fixed, none.

    "actor_rollout_ref.rollout.n": to("rollout.n"),
    "algorithm.kl_penalty": same(kl_in_reward),
    "actor_rollout_ref.rollout.mode": fixed("async", note="the rollout is always asynchronous"),
    "actor_rollout_ref.rollout.profiler.**": none("There is no profiler section; …"),

A key that ends in `.**` speaks for itself and for everything below it, unless a longer key does.
Owns the vocabulary. Knows no key, neither old nor new.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

BELOW = ".**"
"""The ending of a rule for a whole subtree."""


class Kind(StrEnum):
    """The three things that can become of an old key."""

    MAPPED = "mapped"
    SAME = "same"
    NONE = "none"


class Look(Protocol):
    """The value another old key has, all layers considered; `default` where it is not given."""

    def __call__(self, old: str, default: Any = None) -> Any: ...


@dataclass(frozen=True, slots=True)
class Said:
    """A value that can be written, values of further keys that follow from it, and a word about the difference."""

    value: Any
    note: str = ""
    also: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Nothing:
    """Nothing needs to be written, and why."""

    note: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The value cannot be written here, and why."""

    reason: str


Answer = Said | Nothing | Refused
Convert = Callable[[Any, Look], Answer]


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of one old key. Without `convert` the value is written as it is."""

    kind: Kind
    targets: tuple[str, ...] = ()
    convert: Convert | None = None
    reason: str = ""


Rules = dict[str, Rule]


def to(*targets: str, convert: Convert | None = None) -> Rule:
    """The key moved. With several targets, `convert` says which get a value."""
    return Rule(Kind.MAPPED, targets, convert)


def same(convert: Convert | None = None) -> Rule:
    """The key is spelled alike here; its values may not be."""
    return Rule(Kind.SAME, (), convert)


def none(reason: str) -> Rule:
    """The key has no counterpart: why, and what to do instead."""
    return Rule(Kind.NONE, (), None, reason)


def fixed(*values: Any, note: str, otherwise: str | None = None) -> Rule:
    """No key is needed for `values`, which is how things always are here. Other values are refused."""

    def convert(value: Any, look: Look) -> Answer:
        return Nothing(note) if value in values else Refused(otherwise or f"Only {_list(values)} is possible: {note}.")

    return asked(convert)


def ignored(note: str) -> Rule:
    """No key is needed, whatever the value: it changes nothing that could be observed here."""
    return asked(lambda value, look: Nothing(note))


def asked(convert: Convert) -> Rule:
    """No key of its own: `convert` says why nothing needs writing, or refuses."""
    return Rule(Kind.MAPPED, (), convert)


def _list(values: tuple[Any, ...]) -> str:
    words = {True: "true", False: "false", None: "null"}
    return " or ".join(words[item] if item is None or isinstance(item, bool) else str(item) for item in values)


def under(prefix: str, rules: Rules) -> Rules:
    """The rules of one old section, written without its prefix."""
    return {f"{prefix}.{name}": rule for name, rule in rules.items()}


def moved(old: str, new: str, names: str, convert: Convert | None = None) -> Rules:
    """Keys that moved from one section to another and kept their names."""
    return {f"{old}.{name}": to(f"{new}.{name}", convert=convert) for name in names.split()}


def kept(section: str, names: str) -> Rules:
    """Keys that are spelled alike."""
    return {f"{section}.{name}": same() for name in names.split()}


def nones(prefix: str, names: str, reason: str) -> Rules:
    """Keys that have no counterpart, all for one reason."""
    return {f"{prefix}.{name}": none(reason) for name in names.split()}


def classes(prefix: str, names: str = "") -> Rules:
    """`_target_` of sections whose class needs no saying; `.` stands for the section itself."""
    paths = [prefix if name == "." else f"{prefix}.{name}" for name in (names or ".").split()]
    return {f"{path}._target_": class_of_verl for path in paths}


def _check_class(value: Any, look: Look) -> Answer:
    if value is None or str(value).startswith("verl."):
        return Nothing("a section has its class by itself")
    return Refused("Only classes of treadle.config may be named in _target_.")


class_of_verl = asked(_check_class)
"""The rule of one such `_target_`."""
