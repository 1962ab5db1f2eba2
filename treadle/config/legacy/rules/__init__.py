"""The table of verl's keys: one rule for each, written by hand and grouped as verl's sections are.

Exact keys win over subtrees, longer subtrees over shorter ones. There is no rule for everything else.
"""

from collections.abc import Iterable
from functools import cache

from treadle.config.legacy.rule import BELOW, Rule, Rules
from treadle.config.legacy.rules import (
    actor,
    algorithm,
    critic,
    data,
    flat,
    model,
    older,
    recipes,
    reward,
    rollout,
    tools,
    trainer,
)
from treadle.config.source import Path
from treadle.errors import nearest

CURRENT = (actor, critic, model, rollout, data, algorithm, reward, trainer, recipes, tools)
"""The modules for verl 0.9.1. What only earlier versions use is in `older`, what later ones may use in `flat`."""


def _joined(tables: Iterable[Rules]) -> Rules:
    found: Rules = {}
    for table in tables:
        twice = found.keys() & table.keys()
        assert not twice, f"two rules for {sorted(twice)}"
        found.update(table)
    return found


TABLE: Rules = _joined(module.RULES for module in CURRENT)
OLDER: Rules = _joined((older.RULES, flat.RULES))
_ALL: Rules = _joined((TABLE, OLDER))


def find_rule(path: Path) -> tuple[str, Rule] | None:
    """The rule for an old key, with the name it has in the table."""
    name = ".".join(path)
    if name in _ALL:
        return name, _ALL[name]
    for end in range(len(path), 0, -1):
        below = ".".join(path[:end]) + BELOW
        if below in _ALL:
            return below, _ALL[below]
    return None


@cache
def _sections() -> frozenset[Path]:
    paths = [tuple(name.removesuffix(BELOW).split(".")) for name in _ALL]
    return frozenset(path[:end] for path in paths for end in range(1, len(path)))


def is_section_of_verl(path: Path) -> bool:
    """Whether rules exist below `path`."""
    return path in _sections()


def nearest_key(path: Path) -> str | None:
    """A hint that names the old key somebody may have meant."""
    names = [name.removesuffix(BELOW).rpartition(".") for name in _ALL]
    section = ".".join(path[:-1])
    siblings = [last for above, _, last in names if above == section]
    return nearest(path[-1], siblings)
