r"""Arithmetic and algebra in answers: text is parsed by a grammar of its own, and never run as code.

    sum      = ["+" | "-"] product {("+" | "-") product}
    product  = power {("*" | "/") power}
    power    = atom [("^" | "**") ["+" | "-"] power]
    atom     = number | name | name "(" sum ")" | "(" sum ")"

Owns the grammar, exact values (`evaluate`), expanded polynomials (`expand`) and the numeric test of an antiderivative.
Refuses whatever is longer, deeper or larger than its bounds: such an answer is wrong, and costs nothing.
Invariant: the cost of every function here is bounded by the length of the text; the only exception is ExpressionError.
"""

import cmath
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from random import Random

MAX_CHARS = 2_000
MAX_DEPTH = 40
MAX_DIGITS = 60
MAX_EXPONENT = 1_000
MAX_BITS = 65_536
"""Of a numerator or a denominator."""
MAX_COEFFICIENT_BITS = 4_096
"""The same of a polynomial's coefficients: each factor multiplies all of them."""
MAX_TERMS = 500
POINTS = 10
"""At which a derivative is compared."""
TOLERANCE = 1e-7

_TOKEN = re.compile(r"\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<name>[A-Za-z_]\w*)|(?P<sign>\*\*|[-+*/^()]))", re.ASCII)


class ExpressionError(ValueError):
    """The text is no expression, or one beyond the bounds."""


@dataclass(frozen=True, slots=True)
class ExpressionNode:
    """One operation: `+` and `*` of any number of operands, `-` and `/` (the reciprocal) of one, `^` of two; or a
    number, a symbol or a call, by its name."""

    kind: str
    args: tuple["ExpressionNode", ...] = ()
    number: Fraction = Fraction(0)
    name: str = ""


def parse(text: str) -> ExpressionNode:
    """The expression in `text`; ExpressionError where it is none."""
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"longer than {MAX_CHARS} characters")
    parser = _ExpressionParser(_split(text.strip()))
    tree = parser.read_sum(0)
    if parser.at < len(parser.tokens):
        raise ExpressionError(f"{parser.tokens[parser.at][1]!r} does not belong there")
    return tree


def _split(text: str) -> list[tuple[str, str]]:
    tokens, at = list[tuple[str, str]](), 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ExpressionError(f"{text[at : at + 10]!r} is not understood")
        assert match.lastgroup is not None
        tokens.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return tokens


