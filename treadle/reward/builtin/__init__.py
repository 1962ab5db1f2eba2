"""The reward functions that come with treadle, one small module each.

A module here has `score`, a function like any user's, and `prepare`, which is called once with the configured
arguments, where the function will run, and raises ValueError (bad arguments) or ImportError (a package that `EXTRA`
installs is missing).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Builtin:
    """Where a built-in lives, and whether the text a model wrote can make it compute for long."""

    module: str
    evaluates_text: bool = False
    """True: only ever in a sandboxed worker process, though no text is run as code. False: pure and bounded, so it runs
    in the parent."""
    boxed: bool = False
    """True: it runs text as code, in boxes that it starts with the settings of `reward.sandbox`, its argument `box`; it
    waits for them in the parent."""


BUILTINS: Mapping[str, Builtin] = {
    "exact_match": Builtin("treadle.reward.builtin.exact_match"),
    "number_match": Builtin("treadle.reward.builtin.number_match"),
    "by_source": Builtin("treadle.reward.builtin.by_source", boxed=True),
    "format": Builtin("treadle.reward.builtin.format"),
    "soft_overlong": Builtin("treadle.reward.builtin.soft_overlong"),
    "length_penalty": Builtin("treadle.reward.builtin.length_penalty"),
    "code_tests": Builtin("treadle.reward.builtin.code_tests", boxed=True),
    "math": Builtin("treadle.reward.builtin.math", evaluates_text=True),
    "reasoning_gym": Builtin("treadle.reward.builtin.reasoning_gym", evaluates_text=True),
}
