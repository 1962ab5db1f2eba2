"""Arithmetic and algebra of answers: what is read, what is refused, and that nothing is ever run."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.reward.builtin.expression import (
    MAX_BITS,
    MAX_COEFFICIENT_BITS,
    ExpressionError,
    evaluate,
    expand,
    is_antiderivative,
    parse,
)
from treadle.reward.builtin.math import is_too_large, read_arithmetic
from treadle.reward.builtin.reasoning_gym import _score_countdown


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2*3", 7),
        ("(1+2)*3", 9),
        ("-2**2", -4),
        ("2**-1", Fraction(1, 2)),
        ("2^3^2", 512),
        ("7/2/2", Fraction(7, 4)),
        ("8/(3 - 8/3)", 24),
        ("2*-3", -6),
        (".5 + 1.25", Fraction(7, 4)),
        ("+".join(["1"] * 900), 900),
    ],
)
def test_arithmetic_is_exact(text: str, value: Fraction | int) -> None:
    assert evaluate(parse(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 +",
        "(1",
        "1)",
        "2x",
        "x.__class__",
        "__import__('os')",
        "f'{1}'",
        "1 if 1 else 2",
        "lambda: 1",
        "1/0",
        "0**-1",
        "9**9**9**9",
        "2**70000",
        "2**0.5",
        "1" * 61,
        "(" * 50 + "1" + ")" * 50,
        "-" * 100 + "1",
        "2**" * 60 + "1",
        "1+" * 2000 + "1",
        "\u0661",
        "x",
        "sin(1)",
    ],
)
def test_whatever_is_no_bounded_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(parse(text))


COPRIME = "+".join(
    f"1/{prime}^{MAX_BITS // prime.bit_length() // 2}"
    for prime in range(2, 200)
    if math.gcd(prime, 30030) in (1, prime)
)
"""A sum whose denominator has the bits of all its terms together, where nothing stops it."""
COUNTDOWN: dict[str, Any] = {"metadata": {"numbers": [1, 2, 3], "target": 6}}


@pytest.fixture
def largest_bits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Bits of the largest number that fractions were reduced by: their cost is that of these divisions."""
    seen, gcd = [0], math.gcd

    def count(*numbers: int) -> int:
        seen.append(max(number.bit_length() for number in numbers))
        return gcd(*numbers)

    monkeypatch.setattr(math, "gcd", count)
    return lambda: max(seen)


@pytest.mark.parametrize(
    "refuses",
    [
        lambda: evaluate(parse(COPRIME)),
        lambda: evaluate(parse(COPRIME.replace("+", "-"))),
        lambda: read_arithmetic(COPRIME),
    ],
)
def test_a_sum_is_refused_before_its_numbers_are_beyond_the_bounds(
    refuses: Callable[[], Any], largest_bits: Callable[[], int]
) -> None:
    with pytest.raises(ExpressionError, match=r"bits|too large"):
        refuses()
    assert largest_bits() <= 2 * MAX_BITS


def test_scores_and_checks_of_such_a_sum_cost_no_more(largest_bits: Callable[[], int]) -> None:
    short = COPRIME[: COPRIME.rindex("+", 0, 390)]
    assert _score_countdown(None, short, COUNTDOWN) == 0.01
    assert is_too_large(f"2^{{{short}}}")
    assert largest_bits() <= 2 * MAX_BITS


def test_coefficients_of_a_polynomial_stay_small(largest_bits: Callable[[], int]) -> None:
    """Each factor multiplies every term: with long ones a text of 2,000 letters would take seconds."""
    terms = "+".join(f"{letter}{at}" for letter in "abcdefgh" for at in range(10))
    for text in (f"({terms})" + "*9^999" * 16 + "*9^999/9^999" * 60, f"({terms})+7^999*7^999*{terms}", "(9^999*a)^999"):
        with pytest.raises(ExpressionError, match="bits"):
            expand(parse(text))
    assert largest_bits() <= 2 * MAX_COEFFICIENT_BITS
    assert expand(parse("2^1000*x")) == {(("x", 1),): Fraction(2**1000)}


