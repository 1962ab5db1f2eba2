"""A turn that is shown while it is sampled costs the same for every token: counted in ids decoded and characters read.

The event loop that shows turns serves all streams: what one policy writes must not slow the streams of the others. Four
times the turn may take about four times the steps.
"""

from collections.abc import Sequence

import pytest

from treadle.gateway import turn_reader
from treadle.gateway.turn_reader import PartialTurn

SMALL, LARGE = 1_000, 4_000
MOST = 6.0
"""Steps of the large turn over those of the small one. Linear is 4, quadratic 16."""

UNITS = {
    "bytes that begin a character": b"\xf0",
    "bytes that belong to none": b"\xff",
    "halves before letters": b"\xf0\x9f\x99a",
    "whole characters": "🙂".encode(),
    "blanks": b" ",
    "lines": b"\n\n",
    "blanks before half a tag": b" " * 40 + b"<tool_c",
    "blanks before half the end of the reasoning": b" " * 40 + b"</thin",
    "words": b"word ",
}


class Steps:
    """How much was looked at so far."""

    count = 0


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    find = turn_reader._find

    def count(text: str, tags: Sequence[str]) -> int:
        Steps.count += len(text)
        return find(text, tags)

    monkeypatch.setattr(turn_reader, "_find", count)


def decode(ids: Sequence[int]) -> str:
    Steps.count += len(ids)
    return bytes(ids).decode("utf-8", "replace")


def feed(data: bytes, chunk: int, is_thinking: bool | None) -> PartialTurn:
    options = {"stops": ("STOP",), "call_starts": ("<tool_call>",), "is_thinking": is_thinking}
    turn = PartialTurn(decode, mark="m", created=0, prompt_tokens=1, **options)  # type: ignore[arg-type]
    for at in range(0, len(data), chunk):
        turn.feed(at, tuple(data[at : at + chunk]))
    return turn


@pytest.mark.parametrize("chunk", [1, 4, 7])
@pytest.mark.parametrize("is_thinking", [None, False, True])
@pytest.mark.parametrize("unit", UNITS)
def test_a_turn_four_times_as_long_takes_about_four_times_the_steps(
    unit: str, is_thinking: bool | None, chunk: int
) -> None:
    counts = []
    for size in (SMALL, LARGE):
        Steps.count = 0
        feed(UNITS[unit] * (size // len(UNITS[unit])), chunk, is_thinking)
        counts.append(Steps.count)
    assert counts[1] <= MOST * max(counts[0], SMALL), counts


def test_what_comes_after_bytes_of_no_character_is_shown_with_the_whole_turn() -> None:
    turn = feed(b"One. " + b"\xff" * 100 + b" Two.", 1, None)
    assert "".join(text for _, text in turn.pieces) == "One."
    few = feed(b"One. " + b"\xff" * 4 + b" Two.", 1, None)
    assert "".join(text for _, text in few.pieces) == "One. \ufffd\ufffd\ufffd\ufffd Two."


def test_characters_cut_by_every_piece_are_shown() -> None:
    turn = feed((b"a" + "🙂".encode() * 8)[:-1], 4, None)
    assert "".join(text for _, text in turn.pieces) == "a" + "🙂" * 7


def test_blanks_that_were_held_are_shown_with_what_comes_after_them() -> None:
    turn = feed(b"One" + b" \n" * 50 + b"two" + b" " * 50, 1, None)
    assert "".join(text for _, text in turn.pieces) == "One" + " \n" * 50 + "two"
