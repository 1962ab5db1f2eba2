"""Word expansion of launch scripts: variables, arrays, defaults, arithmetic and assignments.

Owns the values a script has set, and Bash arithmetic (`$(( … ))`), in which nothing is run. Reads nothing from the
environment: values come from the script itself, or from the caller (`given`), and those of the caller win. A variable
without a value is empty in a condition, as in bash, and unknown in a value: it is never guessed. `$HOME` is written `~`
and `$PWD` `.`, which mean the same.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from treadle.migrate.shell.lexer import parse_word
from treadle.migrate.shell.syntax_tree import ArrayItems, PartKind, Word, WordPart

HOME = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the home directory until it is known where in a value it comes."""

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?!$-]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")


@dataclass(frozen=True, slots=True)
class ExpandedWord:
    """A word's text, what in it has no value, and which defaults went into it."""

    text: str
    line: int
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    only_if: str = ""
    """The condition under which the word is there at all, where that could not be decided."""


@dataclass(slots=True)
class ScriptState:
    """What a script has set so far."""

    values: dict[str, list[ExpandedWord]] = field(default_factory=dict)
    arrays: set[str] = field(default_factory=set)
    arguments: list[ExpandedWord] = field(default_factory=list)

    def copy(self) -> "ScriptState":
        return ScriptState(dict(self.values), set(self.arrays), list(self.arguments))