def test_plain_arithmetic_of_a_page_is_no_answer() -> None:
    with pytest.raises(ExpressionError, match="too large"):
        read_arithmetic("+".join(["1"] * 900))
    assert read_arithmetic("+".join(["1"] * 40)) == 40


def test_a_polynomial_counts_when_it_is_written_out() -> None:
    truth = expand(parse("x**2 - 1"))
    assert expand(parse("-1 + x*x")) == truth
    assert expand(parse("x^2 + x - x - 1")) == truth
    assert expand(parse("2*(x**2/2 - 1/2)")) == truth
    for text in ("(x+1)*(x-1)", "(x+1)**2", "x*(x+1)", "x**0.5", "x**x", "x**100000"):
        with pytest.raises(ExpressionError):
            expand(parse(text))


@pytest.mark.parametrize(
    ("answer", "integrand", "right"),
    [
        ("x**3/3 + C", "x**2", True),
        ("x^3/3", "x**2", True),
        ("x*log(x) - x", "log(x)", True),
        ("x*asin(3*x) + sqrt(1 - 9*x**2)/3", "asin(3*x)", True),
        ("exp(x)*(sin(x) - cos(x))/2 + C", "exp(x)*sin(x)", True),
        ("sin(x)**2/2", "sin(x)*cos(x)", True),
        ("-cos(2*x)/4", "sin(x)*cos(x)", True),
        ("x**3/3 + C*x", "x**2", False),
        ("x**3/3 + y", "x**2", True),
        ("x**2", "x**2", False),
        ("Integral(x**2, x)", "x**2", False),
        ("log(0*x)", "x**2", False),
        ("exp(exp(exp(exp(100*x))))", "x**2", False),
    ],
)
def test_an_antiderivative_is_known_by_its_derivative(answer: str, integrand: str, right: bool) -> None:
    def check() -> bool:
        try:
            return is_antiderivative(parse(answer), parse(integrand), "x")
        except ExpressionError:
            return False

    assert check() is right


@given(st.text(alphabet="0123456789.+-*/^() xyCsinexp!", max_size=60))
def test_no_text_raises_anything_else(text: str) -> None:
    for read in (evaluate, expand, lambda tree: is_antiderivative(tree, parse("x**2"), "x")):
        try:
            read(parse(text))
        except ExpressionError:
            continue
    is_too_large(text)


@pytest.mark.parametrize(
    "latex",
    [
        "9^{9^{9^9}}",
        "x^{9^{9^9}}",
        "9^{9^{9^{9^9}}} + \\sqrt{2}^{9^{9^9}}!",
        "(10^{9999})^{9999}",
        "10^{1000000}",
        "(1+x)^{9999}",
        "(1+x+y+z)^{50}",
        "\\sqrt{\\sqrt{10^{5000}+1}}",
        "9^9^9^9",
        "99999999!",
        "(9!)!",
        "7!!!",
        "\\binom{10^9}{10^8}",
        "\\dbinom{100000}{50000}",
        "\\sum_{k=1}^{10^9} k",
        "{" * 11 + "1" + "}" * 11,
        "1+" * 400 + "1",
    ],
)
def test_mathematics_that_nobody_means_is_known_from_its_text(latex: str) -> None:
    assert is_too_large(latex)


@pytest.mark.parametrize(
    "latex",
    [
        "2^{100}",
        "2^{2011}-1",
        "e^{x^2}",
        "x^{2^n}",
        "10^{-3}",
        "\\binom{2011}{3}",
        "100!",
        "(x+1)^{10}",
        "x^{2011}",
        "\\frac{\\sqrt{2+\\sqrt{3}}}{2}",
        "\\sum_{k=1}^{100} k^2",
        "3^{1/2}",
    ],
)
def test_mathematics_that_somebody_means_is_computed(latex: str) -> None:
    assert not is_too_large(latex)
