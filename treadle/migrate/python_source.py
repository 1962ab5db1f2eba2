"""Python scripts, read and never run: values of arguments, and definitions with all they need, by the syntax tree.

Owns what can be known of a value without running anything: literals, names that are bound to such values once, and
arithmetic on numbers. Everything else is `Computed`, with its source text.
"""

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError, Mistake

_ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True, slots=True)
class Computed:
    """A value that only running the script would tell."""

    text: str


@dataclass(frozen=True, slots=True)
class PythonCall:
    """A call in a script: its arguments by name, positional ones by their position, and the line."""

    line: int
    positional: tuple[ast.expr, ...]
    named: dict[str, ast.expr]
    spreads: tuple[str, ...]
    """Source text of arguments such as `**options`."""


class PythonScript:
    """A parsed script."""

    def __init__(self, path: Path) -> None:
        try:
            self.text = path.read_text(encoding="utf-8")
            self.tree = ast.parse(self.text)
        except (OSError, UnicodeDecodeError) as error:
            fix = "give the path of a Python script"
            raise ConfigError([Mistake(str(path), f"cannot be read: {error}", fix=fix, missing="file")]) from error
        except SyntaxError as error:
            raise ConfigError([Mistake(f"{path}:{error.lineno}", f"is not Python: {error.msg}")]) from error
        self.path = path
        self._bound = _bindings(self.tree)
        self._changed = _changed_names(self.tree)

    def calls(self, name: str) -> list[PythonCall]:
        """Every call of a function or class of this name, in the order of the script."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and _last_name(node.func) == name]
        return [self._read_call(node) for node in sorted(found, key=lambda node: node.lineno)]

    def environment_default(self, node: ast.expr) -> tuple[str, Any] | None:
        """Variable and default of `os.environ.get(NAME, DEFAULT)` or `os.getenv(NAME, DEFAULT)`; None for all else."""
        node = self.expression(node)
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(("environ.get", "getenv")):
            return None
        words = [self.value(item) for item in node.args]
        words += [self.value(item.value) for item in node.keywords if item.arg == "default"]
        return (str(words[0]), words[1]) if len(words) == 2 else None

    def value(self, node: ast.expr) -> Any:
        """What an expression means, or `Computed`."""
        try:
            return self._value(node, set())
        except _NotStatic:
            return Computed(ast.unparse(node))

    def expression(self, node: ast.expr) -> ast.expr:
        """The expression behind a name that is bound once; any other expression as it is."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and node.id in self._bound and node.id not in seen:
            seen.add(node.id)
            bound = self._bound[node.id]
            if bound is None:
                return node
            node = bound
        return node

    def assignments(self, name: str) -> list[ast.expr]:
        """Everything that is assigned to a name, in the order of the script."""
        found = [
            node.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign) and any(_last_name(target) == name for target in node.targets)
        ]
        return sorted(found, key=lambda node: node.lineno)

    def _read_call(self, node: ast.Call) -> PythonCall:
        """Arguments of a call; `**options` is looked into where the script writes the options down and leaves them."""
        named = {item.arg: item.value for item in node.keywords if item.arg is not None}
        spreads: list[str] = []
        for item in node.keywords:
            if item.arg is None:
                found = self._options(item.value)
                named |= found or {}
                spreads += [f"**{ast.unparse(item.value)}"] if found is None else []
        spreads += [ast.unparse(item) for item in node.args if isinstance(item, ast.Starred)]
        positional = tuple(item for item in node.args if not isinstance(item, ast.Starred))
        return PythonCall(node.lineno, positional, named, tuple(spreads))

    def _options(self, node: ast.expr) -> dict[str, ast.expr] | None:
        """Names and values of `{"name": value}` or `dict(name=value)`; None where that cannot be known."""
        if isinstance(node, ast.Name) and node.id in self._changed:
            return None
        node = self.expression(node)
        if isinstance(node, ast.Call) and _last_name(node.func) == "dict" and not node.args:
            names = [item.arg for item in node.keywords]
            return (
                {name: item.value for name, item in zip(names, node.keywords, strict=True) if name}
                if all(names)
                else None
            )
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            return {
                str(key.value): value
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant)
            }
        return None

    def _value(self, node: ast.expr, seen: set[str]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and self._bound.get(node.id) is not None and node.id not in seen:
            bound = self._bound[node.id]
            assert bound is not None
            return self._value(bound, {*seen, node.id})
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(item, seen) for item in node.elts]
        if isinstance(node, ast.Dict) and None not in node.keys:
            keys = [self._value(item, seen) for item in node.keys if item is not None]
            return dict(zip(keys, (self._value(item, seen) for item in node.values), strict=True))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self._value(node.operand, seen)
            if isinstance(number, int | float):
                return -number
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return self._calculate(node, seen)
        raise _NotStatic

    def _calculate(self, node: ast.BinOp, seen: set[str]) -> Any:
        left, right = self._value(node.left, seen), self._value(node.right, seen)
        both = (type(left), type(right))
        if both == (str, str) and isinstance(node.op, ast.Add):
            return left + right
        if not set(both) <= {int, float}:
            raise _NotStatic
        try:
            return _ARITHMETIC[type(node.op)](left, right)
        except ArithmeticError:
            raise _NotStatic from None

    def function(self, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """A function of the script's top level."""
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return node
        return None

    def imported_from(self, name: str) -> str | None:
        """The module that a name is imported from at the top level."""
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return "." * node.level + (node.module or "")
        return None

    def copy_definitions(self, names: list[str]) -> str:
        """Source of these functions and of everything at the top level that they use, in the order of the script."""
        wanted, needed = set(names), set[int]()
        while True:
            found = [
                (at, node)
                for at, node in enumerate(self.tree.body)
                if at not in needed and wanted & set(_defined(node))
            ]
            if not found:
                break
            for at, node in found:
                needed.add(at)
                wanted |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        imports, others = list[str](), list[str]()
        for at in sorted(needed):
            node = self.tree.body[at]
            kind = imports if isinstance(node, ast.Import | ast.ImportFrom) else others
            kind.append(_source(node, self.text))
        return "\n".join(imports) + "\n\n\n" + "\n\n\n".join(others) if imports else "\n\n\n".join(others)


class _NotStatic(Exception):
    """A value that is not known without running the script."""


def _bindings(tree: ast.Module) -> dict[str, ast.expr | None]:
    """What each name is assigned; None where it is assigned more than once, or by something else than `=`."""
    found: dict[str, ast.expr | None] = {}
    for node in ast.walk(tree):
        pairs: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            pairs = [(name, node.value) for name in names]
            tuples = [target for target in node.targets if isinstance(target, ast.Tuple)]
            pairs += [(item.id, None) for target in tuples for item in target.elts if isinstance(item, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs = [(node.target.id, node.value)]
        elif isinstance(node, ast.AugAssign | ast.For | ast.NamedExpr) and isinstance(node.target, ast.Name):
            pairs = [(node.target.id, None)]
        for name, value in pairs:
            found[name] = None if name in found else value
    return found


def _changed_names(tree: ast.Module) -> set[str]:
    """Names whose object the script may change after it is made: `name[…] = …`, `del name[…]`, `name.update(…)`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            found.add(node.value.id)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            found.add(node.func.value.id)
    return found


def _defined(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of the top level binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _source(node: ast.stmt, text: str) -> str:
    """The text of a statement, decorators included."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(item.lineno for item in decorators)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
