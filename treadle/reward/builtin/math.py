r"""1.0 where the answer equals the ground truth as mathematics, judged by math-verify.

    correct: {path: math}

The last boxed, LaTeX or plain expression of the response counts. LaTeX is read by math-verify's grammar. Plain
arithmetic and numbers, which the package and sympy would hand to Python's eval, are read by
`treadle.reward.builtin.expression`. So no text of a model is run as code.
Before either, `is_too_large` looks at the text: an answer whose powers, products, factorials or nesting no real answer
has, such as 9^{9^{9^9}}, is not computed, and is wrong. So is one with a sum, product, integral or limit sign where the
ground truth has none: it is a question, and sympy may take for ever to answer it. What still takes too long is ended by
the worker's own limits (`reward.cpu_time_s`, `reward.timeout_s`), a failure or `reward.on_timeout`.
"""

import logging
import re
from collections.abc import Callable
from contextvars import ContextVar
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from math import comb
from typing import Any

from treadle.reward.builtin.expression import ExpressionError, count_bits, evaluate, parse

EXTRA = "math"
TAIL = 8_192
"""Letters at the end of a response in which an answer is looked for."""

MAX_LATEX = 600
MAX_NESTING = 10
"""The grammar of math-verify takes twice as long for every two levels."""
MAX_POWER = 9_999
MAX_BITS = 8_192
"""Of a power of numbers."""
MAX_BITS_IN_ROOTS = 512
"""The same where roots are taken: sympy looks for factors."""
MAX_BINOMIAL_POWER, MAX_SUM_POWER = 100, 12
"""Of a sum of two terms, and of more: sympy writes them out."""
MAX_TERMS = 1_000
"""Of an expression whose products and powers of sums are written out."""
MAX_TOWER, MAX_TOWER_IN_TRIGONOMETRY = 2, 1
"""Powers within exponents, where letters are among them: the digits of one more are no number that is computed; of a
sine of one sympy computes as many."""
MAX_FACTORIAL = 1_000
MAX_CHOSEN = 1_000

_GROUP = re.compile(r"\\(?:left|right|[dt]?frac|,|;|!|:| )|[$\s]")
_PRODUCT = re.compile(r"\\(?:cdot|times)\b\s*")
_OPENING, _CLOSING = "([{", ")]}"
_TRIGONOMETRY = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
_CONSTANT = re.compile("[ei]")
"""In a base: Euler's number, π as it is written, or the imaginary unit."""
_OPERATOR = re.compile(r"\\(?:sum|prod|i*int|oint|lim)(?![A-Za-z])")
"""Signs of what is to be worked out."""

_operators_allowed: ContextVar[bool] = ContextVar("operators_allowed", default=True)
"""Whether the LaTeX that is read may have them: that of ground truths may."""


def prepare() -> None:
    """Import the package, put our guards into it, and use it once; the first use builds its tables."""
    parser: Any = import_module("math_verify.parser")
    sympy_parser: Any = import_module("sympy.parsing.sympy_parser")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no timeout: the worker has one
    if not hasattr(parser, "treadle_guarded"):
        parser.parse_latex_cached = _guard(parser.parse_latex_cached)
        parser.parse_expr_cached = read_arithmetic
        sympy_parser.parse_expr = _read_for_sympy
        parser.treadle_guarded = True
    score("1", "1")


