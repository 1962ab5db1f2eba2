"""Sums that reasoning-gym makes (`chain_sum`), cut into what is asked first and what follows.

Owns how a sum is written for the bundled model, and which sums that model can read: it knows `12+34=` and no English,
and numbers of one or two digits. Training and validation never share a sum.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any
from zlib import crc32

from treadle.errors import ConfigError, Mistake

HELD_OUT_SHARE = 5
"""One sum in this many belongs to validation."""

READABLE = range(100)
"""The totals that may be on the way: each is asked about again."""

_SUPPLY = 64
"""Sums drawn for each that is asked for: small ones repeat, few are held out, and some are not readable."""

_SEED_STRIDE = 10**8
"""reasoning-gym draws sum i of a seed with seed + i: neighbouring seeds would share nearly all of them."""


def train(count: int = 2048, seed: int = 0, max_terms: int = 4) -> Iterator[dict[str, Any]]:
    """Sums to learn from."""
    return _rows(count, seed, max_terms, held_out=False)


def validation(count: int = 192, seed: int = 0, max_terms: int = 4) -> Iterator[dict[str, Any]]:
    """Sums the agent never trains on."""
    return _rows(count, seed, max_terms, held_out=True)


def _rows(count: int, seed: int, max_terms: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for entry in _draw(count * _SUPPLY, seed, max_terms):
        expression = entry["metadata"]["expression"]
        if len(seen) == count:
            return
        if expression not in seen and _is_held_out(expression) == held_out and _is_readable(expression):
            seen.add(expression)
            yield _row(entry)
    problem = f"only {len(seen)} different sums of up to {max_terms} terms were found"
    raise ConfigError([Mistake("data.source_kwargs", problem, count, fix="lower count, or raise max_terms")])


def _draw(size: int, seed: int, max_terms: int) -> Iterator[dict[str, Any]]:
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        fix = "pip install 'treadle[reasoning-gym]'"
        problem, package = "the sums come from reasoning-gym", "reasoning-gym"
        raise ConfigError([Mistake("data.train_files", problem, package, fix=fix, missing="package")]) from error
    lengths = {"min_terms": 2, "max_terms": max_terms, "min_digits": 1, "max_digits": 2}
    made: Any = create_dataset("chain_sum", size=size, seed=seed * _SEED_STRIDE, **lengths)
    return (made[index] for index in range(size))


def _steps(expression: str) -> list[str]:
    """`98 + 93 - 77` in signed terms: 98, +93, -77."""
    first, *others = expression.split(" ")
    return [first, *(sign + term for sign, term in zip(others[::2], others[1::2], strict=True))]


def _is_held_out(expression: str) -> bool:
    return crc32(expression.encode()) % HELD_OUT_SHARE == 0


def _is_readable(expression: str) -> bool:
    *totals, _ = accumulate(map(int, _steps(expression)))
    return all(total in READABLE for total in totals)


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    """`98 + 93 - 77` is asked as `98+93=`, and then `-77`."""
    first, second, *rest = _steps(entry["metadata"]["expression"])
    return {
        "uid": entry["metadata"]["expression"],
        "prompt": f"{first}{second}=",
        "answer": entry["answer"],
        "data_source": f"{len(rest) + 2} terms",
        "environment_kwargs": {"rest": rest},
    }
