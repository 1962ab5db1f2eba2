"""Bash arithmetic: the value of `$(( … ))` and `(( … ))`. Names are filled in before; nothing is run."""

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

LIMIT = 2**63
"""bash counts in 64 bits and would go round; such a result is refused instead."""


def calculate(expression: str) -> int | None:
    """The value of an expression of whole numbers; None where there is none."""
    spelled = re.sub(r"!(?!=)", " not ", expression.replace("&&", " and ").replace("||", " or "))
    try:
        return int(_value(ast.parse(spelled.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return None


def _divide(left: int, right: int) -> int:
    """bash rounds towards zero."""
    whole = abs(left) // abs(right)
    return whole if (left < 0) == (right < 0) else -whole


def _power(left: int, right: int) -> int:
    if not 0 <= right <= 63:
        raise ValueError(right)
    return int(left**right)


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Mod: lambda left, right: left - right * _divide(left, right),
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _value(node: Any) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(node.value, bool):
            return value
        case ast.BinOp() if type(node.op) in _OPERATORS:
            result = int(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
            if abs(result) >= LIMIT:
                raise ValueError(result)
            return result
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](_value(node.operand)))
        case ast.Compare(ops=[single], comparators=[right]) if type(single) in _OPERATORS:
            return int(_OPERATORS[type(single)](_value(node.left), _value(right)))
        case ast.BoolOp():
            values = [_value(item) for item in node.values]
            return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError(ast.dump(node))