def score(response: str, ground_truth: Any) -> float:
    if ground_truth is None:
        raise ValueError("the task has no ground truth")
    truth = _parse_truth(str(ground_truth))
    before = _operators_allowed.set(bool(_OPERATOR.search(str(ground_truth))))
    try:
        answer = _parse(response[-TAIL:])
    finally:
        _operators_allowed.reset(before)
    return float(import_module("math_verify").verify(truth, answer, timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = import_module("math_verify").parse(text, parsing_timeout=None)
    return parsed


@lru_cache(maxsize=1024)
def _parse_truth(truth: str) -> list[Any]:
    """The ground truth as expressions: a bare answer, or a solution that marks its own."""
    truth = truth.rpartition("####")[2].strip()
    marked = "\\boxed" in truth or "$" in truth or "\\(" in truth or "\\[" in truth
    parsed = _parse(truth if marked else f"\\boxed{{{truth}}}")
    if not parsed:
        raise ValueError(f"the ground truth {truth[:80]!r} is no expression that math-verify can read")
    return parsed


def read_arithmetic(text: str) -> Any:
    """Numbers and operators as a sympy number; ExpressionError, which math-verify takes for no expression."""
    if is_too_large(text):
        raise ExpressionError("too large to compute")
    value, sympy = evaluate(parse(text)), import_module("sympy")
    if re.fullmatch(r"\s*\d*\.\d*\s*", text, re.ASCII):
        return sympy.Float(text.strip())  # as many digits as are written
    try:
        return sympy.Float(float(value)) if "." in text else sympy.Rational(value.numerator, value.denominator)
    except OverflowError as error:
        raise ExpressionError("a decimal beyond what floats hold") from error


def _read_for_sympy(text: str, *_: Any, **__: Any) -> Any:
    """In place of sympy's own reader of text, which is eval: numbers come through here, too."""
    try:
        return read_arithmetic(text)
    except ExpressionError as error:
        raise SyntaxError(str(error)) from error  # which sympy expects


def _guard(parse_latex: Callable[[str], Any]) -> Callable[[str], Any]:
    def guarded(latex: str) -> Any:
        if is_too_large(latex):
            raise ExpressionError("too large to compute")
        if not _operators_allowed.get() and _OPERATOR.search(latex):
            raise ExpressionError("a question: the answer is to be worked out")
        return parse_latex(latex)

    return guarded


def is_too_large(latex: str) -> bool:
    """Whether computing this LaTeX could take for ever: judged from the text alone, in time linear in its length
    for each power in it."""
    if len(latex) > MAX_LATEX or _nesting(latex) > MAX_NESTING:
        return True
    text = _GROUP.sub("", _PRODUCT.sub("*", latex)).replace("**", "^")
    powers = (at for at, letter in enumerate(text) if letter == "^")
    factorials = (found.span() for found in re.finditer(r"!+", text))
    choices = (found.end() for found in re.finditer(r"\\[dt]?binom", text))
    tower = MAX_TOWER_IN_TRIGONOMETRY if _TRIGONOMETRY.search(text) else MAX_TOWER
    return (
        _count_terms(text) > MAX_TERMS
        or _tower(text) > tower
        or any(_is_huge_power(text, at) for at in powers)
        or any(_is_huge_factorial(text, *span) for span in factorials)
        or any(_is_huge_choice(text, at) for at in choices)
    )


def _nesting(text: str) -> int:
    depth = deepest = 0
    for letter in text:
        depth += (letter in _OPENING) - (letter in _CLOSING)
        deepest = max(deepest, depth)
    return deepest


def _is_huge_power(text: str, caret: int) -> bool:
    exponent = _value(_after(text, caret + 1))
    if exponent is None:  # letters in it: nothing is computed, and numbers inside have carets of their own
        return False
    if exponent is _HUGE or abs(exponent) > MAX_POWER:
        return True
    group = _before(text, caret)
    base = _value(group)
    if base is None:
        signs = group.count("+") + group.count("-")
        return signs > 0 and abs(exponent) > (MAX_BINOMIAL_POWER if signs == 1 else MAX_SUM_POWER)
    limit = MAX_BITS_IN_ROOTS if "sqrt" in text or "/" in text else MAX_BITS
    return base is _HUGE or count_bits(base) * abs(exponent) > limit


def _tower(text: str) -> int:
    """Powers, one in the exponent of the other, at most. Those of numbers alone, and of variables with a number as
    their exponent, are looked at by their value."""
    deepest = chained = last_end = at = 0
    while at < len(text):
        start = at + 1 if text[at] == "^" else at + 4 if text.startswith("\\exp", at) else 0
        if not start:
            at += 1
            continue
        exponent = _after(text, start)
        end = start + len(exponent)
        chained = chained if at == last_end else 0
        if not chained and text[at] == "^" and text[end : end + 1] != "^" and _value(exponent) is not None:
            level = int(bool(_CONSTANT.search(_before(text, at) or text[max(0, at - 1) : at])))
        else:
            level = 1 + max(_tower(exponent), chained)
        deepest, chained, last_end, at = max(deepest, level), level, end, end
    return deepest


def _count_terms(text: str) -> int:
    """Terms once products and powers of sums are written out; at most about MAX_TERMS are counted."""
    total, product, at = 0, 1, 0
    while at < len(text):
        if text[at] in _OPENING:
            group = _after(text, at)
            at += len(group)
            terms = _count_terms(group[1:-1]) if len(group) > 2 else 1
            if text[at : at + 1] == "^":
                exponent = _after(text, at + 1)
                at += 1 + len(exponent)
                power = _value(exponent)
                if terms > 1 and power is not None and 1 < power <= MAX_POWER:
                    terms = comb(int(power) + min(terms, MAX_TERMS) - 1, int(power))
            product = min(product * terms, MAX_TERMS + 1)
            continue
        if text[at] == "^":  # of a letter or a number: its exponent is no factor
            at += 1 + len(_after(text, at + 1))
            continue
        if text[at] in "+-,;=&":
            total, product = total + product, 1
        at += 1
    return min(total + product, MAX_TERMS + 1)


def _is_huge_factorial(text: str, start: int, end: int) -> bool:
    operand = _value(_before(text, start))
    limit = {1: MAX_FACTORIAL, 2: 6}.get(end - start, 0)
    return operand is not None and (operand is _HUGE or operand > limit)


def _is_huge_choice(text: str, at: int) -> bool:
    above = _after(text, at)
    below = _after(text, at + len(above))
    chosen = [_value(above), _value(below)]
    return any(value is _HUGE or (value is not None and abs(value) > 10**6) for value in chosen) or (
        chosen[1] is not None and abs(chosen[1]) > MAX_CHOSEN
    )


_HUGE = Fraction(-1)
"""Stands for a number beyond the bounds; compared by identity."""


def _value(text: str) -> Fraction | None:
    """The value of a group; None where it holds more than numbers, `_HUGE` where it is beyond the bounds."""
    plain = text.translate(str.maketrans("{[]}", "(())"))
    if "!" in plain:
        return _HUGE if re.fullmatch(r"[-+*/^()!.\d]+", plain) else None
    try:
        return evaluate(parse(plain))
    except ExpressionError as error:
        return _HUGE if "bits" in str(error) or "digits" in str(error) else None


def _after(text: str, at: int) -> str:
    """The group, the command or the number that begins here; of bare LaTeX only one digit belongs to a caret, but a
    parser may take all."""
    if at < len(text) and text[at] in _OPENING:
        depth = 0
        for end in range(at, len(text)):
            depth += (text[end] in _OPENING) - (text[end] in _CLOSING)
            if depth == 0:
                return text[at : end + 1]
    match = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\\[A-Za-z]+|.)?", re.DOTALL).match(text, at)
    return match[0] if match else ""


def _before(text: str, at: int) -> str:
    """The group or the number that ends here, with the powers it is the end of."""
    start = at
    while start > 0:
        if text[start - 1] in _CLOSING:
            depth = 0
            while start > 0:
                start -= 1
                depth += (text[start] in _CLOSING) - (text[start] in _OPENING)
                if depth == 0:
                    break
        elif text[start - 1].isdigit():
            while start > 0 and (text[start - 1].isdigit() or text[start - 1] == "."):
                start -= 1
        else:
            break
        if start > 0 and text[start - 1] == "^":
            start -= 1
        else:
            break
    return text[start:at]
