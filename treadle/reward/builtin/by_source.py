r"""Scores each answer by the rule of its data source, as verl does where no reward function is named.

    correct: {path: by_source}

    data_source                               rule                                                     score
    openai/gsm8k                              the number after the last #### is the ground truth       1 or 0
    MATH, MATH-500, Numina, geometry3k        the last \\boxed{} is the ground truth, as LaTeX in a
                                              normal form                                              1 or 0
    math, math_dapo, aime…                    the last line `Answer: …`, or else the last \\boxed{}   1 or -1
    searchR1_…                                the last <answer> is one of the ground truths, but for
                                              case, articles and punctuation                           1 or 0
    codecontests, apps, codeforces, taco      the share of tests that the program passes (`code_tests`)  0 to 1

Any other source is a failure that names it. Answers that are not programs are compared as text: nothing is evaluated,
and every such rule is linear in the length of the text. `math` compares as mathematics.
"""

import re
import string
from collections.abc import Coroutine, Mapping
from typing import Any

from treadle.reward.builtin import code_tests, number_match
from treadle.reward.builtin.exact_match import read_tag
from treadle.sandbox.protocol import BoxSettings
from treadle.types import Score

TAIL = 4096
"""Letters at the end of a response in which an answer is looked for."""

BOXED = frozenset(
    {
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "hiyouga/geometry3k",
        "numina_aops_forum",
        "numina_synthetic_math",
        "numina_amc_aime",
        "numina_synthetic_amc",
        "numina_cn_k12",
        "numina_olympiads",
    }
)
ANSWER_LINE = frozenset({"math", "math_dapo", "math_dapo_reasoning"})
PROGRAMS = frozenset({"codecontests", "apps", "codeforces", "taco"})

_ANSWER = re.compile(r"answer[ \t]*:[ \t]*([^\n]+)", re.IGNORECASE)
_SPACES = re.compile(r"\\[!,;: ]|\\q?quad|~|\s+")
_DROPPED = re.compile(r"\\left|\\right|\\\$|\$|\\?%|\^\{?\\circ\}?|\\mathrm\{th\}|\\displaystyle")
_UNIT = re.compile(r"\\(?:text|mbox|mathrm)\{[^{}]*\}$")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mathrm|mbox|overline)\{([^{}]*)\}")
_BARE_FRACTION = re.compile(r"\\frac(?:\{([^{}]+)\}|(\w))(?:\{([^{}]+)\}|(\w))")
_BARE_ROOT = re.compile(r"\\sqrt(\w)")
_RATIO = re.compile(r"(-?)(\d+)/(\d+)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def prepare() -> None:
    """Nothing to get ready; the signature is the check."""


def score(
    response: str, ground_truth: Any, data_source: str, box: BoxSettings | None = None
) -> float | Coroutine[Any, Any, Score]:
    if ground_truth is None:
        raise ValueError("the task has no ground truth")
    if data_source == "openai/gsm8k":
        return number_match.score(response, ground_truth, strict=True)
    if data_source in BOXED:
        return float(_same(read_boxed(response), ground_truth))
    if data_source in ANSWER_LINE or data_source.startswith("aime"):
        lines = _ANSWER.findall(response[-TAIL:])
        return 1.0 if _same(lines[-1] if lines else read_boxed(response), ground_truth) else -1.0
    if data_source.startswith("searchR1_"):
        answer = read_tag(response, "answer")
        return float(answer is not None and plain_words(answer) in map(plain_words, _accepted(ground_truth)))
    if data_source in PROGRAMS:
        return code_tests.score(response, ground_truth, box=box)
    raise ValueError(f"no rule scores data source {data_source!r}: name a reward function in reward.functions")


def read_boxed(text: str) -> str | None:
    r"""The contents of the last `\boxed{…}` that is closed, or of `\boxed` without braces; None without one."""
    text = text[-TAIL:]
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].partition("box")[2].removeprefix("ed")
    if not rest.startswith("{"):
        return rest.split("$")[0].strip() or None
    depth = 0
    for at, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[1:at]
    return None


def normal_form(answer: str) -> str:
    """An answer in LaTeX without what does not change its value: spaces, units, delimiters, short spellings."""
    text = _DROPPED.sub("", answer.strip().rstrip("."))
    text = _SPACES.sub("", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ","))
    head, equals, tail = text.partition("=")
    text = tail if equals and len(head) <= 2 else text
    text = _WRAPPED.sub(r"\1", _UNIT.sub("", text) or text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", _THOUSANDS.sub("", text))
    text = _BARE_FRACTION.sub(lambda found: _fraction("", found[1] or found[2], found[3] or found[4]), text)
    text = f"0{text}" if text.startswith(".") else text.replace("-.", "-0.", 1) if text.startswith("-.") else text
    if ratio := _RATIO.fullmatch(text):
        return _fraction(*ratio.groups())
    if whole := re.fullmatch(r"(-?\d+)\.0*", text):
        return whole[1]
    return "\\frac{1}{2}" if text == "0.5" else text


def _fraction(sign: str, above: str, below: str) -> str:
    return f"{sign}\\frac{{{above}}}{{{below}}}"


def plain_words(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces, as question answering compares."""
    letters = text.casefold().translate(str.maketrans("", "", string.punctuation))
    return " ".join(word for word in letters.split() if word not in ("a", "an", "the"))


def _same(answer: str | None, ground_truth: Any) -> bool:
    truth = str(ground_truth)
    expected = read_boxed(truth) if "\\boxed" in truth else truth
    return answer is not None and normal_form(answer) == normal_form(expected or truth)


def _accepted(ground_truth: Any) -> list[str]:
    """verl's rows have the accepted answers under `target`."""
    found = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    return [str(item) for item in (found if isinstance(found, list | tuple) else [found])]