class Expansion:
    """Expands the words of one script, and keeps the values it assigns.

    `substitute` returns what `$(text)` at a line writes: the interpreter runs the commands in it.
    """

    def __init__(self, given: Mapping[str, str], substitute: Callable[[str, int], ExpandedWord]) -> None:
        self._given = given
        self._substitute = substitute
        self._in_condition = False
        self.state = ScriptState({name: [ExpandedWord(value, 0)] for name, value in given.items()})
        self.depth = 0
        """Functions and command substitutions that the words are inside of."""
        self.notes: dict[str, None] = {}
        self.read: set[str] = set()
        """Names of variables that the script reads or sets."""

    def note(self, text: str) -> None:
        """Add a remark for the report, once."""
        self.notes[text] = None

    def assign(self, word: Word | ArrayItems) -> bool:
        """Take an assignment; False if the word is none."""
        if isinstance(word, ArrayItems):
            before = self.state.values.get(word.name, []) if word.append else []
            self.set(word.name, [*before, *(item for part in word.items for item in self.expand(part))], array=True)
            return True
        first = word.parts[0]
        found = _ASSIGNMENT.match(first.text) if first.kind is PartKind.TEXT and not first.quoted else None
        if found is None:
            return False
        rest = Word(word.line, [WordPart(PartKind.TEXT, first.text[found.end() :]), *word.parts[1:]])
        value = self.joined(rest)
        if found.group(2) and (earlier := self.state.values.get(found.group(1))):
            value = join_words([earlier[0], value], value.line)
        self.set(found.group(1), [value])
        return True

    def set(self, name: str, value: list[ExpandedWord], array: bool = False) -> None:
        self.read.add(name)
        if name in self._given:
            return
        self.state.values[name] = value
        (self.state.arrays.add if array else self.state.arrays.discard)(name)

    @contextmanager
    def condition(self) -> Iterator[None]:
        """Expand as conditions do: a variable without a value is empty."""
        before, self._in_condition = self._in_condition, True
        try:
            yield
        finally:
            self._in_condition = before

    def expand(self, word: Word) -> list[ExpandedWord]:
        """The words that one written word comes to: several for an array or a list in a variable."""
        array = self._array(word)
        if array is not None:
            return array
        joined = self.joined(word)
        if len(word.parts) == 1 and word.parts[0].kind is PartKind.VARIABLE and not word.parts[0].quoted:
            return [replace(joined, text=text) for text in joined.text.split()]
        return [joined]

    def whole(self, word: Word) -> list[ExpandedWord]:
        """The word as a condition sees it: never split, and there though it may be empty."""
        return self._array(word) or [self.joined(word)]

    def _array(self, word: Word) -> list[ExpandedWord] | None:
        if len(word.parts) != 1 or word.parts[0].kind is not PartKind.VARIABLE:
            return None
        name = word.parts[0].text
        if name in ("@", "*"):
            if not self.depth:
                self.note(f"line {word.line}: $@ stands for words the script does not have")
            return list(self.state.arguments)
        found = re.fullmatch(r"(\w+)\[[@*]\](?::?-(.*))?", name)
        if found is None:
            return None
        self.read.add(found.group(1))
        items = self.state.values.get(found.group(1), [])  # arrays cannot come from the environment
        return items or ([self.joined(parse_word(found.group(2), word.line))] if found.group(2) else [])

    def value_of(self, name: str, line: int) -> list[ExpandedWord]:
        self.read.add(name)
        found = self.state.values.get(name)
        if found is None and name.isdigit() and 0 < int(name) <= len(self.state.arguments):
            found = [self.state.arguments[int(name) - 1]]
        if found is not None:
            return found
        if name == "HOME":
            return [ExpandedWord(HOME, line)]
        if name == "PWD":
            return [ExpandedWord(".", line)]  # where the script is started, which is where our paths start
        if name == "#":
            return [ExpandedWord(str(len(self.state.arguments)), line)]
        if self._in_condition and name not in ("?", "$", "!", "-"):
            self.note(f"line {line}: ${name} is not set in the script, and empty in its conditions; --set gives it")
            return [ExpandedWord("", line)]
        return [ExpandedWord(f"${name}", line, (f"${name} has no value in the script",))]

    def joined(self, word: Word) -> ExpandedWord:
        return join_words([self._part(part, word.line) for part in word.parts], word.line)

    def _part(self, part: WordPart, line: int) -> ExpandedWord:
        if part.kind is PartKind.TEXT:
            return ExpandedWord(part.text, line)
        if part.kind is PartKind.COMMAND:
            return self._substitute(part.text, line)
        if part.kind is PartKind.ARITHMETIC:
            return self.arithmetic(part.text, line)
        return self._variable(part.text, line)

    def _variable(self, text: str, line: int) -> ExpandedWord:
        found = _NAME.match(text)
        if found is None:
            return ExpandedWord(f"${{{text}}}", line, (f"${{{text}}} is an expansion that is not read",))
        name, rest = found.group(), text[found.end() :]
        if rest in ("", "[@]", "[*]"):
            return join_words(self.value_of(name, line), line, " ")
        if rest in (",,", "^^"):
            value = join_words(self.value_of(name, line), line, " ")
            return replace(value, text=value.text.lower() if rest == ",," else value.text.upper())
        if rest[:2] in (":-", ":=", ":+", ":?") or rest[:1] in ("-", "=", "+", "?"):
            operator, word = (rest[:2], rest[2:]) if rest[0] == ":" else (rest[:1], rest[1:])
            return self._with_default(name, operator, word, line)
        return ExpandedWord(f"${{{text}}}", line, (f"${{{text}}} is an expansion that is not read",))

    def _with_default(self, name: str, operator: str, word: str, line: int) -> ExpandedWord:
        """`${NAME:-word}` and its kin; with a colon, an empty value counts as none."""
        self.read.add(name)
        positional = name.isdigit() and 0 < int(name) <= len(self.state.arguments)
        is_set = name in self.state.values or name in ("HOME", "PWD") or positional
        value = join_words(self.value_of(name, line), line, " ") if is_set else ExpandedWord("", line)
        if value.unknown:
            return value
        there = is_set and (bool(value.text) or not operator.startswith(":"))
        kind = operator[-1]
        if kind == "+":
            return self.joined(parse_word(word, line)) if there else ExpandedWord("", line)
        if there:
            return value
        if kind == "?":  # bash ends here; whatever the script does with it later is to be decided
            value = ExpandedWord(f"${name}", line, (f"${name} has no value in the script",))
            self.set(name, [value])
            return value
        value = self.joined(parse_word(word, line))
        if not is_set and not value.unknown:
            shown = value.text.replace(HOME, "~")
            note = f"line {line}: ${name} is not set in the script; its default {shown!r} is taken"
            value = replace(value, notes=(*value.notes, note))
        if kind == "=":
            self.set(name, [value])
        return value

    def arithmetic(self, text: str, line: int) -> ExpandedWord:
        used: list[ExpandedWord] = []

        def text_of(found: re.Match[str]) -> str:
            value = self._variable(found.group(1) or found.group(2), line)
            used.append(value)
            return f"({value.text or 0})"

        expression = re.sub(r"\$\{([^{}]*)\}|\$?\b([A-Za-z_]\w*)\b", text_of, text)
        inside = join_words(used, line)
        if inside.unknown:
            return replace(inside, text=f"$(({text}))")
        result = calculate(expression)
        if result is None:
            return ExpandedWord(f"$(({text}))", line, (f"$(({text})) cannot be worked out",))
        return replace(inside, text=str(result))


