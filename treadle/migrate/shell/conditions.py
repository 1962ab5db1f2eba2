"""Conditions of launch scripts: whether `[ … ]` or `[[ … ]]` holds, from expanded words.

A condition on a word without a value, or on a file of the machine, is neither true nor false (None).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from treadle.migrate.shell.expansion import ExpandedWord

Truth = bool | None
"""How a command ended, or whether a condition holds; None where that cannot be known."""

_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}


def holds(words: Sequence[ExpandedWord], globs: bool) -> Truth:
    """Whether the words between the brackets hold; None where that takes a look at the machine."""
    rest = list(words)
    found = _any_of(rest, globs)
    return None if rest else found


def _any_of(rest: list[ExpandedWord], globs: bool) -> Truth:
    found = _all_of(rest, globs)
    while rest and rest[0].text in ("||", "-o"):
        rest.pop(0)
        other = _all_of(rest, globs)
        found = True if found or other else None if found is None or other is None else False
    return found


def _all_of(rest: list[ExpandedWord], globs: bool) -> Truth:
    found = _primary(rest, globs)
    while rest and rest[0].text in ("&&", "-a"):
        rest.pop(0)
        other = _primary(rest, globs)
        found = False if found is False or other is False else None if found is None or other is None else True
    return found


def _primary(rest: list[ExpandedWord], globs: bool) -> Truth:
    if not rest:
        return False
    first = rest.pop(0)
    if first.text == "!" and rest:
        inner = _primary(rest, globs)
        return None if inner is None else not inner
    if first.text == "(":
        inner = _any_of(rest, globs)
        if rest:
            rest.pop(0)
        return inner
    if rest and (rest[0].text in ("=", "==", "!=", "=~", "<", ">") or rest[0].text in _COMPARISONS):
        operator = rest.pop(0).text
        return _compare(first, operator, rest.pop(0) if rest else ExpandedWord("", first.line), globs)
    if re.fullmatch(r"-[a-zA-Z]", first.text) and rest and rest[0].text not in ("&&", "||", ")"):
        value = rest.pop(0)
        if value.unknown or first.text not in ("-z", "-n"):
            return False if not value.unknown and not value.text else None
        return (value.text == "") is (first.text == "-z")
    return None if first.unknown else first.text != ""


def _compare(left: ExpandedWord, operator: str, right: ExpandedWord, globs: bool) -> Truth:
    if left.unknown or right.unknown or operator in ("<", ">"):
        return None
    if operator in _COMPARISONS:
        try:
            return _COMPARISONS[operator](int(left.text), int(right.text))
        except ValueError:
            return False
    if operator == "=~":
        try:
            return re.search(right.text, left.text) is not None
        except re.error:
            return None
    same = fnmatchcase(left.text, right.text) if globs else left.text == right.text
    return same is (operator != "!=")
