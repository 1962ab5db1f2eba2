"""The calculator: one operation on two whole numbers, so that longer sums take several calls."""

import re

from treadle.rollout.tools import tool

_OPERATION = re.compile(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*")


@tool(inline=True)
def calculate(expression: str) -> str:
    """Work out one operation on two whole numbers.

    Args:
        expression: two whole numbers with +, - or * between them, such as 12*7
    """
    found = _OPERATION.fullmatch(expression)
    if found is None:
        raise ValueError("write two whole numbers with +, - or * between them")
    left, sign, right = int(found[1]), found[2], int(found[3])
    return str(left + right if sign == "+" else left - right if sign == "-" else left * right)