def merge_states(outcomes: Sequence[ScriptState], line: int) -> ScriptState:
    """What all outcomes agree on. Of arrays that differ, the items that only some of them have say so."""
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    merged = ScriptState(arguments=first.arguments)
    for name in dict.fromkeys(name for state in outcomes for name in state.values):
        found = [state.values.get(name) for state in outcomes]
        merged.arrays |= {name} if any(name in state.arrays for state in outcomes) else set()
        if all(value is not None and _comparable(value) == _comparable(found[0] or []) for value in found):
            merged.values[name] = found[0] or []
        elif name in merged.arrays:
            merged.values[name] = _merge_arrays([value or [] for value in found], line)
        else:
            why = f"${name} depends on a condition that is not known (line {line}); --set {name}=… gives it"
            merged.values[name] = [ExpandedWord(f"${name}", line, (why,))]
    return merged


def _merge_arrays(arrays: Sequence[Sequence[ExpandedWord]], line: int) -> list[ExpandedWord]:
    shared = 0
    while all(len(array) > shared and array[shared].text == arrays[0][shared].text for array in arrays):
        shared += 1
    why = f"only under a condition that is not known (line {line})"
    rest = {item.text: replace(item, only_if=item.only_if or why) for array in arrays for item in array[shared:]}
    return [*arrays[0][:shared], *rest.values()]


def _comparable(items: Sequence[ExpandedWord]) -> list[tuple[str, tuple[str, ...], str]]:
    return [(item.text, item.unknown, item.only_if) for item in items]


def join_words(parts: Sequence[ExpandedWord], line: int, between: str = "") -> ExpandedWord:
    unknown = dict.fromkeys(item for part in parts for item in part.unknown)
    notes = dict.fromkeys(item for part in parts for item in part.notes)
    return ExpandedWord(between.join(part.text for part in parts), line, tuple(unknown), tuple(notes))


_LIMIT = 2**63
"""bash counts in 64 bits and would go round; such a result is refused instead."""


def calculate(expression: str) -> int | None:
    """The value of an expression of whole numbers; None where there is none."""
    spelled = re.sub(r"!(?!=)", " not ", expression.replace("&&", " and ").replace("||", " or "))
    try:
        return int(_value_of(ast.parse(spelled.strip(), mode="eval").body))
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


def _value_of(node: Any) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(node.value, bool):
            return value
        case ast.BinOp() if type(node.op) in _OPERATORS:
            result = int(_OPERATORS[type(node.op)](_value_of(node.left), _value_of(node.right)))
            if abs(result) >= _LIMIT:
                raise ValueError(result)
            return result
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](_value_of(node.operand)))
        case ast.Compare(ops=[single], comparators=[right]) if type(single) in _OPERATORS:
            return int(_OPERATORS[type(single)](_value_of(node.left), _value_of(right)))
        case ast.BoolOp():
            values = [_value_of(item) for item in node.values]
            return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError(ast.dump(node))
