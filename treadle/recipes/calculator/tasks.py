"""Sums of two or three numbers, made by seed. Training and validation never share a sum."""

from collections.abc import Iterator
from random import Random
from typing import Any

VALIDATION_SHARE = 5
"""One sum in this many belongs to validation."""


def train(count: int = 4096, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Sums to learn from."""
    return _sums(count, seed, validation=False)


def validation(count: int = 256, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Sums the agent never trains on."""
    return _sums(count, seed, validation=True)


def _sums(count: int, seed: int, *, validation: bool) -> Iterator[dict[str, Any]]:
    draw = Random(f"calculator/{seed}")
    seen: set[str] = set()
    while len(seen) < count:
        a, b, c = (draw.randint(2, 99) for _ in range(3))
        first, second = draw.choice("+-*"), draw.choice("+-")
        text, value = f"{a}{first}{b}", _apply(a, first, b)
        if draw.random() < 0.5:
            text, value = f"({text}){second}{c}", _apply(value, second, c)
        if text in seen or _belongs_to_validation(text) != validation:
            continue
        seen.add(text)
        yield {"uid": text, "prompt": f"{text}=", "answer": str(value)}


def _apply(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right if sign == "-" else left * right


def _belongs_to_validation(text: str) -> bool:
    return Random(text).randrange(VALIDATION_SHARE) == 0
