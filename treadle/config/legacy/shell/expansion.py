"""What the words of a script come to, given the variables the script itself sets.

A variable without a value is never guessed: the word that needs it says so. Nothing is run, and nothing is read from
the environment; `$HOME` is written `~`, which means the same.
"""

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treadle.config.legacy.shell.lexer import Command, Part, PartKind, Word, read_word

HOME = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the home directory until it is known where in a value it comes."""

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?!$-]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")


@dataclass(frozen=True, slots=True)
class Expanded:
    """A word's text, what in it has no value, and which defaults went into it."""

    text: str
    line: int
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Variables:
    """What a script has set so far. `uncertain` names variables that a condition or a loop sets, by line."""

    values: dict[str, list[Expanded]] = field(default_factory=dict)
    uncertain: dict[str, int] = field(default_factory=dict)

    def assign(self, command: Command) -> bool:
        """Take the assignments of a command; True if it is nothing else."""
        if command.array is not None:
            name, append = command.array.removesuffix("+"), command.array.endswith("+")
            items = [item for word in command.words for item in self.expand(word)]
            self._set(name, [*(self.values.get(name, ()) if append else ()), *items], command)
            return True
        words = command.words
        exported = words[0].literal() in ("export", "local", "readonly", "declare", "typeset")
        for word in words[1:] if exported else words:
            if not self._assign_word(word, command) and not exported:
                return False
        return True

    def _assign_word(self, word: Word, command: Command) -> bool:
        first = word.parts[0]
        found = _ASSIGNMENT.match(first.text) if first.kind is PartKind.TEXT and not first.quoted else None
        if found is None:
            return False
        rest = Word(word.line, [Part(PartKind.TEXT, first.text[found.end() :]), *word.parts[1:]])
        value = self._joined(rest)
        if found.group(2) and (before := self.values.get(found.group(1))):
            value = _join([before[0], value], value.line)
        self._set(found.group(1), [value], command)
        return True

    def _set(self, name: str, value: list[Expanded], command: Command) -> None:
        if command.depth:
            self.uncertain[name] = command.line
        else:
            self.uncertain.pop(name, None)
            self.values[name] = value

    def expand(self, word: Word) -> list[Expanded]:
        """The words that one written word comes to: several for an array or a list in a variable."""
        array = self._array(word)
        if array is not None:
            return array
        joined = self._joined(word)
        if len(word.parts) == 1 and word.parts[0].kind is PartKind.VARIABLE and not word.parts[0].quoted:
            return [replace(joined, text=text) for text in joined.text.split()]
        return [joined]

    def _array(self, word: Word) -> list[Expanded] | None:
        if len(word.parts) != 1 or word.parts[0].kind is not PartKind.VARIABLE:
            return None
        name = word.parts[0].text
        if name in ("@", "*"):
            return [Expanded("", word.line, notes=(f"line {word.line}: $@ stands for words the script does not have",))]
        found = re.fullmatch(r"(\w+)\[[@*]\]", name)
        return self._known(found.group(1), word.line) if found else None

    def _known(self, name: str, line: int) -> list[Expanded]:
        if name in self.uncertain:
            return [
                Expanded(f"${name}", line, (f"${name} depends on a condition or loop (line {self.uncertain[name]})",))
            ]
        return self.values.get(name, [Expanded(f"${name}", line, (f"${name} has no value in the script",))])

    def _joined(self, word: Word) -> Expanded:
        return _join([self._part(part, word.line) for part in word.parts], word.line)

    def _part(self, part: Part, line: int) -> Expanded:
        if part.kind is PartKind.TEXT:
            return Expanded(part.text, line)
        if part.kind is PartKind.COMMAND:
            return Expanded(f"$({part.text})", line, (f"$({part.text}) would have to be run",))
        if part.kind is PartKind.ARITHMETIC:
            return self._arithmetic(part.text, line)
        return self._variable(part.text, line)

    def _variable(self, text: str, line: int) -> Expanded:
        found = _NAME.match(text)
        if found is None:
            return Expanded(f"${{{text}}}", line, (f"${{{text}}} is an expansion that is not read",))
        name, rest = found.group(), text[found.end() :]
        known = name in self.values and name not in self.uncertain
        if not rest:
            return self._value(name, line)
        if rest[:2] in (":-", ":=", ":+", ":?") or rest[:1] in ("-", "=", "+", "?"):
            operator_, word = (rest[:2], rest[2:]) if rest[0] == ":" else (rest[:1], rest[1:])
            return self._with_default(name, known, operator_[-1], word, line)
        return Expanded(f"${{{text}}}", line, (f"${{{text}}} is an expansion that is not read",))

    def _value(self, name: str, line: int) -> Expanded:
        if name == "HOME" and name not in self.values:
            return Expanded(HOME, line)
        return _join(self._known(name, line), line, " ")

    def _with_default(self, name: str, known: bool, kind: str, word: str, line: int) -> Expanded:
        if name in self.uncertain or (known and kind != "+"):
            return self._value(name, line)
        if kind == "?" or (kind == "+" and not known):
            return self._value(name, line) if kind == "?" else Expanded("", line)
        value = self._joined(read_word(word, line))
        if kind != "+":
            shown = value.text.replace(HOME, "~")
            note = f"line {line}: ${name} is not set in the script; its default {shown!r} is taken"
            value = replace(value, notes=(*value.notes, note))
        if kind == "=":
            self.values[name] = [value]
        return value

    def _arithmetic(self, text: str, line: int) -> Expanded:
        used: list[Expanded] = []

        def value_of(found: re.Match[str]) -> str:
            used.append(self._variable(found.group(1) or found.group(2), line))
            return f"({used[-1].text})"

        expression = re.sub(r"\$\{([^{}]*)\}|\$?\b([A-Za-z_]\w*)\b", value_of, text)
        inside = _join(used, line)
        if inside.unknown:
            return replace(inside, text=f"$(({text}))")
        try:
            result = _calculate(ast.parse(expression.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError):
            return Expanded(f"$(({text}))", line, (f"$(({text})) cannot be worked out",))
        return replace(inside, text=str(result))


def _join(parts: Sequence[Expanded], line: int, between: str = "") -> Expanded:
    unknown = dict.fromkeys(item for part in parts for item in part.unknown)
    notes = dict.fromkeys(item for part in parts for item in part.notes)
    return Expanded(between.join(part.text for part in parts), line, tuple(unknown), tuple(notes))


def _divide(left: int, right: int) -> int:
    """Bash rounds towards zero."""
    whole = abs(left) // abs(right)
    return whole if (left < 0) == (right < 0) else -whole


def _power(left: int, right: int) -> int:
    if not 0 <= right <= 63:
        raise ValueError(right)
    return int(left**right)


_OPERATORS: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Mod: lambda left, right: left - right * _divide(left, right),
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def _calculate(node: Any) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_calculate(node.left), _calculate(node.right))
        if abs(result) >= 2**63:  # bash counts in 64 bits and would go round
            raise ValueError(result)
        return result
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_calculate(node.operand))
    raise ValueError(ast.dump(node))
