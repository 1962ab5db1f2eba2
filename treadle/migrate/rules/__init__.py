"""Table of verl's keys: one rule for each, written by hand and grouped as verl's sections are.

Exact keys win over subtrees, longer subtrees over shorter ones. There is no rule for everything else.
"""

from collections.abc import Iterable
from functools import cache

from treadle.config.parse import KeyPath
from treadle.errors import nearest
from treadle.migrate.rule import BELOW, Rule, Rules
from treadle.migrate.rules.algorithm import ALGORITHM_RULES, CRITIC_RULES, REWARD_RULES
from treadle.migrate.rules.networks import ACTOR_RULES, MODEL_RULES
from treadle.migrate.rules.older import FLAT_RULES, OLDER_RULES
from treadle.migrate.rules.rollout import DATA_RULES, ROLLOUT_RULES
from treadle.migrate.rules.trainer import RECIPE_RULES, SURROUNDING_RULES, TRAINER_RULES


def _joined(tables: Iterable[Rules]) -> Rules:
    found: Rules = {}
    for table in tables:
        twice = found.keys() & table.keys()
        assert not twice, f"two rules for {sorted(twice)}"
        found.update(table)
    return found


TABLE: Rules = _joined(
    (
        ACTOR_RULES,
        CRITIC_RULES,
        MODEL_RULES,
        ROLLOUT_RULES,
        DATA_RULES,
        ALGORITHM_RULES,
        REWARD_RULES,
        TRAINER_RULES,
        RECIPE_RULES,
        SURROUNDING_RULES,
    )
)
"""The rules for verl 0.9.1."""
OLDER: Rules = _joined((OLDER_RULES, FLAT_RULES))
"""Those for keys that only earlier versions use, and those that later ones may use."""
_ALL: Rules = _joined((TABLE, OLDER))


def find_rule(path: KeyPath) -> tuple[str, Rule] | None:
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
def _sections() -> frozenset[KeyPath]:
    paths = [tuple(name.removesuffix(BELOW).split(".")) for name in _ALL]
    return frozenset(path[:end] for path in paths for end in range(1, len(path)))


def is_section_of_verl(path: KeyPath) -> bool:
    """Whether rules exist below `path`."""
    return path in _sections()


def nearest_key(path: KeyPath) -> str | None:
    """A hint that names the nearest old key."""
    names = [name.removesuffix(BELOW).rpartition(".") for name in _ALL]
    section = ".".join(path[:-1])
    siblings = [last for above, _, last in names if above == section]
    return nearest(path[-1], siblings)
