"""Tool-call parsers are linear, counted in steps: characters looked at and keys compared, never seconds.

The text of a turn is a string that counts what is read of it; regular expressions and the JSON decoder are wrapped to
count, too. Four times the text may take about four times the steps. Quadratic work would take sixteen times as many.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

import pytest

from treadle.rollout.parsers import PARSERS, base, formats, parser
from treadle.rollout.parsers.registry import CustomParser

SMALL, LARGE = 4_000, 16_000
MOST = 6.0
"""Steps of the large text over those of the small one. Linear is 4, quadratic 16."""


class Steps:
    """How much was looked at so far."""

    count = 0

    @classmethod
    def add(cls, steps: int) -> None:
        cls.count += max(1, steps)


class CountedText(str):
    """A text that counts the characters its readers look at; its parts count as well."""

    __slots__ = ()

    def find(self, sub: str, start: Any = None, end: Any = None) -> int:  # type: ignore[override]
        first, last, _ = slice(start, end).indices(len(self))
        found = str.find(self, sub, first, last)
        Steps.add((last if found < 0 else found + len(sub)) - first)
        return found

    def count(self, sub: str, start: Any = None, end: Any = None) -> int:  # type: ignore[override]
        first, last, _ = slice(start, end).indices(len(self))
        Steps.add(last - first)
        return str.count(self, sub, first, last)

    def __contains__(self, sub: object) -> bool:
        return self.find(str(sub)) >= 0

    def __getitem__(self, key: SupportsIndex | slice) -> "CountedText":
        part = str.__getitem__(self, key)
        Steps.add(len(part))
        return CountedText(part)

    def replace(self, *args: Any) -> "CountedText":
        Steps.add(len(self))
        return CountedText(str.replace(self, *args))

    def strip(self, *args: Any) -> "CountedText":
        Steps.add(len(self))
        return CountedText(str.strip(self, *args))


class CountedKey(str):
    """A key that counts its comparisons."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Steps.add(1)
        return str.__eq__(self, other)


class CountedPattern:
    """A regular expression without nested repeats, so its steps are the characters up to the end of its match."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def match(self, text: str, at: int = 0) -> re.Match[str] | None:
        found = self._pattern.match(text, at)
        Steps.add(0 if found is None else found.end() - at)
        return found

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        found = self._pattern.search(text, at)
        Steps.add((len(text) if found is None else found.end()) - at)
        return found


class CountedDecoder:
    """The JSON decoder of the parsers, with keys that count."""

    def __init__(self, decoder: json.JSONDecoder) -> None:
        unique: Callable[[list[tuple[str, Any]]], Any] = decoder.object_pairs_hook  # type: ignore[assignment]

        def hook(pairs: list[tuple[str, Any]]) -> Any:
            return unique([(CountedKey(key), value) for key, value in pairs])

        self._decoder = json.JSONDecoder(
            object_pairs_hook=hook,
            parse_constant=decoder.parse_constant,
            parse_float=decoder.parse_float,
            strict=False,
        )

    def raw_decode(self, source: str, start: int) -> tuple[Any, int]:
        try:
            value, end = self._decoder.raw_decode(source, start)
        except json.JSONDecodeError as error:
            Steps.add((len(source) if error.msg.startswith("Unterminated") else error.pos) - start)
            raise
        Steps.add(end - start)
        return value, end


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_DECODER", CountedDecoder(base._DECODER))
    monkeypatch.setattr(base, "_BLANK", CountedPattern(base._BLANK))
    monkeypatch.setattr(formats, "_ENDS", CountedPattern(formats._ENDS))
    monkeypatch.setattr(formats, "_RECIPIENT", CountedPattern(formats._RECIPIENT))


def steps_of(name: str, text: str) -> int:
    Steps.count = 0
    parser(name).parse(CountedText(text))
    return Steps.count


def keys(count: int) -> str:
    """Keys that all differ, but for the last, which is given twice."""
    return ", ".join(f'"key{at}": 1' for at in [*range(count), count - 1])


def wrapped(name: str, body: str) -> list[str]:
    """The body after everything a call may begin with, in the format's own tags."""
    marker = parser(name).marker
    return [f"{marker}{body}", f"{marker} f{body}", f'{marker}{{"name": "f", "arguments": {{{body}', body]


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=f>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>"),
    *(
        "<arg_value>a</arg_value>",
        "<|message|>",
        "<|call|>",
        "to=f ",
        "<|channel|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "</think>",
    ),
    *(
        '{"name": "f"}',
        '{"name": "f", "arguments": {"a": "',
        "{",
        "[",
        "]",
        "}",
        '"',
        "\\",
        "\\u",
        "1",
        " ",
        "\n",
        "a ",
    ),
    *(
        "<tool_call>f<arg_key>a</arg_key><arg_value>",
        "<|message|>{}<|end|>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
        "<",
    ),
]


def floods(name: str) -> Iterator[Callable[[int], list[str]]]:
    for piece in (*PIECES, parser(name).marker):
        yield lambda size, piece=piece: wrapped(name, piece * (size // len(piece)))  # type: ignore[misc]
    yield lambda size: wrapped(name, f'{{"name": "f", "arguments": {{{keys(size // 14)}}}}}')
    yield lambda size: wrapped(name, "{" + keys(size // 14) + "}")


@pytest.mark.parametrize("name", PARSERS)
def test_a_turn_four_times_as_long_takes_about_four_times_the_steps(name: str) -> None:
    for flood in floods(name):
        for short, long in zip(flood(SMALL), flood(LARGE), strict=True):
            few, many = steps_of(name, short), steps_of(name, long)
            assert many <= MOST * max(few, len(short) / 4), (short[:80], few, many)


@pytest.mark.parametrize("name", PARSERS)
def test_random_mixtures_repeated_are_linear(name: str) -> None:
    rng = random.Random(name)
    for _ in range(40):
        piece = "".join(rng.choices([*PIECES, parser(name).marker], k=rng.randint(2, 6)))
        short, long = (piece * (size // len(piece)) for size in (SMALL, LARGE))
        few, many = steps_of(name, short), steps_of(name, long)
        assert many <= MOST * max(few, len(short) / 4), (piece, few, many)


def test_the_count_sees_quadratic_work() -> None:
    def read(text: str) -> Any:
        for at in range(0, len(text), 16):
            text.find("never", at)

    quadratic = CustomParser("quadratic", "", read)

    def steps(size: int) -> int:
        Steps.count = 0
        quadratic.parse(CountedText("a" * size))
        return Steps.count

    assert steps(LARGE) > MOST * steps(SMALL)
