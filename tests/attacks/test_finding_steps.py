"""Findings read text that a policy wrote: their regular expressions have bounded repeats, so a search is linear."""

import re
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from treadle.inspect import detectors

PATTERNS = {name: value for name, value in vars(detectors).items() if isinstance(value, re.Pattern)}


def unbounded_repeats(parsed: Any) -> int:
    """Repeats without a bound anywhere in a parsed expression."""
    count = 0
    for operation, argument in parsed:
        if operation in (constants.MAX_REPEAT, constants.MIN_REPEAT):
            _, most, inner = argument
            count += (most == constants.MAXREPEAT) + unbounded_repeats(inner)
        elif operation is constants.SUBPATTERN:
            count += unbounded_repeats(argument[-1])
        elif operation is constants.BRANCH:
            count += sum(map(unbounded_repeats, argument[1]))
        elif operation in (constants.ASSERT, constants.ASSERT_NOT):
            count += unbounded_repeats(argument[1])
    return count


@pytest.mark.parametrize("name", PATTERNS)
def test_no_search_over_the_text_of_a_model_repeats_without_bound(name):
    assert unbounded_repeats(parser.parse(PATTERNS[name].pattern)) == 0


@pytest.mark.parametrize(
    "text", ["a>" * 20_000 + " " + "test_" * 20_000, "a>" * 40_000, "rm " + "-" * 80_000, "def" + " " * 80_000]
)
def test_an_answer_made_for_the_search_is_read_to_its_end(text):
    """With unbounded repeats the first of them takes days."""
    assert detectors._TAMPERING.search(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "rm -rf tests",
        "rm -rf build/tests",
        "sed -i test_it.py",
        "cat x> tests/test_sum.py",
        "chmod 777 ./tests",
        "assert  True",
    ],
)
def test_what_it_looks_for_is_still_found(text):
    assert detectors._TAMPERING.search(f"I run {text} now")
