"""Syntax tree of bash launch scripts: words and their parts, commands, conditions, loops and functions.

Records only. The lexer makes words, the parser makes commands; each has the number of its line.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class PartKind(StrEnum):
    """What bash would do with a part of a word."""

    TEXT = "text"
    VARIABLE = "variable"
    ARITHMETIC = "arithmetic"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class WordPart:
    """A piece of a word. A quoted piece is never split into several words."""

    kind: PartKind
    text: str
    quoted: bool = False


@dataclass(slots=True)
class Word:
    """One word as it is written."""

    line: int
    parts: list[WordPart] = field(default_factory=list)

    def literal(self) -> str | None:
        """The word's text, where nothing in it would be expanded."""
        return "".join(part.text for part in self.parts) if self.is_literal() else None

    def is_literal(self) -> bool:
        return all(part.kind is PartKind.TEXT for part in self.parts)

    def bare(self) -> str:
        """The word's text, where no part of it is quoted or expanded; else nothing."""
        return "" if any(part.quoted for part in self.parts) else self.literal() or ""


@dataclass(frozen=True, slots=True)
class ArrayItems:
    """`NAME=(…)` or `NAME+=(…)`."""

    line: int
    name: str
    append: bool
    items: Sequence[Word]


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """A command and its arguments, or assignments alone."""

    line: int
    words: Sequence[Word | ArrayItems]


@dataclass(frozen=True, slots=True)
class DoubleBracket:
    """`[[ … ]]`."""

    line: int
    words: Sequence[Word]


@dataclass(frozen=True, slots=True)
class DoubleParenthesis:
    """`(( … ))`."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class CommandChain:
    """Commands joined by `&&` and `||`."""

    line: int
    first: "Command"
    rest: Sequence[tuple[str, "Command"]]


@dataclass(frozen=True, slots=True)
class Negation:
    """`! command`."""

    line: int
    command: "Command"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by `|`."""

    line: int
    commands: Sequence["Command"]


@dataclass(frozen=True, slots=True)
class IfStatement:
    """Conditions with their bodies, in order; `otherwise` is the body of `else`."""

    line: int
    branches: Sequence[tuple["Block", "Block"]]
    otherwise: "Block"


@dataclass(frozen=True, slots=True)
class CaseStatement:
    """A word, and bodies by the patterns that it may match."""

    line: int
    word: Word
    branches: Sequence[tuple[Sequence[Word], "Block"]]


@dataclass(frozen=True, slots=True)
class ForLoop:
    """`for NAME in ITEMS`; no items: the arguments of the script."""

    line: int
    name: str
    items: Sequence[Word]
    body: "Block"


@dataclass(frozen=True, slots=True)
class WhileLoop:
    """`while` or `until`."""

    line: int
    until: bool
    condition: "Block"
    body: "Block"


@dataclass(frozen=True, slots=True)
class FunctionDefinition:
    """The definition of a function."""

    line: int
    name: str
    body: "Command"


@dataclass(frozen=True, slots=True)
class Grouped:
    """`{ … }` or `( … )`; what the latter assigns is gone after it."""

    line: int
    body: "Block"
    subshell: bool


Command = (
    SimpleCommand
    | DoubleBracket
    | DoubleParenthesis
    | CommandChain
    | Negation
    | Pipeline
    | IfStatement
    | CaseStatement
    | ForLoop
    | WhileLoop
    | FunctionDefinition
    | Grouped
)
Block = list[Command]
Token = str | Word | ArrayItems