class _ExpressionParser:
    """Recursive descent over tokens, of bounded depth."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.at = tokens, 0

    def take(self, *signs: str) -> str | None:
        """The next token where it is one of these signs."""
        if self.at < len(self.tokens) and self.tokens[self.at] in (("sign", sign) for sign in signs):
            self.at += 1
            return self.tokens[self.at - 1][1]
        return None

    def read_sum(self, depth: int) -> ExpressionNode:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
        terms, sign = list[ExpressionNode](), self.take("+", "-") or "+"
        while sign:
            term = self.read_product(depth)
            terms.append(ExpressionNode("-", (term,)) if sign == "-" else term)
            sign = self.take("+", "-") or ""
        return terms[0] if len(terms) == 1 else ExpressionNode("+", tuple(terms))

    def read_product(self, depth: int) -> ExpressionNode:
        factors, sign = [self.read_power(depth)], self.take("*", "/")
        while sign:
            factor = self.read_power(depth)
            factors.append(ExpressionNode("/", (factor,)) if sign == "/" else factor)
            sign = self.take("*", "/")
        return factors[0] if len(factors) == 1 else ExpressionNode("*", tuple(factors))

    def read_power(self, depth: int) -> ExpressionNode:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
        if sign := self.take("+", "-"):  # as in 2*-3
            operand = self.read_power(depth + 1)
            return ExpressionNode("-", (operand,)) if sign == "-" else operand
        base = self.read_atom(depth)
        return ExpressionNode("^", (base, self.read_power(depth + 1))) if self.take("^", "**") else base

    def read_atom(self, depth: int) -> ExpressionNode:
        if self.take("("):
            return self.read_closed(depth)
        if self.at >= len(self.tokens):
            raise ExpressionError("it ends too early")
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            if len(text) > MAX_DIGITS:
                raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
            return ExpressionNode("number", number=Fraction(text))
        if kind == "name":
            return (
                ExpressionNode("call", (self.read_closed(depth),), name=text)
                if self.take("(")
                else ExpressionNode("symbol", name=text)
            )
        raise ExpressionError(f"{text!r} does not belong there")

    def read_closed(self, depth: int) -> ExpressionNode:
        inside = self.read_sum(depth + 1)
        if not self.take(")"):
            raise ExpressionError("a parenthesis is not closed")
        return inside


def evaluate(node: ExpressionNode) -> Fraction:
    """The exact value of an expression of numbers."""
    match node.kind:
        case "number":
            return node.number
        case "+":
            total = Fraction(0)
            for term in node.args:  # bounded at every step: coprime denominators multiply
                total = _bounded(total + evaluate(term))
            return total
        case "-":
            return -evaluate(node.args[0])
        case "*":
            product = Fraction(1)
            for factor in node.args:
                product = _bounded(product * evaluate(factor))
            return product
        case "/":
            return _invert(evaluate(node.args[0]))
        case "^":
            return _power(evaluate(node.args[0]), evaluate(node.args[1]))
    raise ExpressionError(f"{node.name!r} is not a number")


def _bounded(value: Fraction, limit: int = MAX_BITS) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > limit:
        raise ExpressionError(f"a number of more than {limit} bits")
    return value


def _invert(value: Fraction) -> Fraction:
    if value == 0:
        raise ExpressionError("a division by zero")
    return 1 / value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ExpressionError("an exponent that is not whole")
    if abs(exponent) > MAX_BITS or count_bits(base) * abs(exponent) > MAX_BITS:
        raise ExpressionError(f"a power of more than {MAX_BITS} bits")
    return (base if exponent >= 0 else _invert(base)) ** abs(exponent.numerator)


def count_bits(value: Fraction) -> int:
    """Bits of the larger of numerator and denominator; 0 for those whose powers do not grow."""
    return 0 if abs(value) in (0, 1) else max(value.numerator.bit_length(), value.denominator.bit_length())


Polynomial = dict[tuple[tuple[str, int], ...], Fraction]
"""The coefficient of each monomial: its symbols with their exponents, in order."""


def expand(node: ExpressionNode) -> Polynomial:
    """A polynomial that is written out: sums of monomials, where only numbers may stand before a parenthesis."""
    match node.kind:
        case "number":
            return _clean({(): node.number})
        case "symbol":
            return {((node.name, 1),): Fraction(1)}
        case "+":
            return _add([expand(term) for term in node.args])
        case "-":
            return {monomial: -factor for monomial, factor in expand(node.args[0]).items()}
        case "*":
            product: Polynomial = {(): Fraction(1)}
            for factor in node.args:
                product = _multiply(product, expand(factor))
            return product
        case "/":
            return {(): _invert(_constant(expand(node.args[0])))}
        case "^":
            return _raise(expand(node.args[0]), _constant(expand(node.args[1])))
    raise ExpressionError(f"{node.name!r} is no part of a polynomial")


def _add(terms: Iterable[Polynomial]) -> Polynomial:
    total: Polynomial = {}
    for term in terms:
        for monomial, factor in term.items():
            total[monomial] = _bounded(total.get(monomial, Fraction(0)) + factor, MAX_COEFFICIENT_BITS)
    return _clean(total)


def _clean(polynomial: Polynomial) -> Polynomial:
    if len(polynomial) > MAX_TERMS:
        raise ExpressionError(f"more than {MAX_TERMS} terms")
    return {monomial: factor for monomial, factor in polynomial.items() if factor}


def _constant(polynomial: Polynomial) -> Fraction:
    if set(polynomial) - {()}:
        raise ExpressionError("a symbol where a polynomial has a number")
    return polynomial.get((), Fraction(0))


def _multiply(left: Polynomial, right: Polynomial) -> Polynomial:
    if len(left) > 1 and len(right) > 1:
        raise ExpressionError("a product that is not written out")
    if (len(left) > 1 and set(right) - {()}) or (len(right) > 1 and set(left) - {()}):
        raise ExpressionError("a product that is not written out")
    product: Polynomial = {}
    for one, factor in left.items():
        for other, times in right.items():
            exponents = dict(one)
            for symbol, exponent in other:
                exponents[symbol] = exponents.get(symbol, 0) + exponent
            product[tuple(sorted(exponents.items()))] = _bounded(factor * times, MAX_COEFFICIENT_BITS)
    return product


def _raise(base: Polynomial, exponent: Fraction) -> Polynomial:
    if exponent.denominator != 1 or not 0 <= exponent <= MAX_EXPONENT:
        raise ExpressionError(f"an exponent that is not whole, or outside 0 to {MAX_EXPONENT}")
    if len(base) > 1 and exponent > 1:
        raise ExpressionError("a power that is not written out")
    power = exponent.numerator
    if power == 0 or len(base) > 1:
        return base if power else {(): Fraction(1)}
    return {
        tuple((symbol, times * power) for symbol, times in monomial): _bounded(
            _power(factor, exponent), MAX_COEFFICIENT_BITS
        )
        for monomial, factor in base.items()
    }


def is_antiderivative(answer: ExpressionNode, integrand: ExpressionNode, variable: str) -> bool:
    """Whether the derivative of `answer` is `integrand`: compared at unpredictable complex points.

    The points follow from a digest of both, so the same answer has the same score. A point where the integrand is
    undefined is passed over; an answer that is undefined at any other is wrong.
    """
    rng = Random(hashlib.sha256(repr((answer, integrand, variable)).encode()).digest())
    compared = 0
    for _ in range(10 * POINTS):
        point = complex(rng.uniform(-2.5, 2.5), rng.choice((-1, 1)) * rng.uniform(0.1, 1.0))
        constants = {name: complex(rng.uniform(0.5, 1.5)) for name in sorted(_symbols(answer) | _symbols(integrand))}
        try:
            expected = _derive(integrand, variable, point, constants)[0]
        except (ArithmeticError, ValueError):
            continue
        try:
            found = _derive(answer, variable, point, constants)[1]
        except (ArithmeticError, ValueError):
            return False
        if not abs(found - expected) <= TOLERANCE * max(1.0, abs(found), abs(expected)):
            return False
        compared += 1
        if compared == POINTS:
            return True
    raise ExpressionError("an integrand that is undefined nearly everywhere")


def _symbols(node: ExpressionNode) -> set[str]:
    return ({node.name} if node.kind == "symbol" else set()).union(*map(_symbols, node.args))


_CONSTANTS = {"pi": complex(cmath.pi), "E": complex(cmath.e)}

_Curve = Callable[[complex], complex]

_FUNCTIONS: Mapping[str, tuple[_Curve, _Curve]] = {
    "exp": (cmath.exp, cmath.exp),
    "log": (cmath.log, lambda u: 1 / u),
    "ln": (cmath.log, lambda u: 1 / u),
    "sqrt": (cmath.sqrt, lambda u: 0.5 / cmath.sqrt(u)),
    "sin": (cmath.sin, cmath.cos),
    "cos": (cmath.cos, lambda u: -cmath.sin(u)),
    "tan": (cmath.tan, lambda u: 1 / cmath.cos(u) ** 2),
    "sec": (lambda u: 1 / cmath.cos(u), lambda u: cmath.tan(u) / cmath.cos(u)),
    "csc": (lambda u: 1 / cmath.sin(u), lambda u: -cmath.cos(u) / cmath.sin(u) ** 2),
    "cot": (lambda u: 1 / cmath.tan(u), lambda u: -1 / cmath.sin(u) ** 2),
    "asin": (cmath.asin, lambda u: 1 / cmath.sqrt(1 - u * u)),
    "acos": (cmath.acos, lambda u: -1 / cmath.sqrt(1 - u * u)),
    "atan": (cmath.atan, lambda u: 1 / (1 + u * u)),
    "sinh": (cmath.sinh, cmath.cosh),
    "cosh": (cmath.cosh, cmath.sinh),
    "tanh": (cmath.tanh, lambda u: 1 / cmath.cosh(u) ** 2),
    "asinh": (cmath.asinh, lambda u: 1 / cmath.sqrt(1 + u * u)),
    "Abs": (lambda u: u if u.real > 0 else -u, lambda u: 1 if u.real > 0 else -1),
}
"""Each function with its derivative."""


def _derive(
    node: ExpressionNode, variable: str, at: complex, constants: Mapping[str, complex]
) -> tuple[complex, complex]:
    """Value and derivative at a point."""
    match node.kind:
        case "number":
            return complex(float(node.number)), 0j
        case "symbol":
            return (at, 1 + 0j) if node.name == variable else (_CONSTANTS.get(node.name, constants[node.name]), 0j)
        case "call" if node.name not in _FUNCTIONS:
            raise ExpressionError(f"{node.name!r} is no function that is known")
    operands = [_derive(arg, variable, at, constants) for arg in node.args]
    value, slope = operands[0]
    match node.kind:
        case "-":
            return -value, -slope
        case "/":
            return 1 / value, -slope / value**2
        case "^":
            return _derive_power(operands[0], operands[1])
        case "call":
            function, derivative = _FUNCTIONS[node.name]
            return function(value), derivative(value) * slope
    for other, other_slope in operands[1:]:
        if node.kind == "+":
            value, slope = value + other, slope + other_slope
        else:
            value, slope = value * other, slope * other + value * other_slope
    return value, slope


def _derive_power(base: tuple[complex, complex], exponent: tuple[complex, complex]) -> tuple[complex, complex]:
    (value, slope), (power, power_slope) = base, exponent
    if abs(power) > MAX_EXPONENT:
        raise ExpressionError(f"an exponent above {MAX_EXPONENT}")
    raised = value**power
    grown = power * value ** (power - 1) * slope
    return raised, grown + (raised * cmath.log(value) * power_slope if power_slope else 0)
