"""Sums of two or three numbers, made by seed. Training and validation never share a sum."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any
from zlib import crc32

HELD_OUT_SHARE = 5
"""One sum in this many belongs to validation."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum, and the operations that solve it one by one; a left side of None is the result so far."""

    text: str
    value: int
    steps: tuple[tuple[int | None, str, int], ...]

    @property
    def prompt(self) -> str:
        return f"{self.text}="

    @property
    def held_out(self) -> bool:
        return crc32(self.text.encode()) % HELD_OUT_SHARE == 0


def draw_sum(rng: Random) -> Sum:
    """Two numbers, or three with the first two in brackets."""
    a, b, c = (rng.randint(2, 99) for _ in range(3))
    first, second = rng.choice("+-*"), rng.choice("+-")
    inner = Sum(f"{a}{first}{b}", _apply(a, first, b), ((a, first, b),))
    if rng.random() < 0.5:
        return inner
    return Sum(f"({inner.text}){second}{c}", _apply(inner.value, second, c), (*inner.steps, (None, second, c)))


def _apply(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right if sign == "-" else left * right


def train(count: int = 4096, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Sums to learn from."""
    return _rows(count, seed, held_out=False)


def validation(count: int = 256, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Sums the agent never trains on."""
    return _rows(count, seed, held_out=True)


def _rows(count: int, seed: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    rng = Random(f"calculator/{seed}")
    seen: set[str] = set()
    while len(seen) < count:
        drawn = draw_sum(rng)
        if drawn.text not in seen and drawn.held_out == held_out:
            seen.add(drawn.text)
            yield {"uid": drawn.text, "prompt": drawn.prompt, "answer": str(drawn.value)}
