"""Cases of `tests/unit/test_config_effects.py`: a key, what shows its effect, and two values that must differ there."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from treadle.config import Config, TrainConfig, loads

NAME = "it"
"""What stands for `*` in a key: the name of a function, a judge, a server."""


class Case(NamedTuple):
    """What shows an effect is called as `observe(directory, **keys)`; the directory is empty, and its own."""

    observe: Callable[..., Any]
    one: Mapping[str, Any]
    other: Mapping[str, Any]


def cases(prefix: str, observe: Callable[..., Any], *rows: tuple[Any, ...]) -> dict[str, Case]:
    """From (key, one value, another, what else must be set); `observe` is given keys without the prefix."""
    found = {}
    for name, one, other, *rest in rows:
        fixed = rest[0] if rest else {}
        found[f"{prefix}.{name}"] = Case(observe, {**fixed, name: one}, {**fixed, name: other})
    return found


def config_cases(prefix: str, observe: Callable[..., Any], *rows: tuple[Any, ...]) -> dict[str, Case]:
    """The same, where `observe` and what else must be set have whole keys, for `configured`."""
    found = {}
    for name, one, other, *rest in rows:
        key, fixed = f"{prefix}.{name}" if prefix else name, rest[0] if rest else {}
        found[key] = Case(observe, {**fixed, key: one}, {**fixed, key: other})
    return found


def configured(text: str, keys: Mapping[str, Any]) -> Config:
    """A config with values laid over it, loaded and checked as a user's is."""
    words = (f"{key.replace('*', NAME)}={json.dumps(value)}" for key, value in keys.items())
    return loads(text, "effects.yaml", tuple(words))


def training(text: str, keys: Mapping[str, Any]) -> TrainConfig:
    config = configured(text, keys)
    assert isinstance(config, TrainConfig)
    return config
