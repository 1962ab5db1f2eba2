"""Short answers that take a computer algebra system for ever: wrong at once, and no failure of the reward.

A timeout would let a policy leave its group, or spend the failure budget of the run.
"""

import pytest

from tests.hostile import limited
from treadle.reward.builtin import math
from treadle.reward.builtin.math import is_too_large

pytest.importorskip("math_verify")

TOWERS = [
    r"e^{e^{e^{e^{5}}}}",
    r"e^e^e^e^5",
    r"\pi^{\pi^{\pi^{\pi}}}",
    r"3^{3^{3^{e}}}",
    r"\exp(\exp(\exp(\exp(5))))",
    r"\exp(e^{e^{e^{5}}})",
    r"\sin(e^{e^{20}})",
    r"\cos(\exp(\pi^{50}))",
]
PRODUCTS = [
    r"(x+y+z+w)^{12}(a+b+c+d)^{12}",
    r"(x+1)^{99}(y+1)^{99}",
    r"(a+b)^{20}(c+d)^{20}(e+f)^{20}",
    r"(x+y+z)^{12} \cdot (x+y+z)^{12} \times (x+y+z)^{12}",
    r"\frac{(a+b)^{50}}{(c+d)^{50}}",
    r"((x+1)^{40}+1)^{40}",
    "".join(f"(1+{letter})" for letter in "abcdfghjklmnpqr"),
]
QUESTIONS = [
    r"\sum_{n=1}^{\infty} \frac{\sin(n)}{n^{3}}",
    r"\int_0^1 \int_0^1 \frac{\sin(xy)}{x+y+1} dx dy",
    r"\prod_{k=1}^{9999} \sin(k)",
    r"\lim_{x \to \infty} (1+1/x)^{x}",
]


@pytest.mark.parametrize("latex", [*TOWERS, *PRODUCTS])
def test_it_is_known_from_the_text(latex):
    assert is_too_large(latex)


@pytest.mark.parametrize("truth", ["42", r"\sqrt{3}", r"\pi", "x+1"])
@pytest.mark.parametrize("latex", [*TOWERS, *PRODUCTS, *QUESTIONS])
def test_it_is_wrong_within_the_limit_of_a_score(latex, truth):
    math.prepare()
    with limited():
        assert math.score(rf"\boxed{{{latex}}}", truth) == 0.0


@pytest.mark.parametrize(
    "latex",
    [
        r"\sin(x)e^{x^{2}}",
        "x^{x^x}",
        "2^{2^{2^{2}}}",
        r"e^{\sin^2 x}",
        r"e^{i\pi}",
        "(x+1)(x+2)(x-3)(x^2+4)",
        r"(\frac{1}{2}+\sqrt{3}, 1-\sqrt{2}), (3+x, 4-y), (1+a, 2-b), (3+c, 4-d), (3+x, 4-y), (1+a, 2-b), (3+c, 4-d)",
        r"\begin{pmatrix}1+a&2-b\\3&4\end{pmatrix}",
    ],
)
def test_what_somebody_means_is_computed(latex):
    assert not is_too_large(latex)


def test_a_ground_truth_may_be_a_question_and_its_answer_too():
    math.prepare()
    assert math.score(r"\boxed{\sum_{k=1}^{4} k}", r"\sum_{k=1}^{4} k") == 1.0
    assert math.score(r"\boxed{10}", r"\sum_{k=1}^{4} k") == 1.0
    assert math.score(r"\boxed{\sum_{k=1}^{4} k}", "10") == 0.0
