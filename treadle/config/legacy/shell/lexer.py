"""Splits a bash script into commands, words and the parts of words that would be expanded.

Owns quoting, comments, continuation lines, arrays and redirections. Knows no variable and no command. Nothing is run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

KEYWORDS_BEFORE_A_COMMAND = frozenset({"then", "else", "do", "!", "time", "elif"})
OPENING = frozenset({"if", "case", "for", "while", "until", "select", "{"})
CLOSING = frozenset({"fi", "esac", "done", "}"})


class PartKind(StrEnum):
    """What bash would do with a part of a word."""

    TEXT = "text"
    VARIABLE = "variable"
    ARITHMETIC = "arithmetic"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word. A quoted piece is never split into several words."""

    kind: PartKind
    text: str
    quoted: bool = False


@dataclass(slots=True)
class Word:
    """One word as it is written."""

    line: int
    parts: list[Part] = field(default_factory=list)

    def literal(self) -> str | None:
        """The word's text, where nothing in it would be expanded."""
        return "".join(part.text for part in self.parts) if self.is_literal() else None

    def is_literal(self) -> bool:
        return all(part.kind is PartKind.TEXT for part in self.parts)

    def is_bare(self, text: str) -> bool:
        """Whether this is exactly the unquoted word `text`."""
        return [(part.kind, part.text, part.quoted) for part in self.parts] == [(PartKind.TEXT, text, False)]


@dataclass(slots=True)
class Command:
    """The words of one command. `depth` counts the conditions, loops and functions it stands in."""

    line: int
    depth: int
    words: list[Word] = field(default_factory=list)
    array: str | None = None
    """The name, where this is `NAME=(…)` or `NAME+=(…)` and the words are the items."""


def read_commands(text: str) -> list[Command]:
    """Every command of a script, in order."""
    return list(_Lexer(text).commands())


def read_word(text: str, line: int, quoted: bool = False) -> Word:
    """One word that stands inside another, such as the default of a variable."""
    lexer = _Lexer(text, line)
    return lexer.word(ends="", quoted=quoted)


class _Lexer:
    def __init__(self, text: str, line: int = 1) -> None:
        self._text = text
        self._at = 0
        self._line = line
        self._depth = 0

    def commands(self) -> Iterator[Command]:
        command = Command(self._line, self._depth)
        while self._at < len(self._text):
            if self._skip_blank():
                continue
            letter = self._text[self._at]
            if letter == "#":
                self._skip_line()
            elif letter in "\n;&|()":
                self._advance()
                yield from self._ended(command)
                command = Command(self._line, self._depth)
            elif letter in "<>":
                self._skip_redirection()
            elif self._fits_redirection():
                self._advance()
            else:
                yield from self._take(command)
        yield from self._ended(command)

    def _take(self, command: Command) -> Iterator[Command]:
        word = self.word(ends=" \t\n;&|()<>")
        name = word.literal()
        command.line = command.line if command.words else word.line
        if name and name.endswith("=") and not command.words and self._peek() == "(":
            yield Command(word.line, self._depth, self._array(), name.removesuffix("="))
            return
        if not command.words and self._keyword(word):
            return
        command.words.append(word)

    def _keyword(self, word: Word) -> bool:
        """Follow how deep conditions and loops go; a word that only opens or closes one is no command."""
        text = word.literal() or ""
        if not word.is_bare(text):
            return False
        self._depth += (text in OPENING) - (text in CLOSING)
        return text in KEYWORDS_BEFORE_A_COMMAND or text in ("{", "}", "fi", "done", "esac")

    def _ended(self, command: Command) -> Iterator[Command]:
        if command.words:
            yield command

    def _array(self) -> list[Word]:
        self._advance()
        items: list[Word] = []
        while self._at < len(self._text):
            if self._skip_blank() or self._peek() == "\n":
                self._advance() if self._peek() == "\n" else None
            elif self._peek() == "#":
                self._skip_line()
            elif self._peek() == ")":
                self._advance()
                break
            elif self._peek() == "(":
                self._advance()
            else:
                items.append(self.word(ends=" \t\n()"))
        return items

    def word(self, ends: str, quoted: bool = False) -> Word:
        """The word that starts here, up to one of the letters `ends` outside quotes."""
        word = Word(self._line)
        plain = ""
        while self._at < len(self._text) and (quoted or self._peek() not in (ends or "\0")):
            part = self._part(quoted)
            if isinstance(part, str):
                plain += part
                continue
            if plain:
                word.parts.append(Part(PartKind.TEXT, plain, quoted))
                plain = ""
            word.parts.extend(part)
        if plain or not word.parts:
            word.parts.append(Part(PartKind.TEXT, plain, quoted))
        return word

    def _part(self, quoted: bool) -> "str | list[Part]":
        """Plain text, or the parts that a quote or an expansion here stands for."""
        letter = self._peek()
        if letter == "\\":
            return self._escaped(quoted)
        if letter == "'" and not quoted:
            end = self._find("'", self._at + 1)
            return [Part(PartKind.TEXT, self._cut(self._at + 1, end), True)]
        if letter == '"' and not quoted:
            return self._double_quoted()
        if letter == "`":
            end = self._find("`", self._at + 1)
            return [Part(PartKind.COMMAND, self._cut(self._at + 1, end), quoted)]
        if letter == "$":
            return self._expansion(quoted)
        self._advance()
        return letter

    def _escaped(self, quoted: bool) -> "str | list[Part]":
        following = self._text[self._at + 1 : self._at + 2]
        self._advance(2)
        if following == "\n":
            return ""
        if quoted and following not in '$`"\\':
            return "\\" + following
        return [Part(PartKind.TEXT, following, True)]

    def _double_quoted(self) -> list[Part]:
        end = self._at + 1
        while end < len(self._text) and self._text[end] != '"':
            end = self._skip_over(end)
        inner = _Lexer(self._text[self._at + 1 : end], self._line).word(ends="", quoted=True)
        self._cut(self._at, end)
        return [Part(part.kind, part.text, True) for part in inner.parts]

    def _skip_over(self, at: int) -> int:
        """The place after one letter, or after a whole escape or expansion, inside double quotes."""
        if self._text[at] == "\\":
            return at + 2
        for opening, closing in (("${", "}"), ("$(", ")")):
            if self._text.startswith(opening, at):
                return self._match(at + 1, opening[1], closing) + 1
        return at + 1

    def _expansion(self, quoted: bool) -> "str | list[Part]":
        text = self._text
        if text.startswith("$((", self._at):
            end = self._match(self._at + 1, "(", ")")
            return [Part(PartKind.ARITHMETIC, self._cut(self._at + 3, end)[:-1], quoted)]
        if text.startswith("$(", self._at):
            end = self._match(self._at + 1, "(", ")")
            return [Part(PartKind.COMMAND, self._cut(self._at + 2, end), quoted)]
        if text.startswith("${", self._at):
            end = self._match(self._at + 1, "{", "}")
            return [Part(PartKind.VARIABLE, self._cut(self._at + 2, end), quoted)]
        end = self._at + 1
        while end < len(text) and (text[end].isalnum() or text[end] == "_") and not text[self._at + 1].isdigit():
            end += 1
        end = max(end, self._at + 2) if text[self._at + 1 : self._at + 2] in [*"@*#?!$-0123456789"] else end
        if end == self._at + 1:
            self._advance()
            return "$"
        return [Part(PartKind.VARIABLE, self._cut(self._at + 1, end - 1, end), quoted)]

    def _match(self, at: int, opening: str, closing: str) -> int:
        """The place of the letter that closes the one at `at`."""
        depth = 0
        while at < len(self._text):
            letter = self._text[at]
            if letter == "\\":
                at += 1
            elif letter in "\"'" and opening == "{":
                at = self._find(letter, at + 1)
            depth += (letter == opening) - (letter == closing)
            if depth == 0:
                return at
            at += 1
        return len(self._text)

    def _find(self, letter: str, start: int) -> int:
        found = self._text.find(letter, start)
        return found if found >= 0 else len(self._text)

    def _cut(self, start: int, end: int, after: int | None = None) -> str:
        """The text from `start` up to `end`, and go on behind it."""
        found = self._text[start : after if after is not None else end]
        self._advance((after if after is not None else end + 1) - self._at)
        return found

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _advance(self, count: int = 1) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _skip_blank(self) -> bool:
        if self._peek() in (" ", "\t", "\r"):
            self._advance()
            return True
        if self._text.startswith("\\\n", self._at):
            self._advance(2)
            return True
        return False

    def _skip_line(self) -> None:
        self._advance(self._find("\n", self._at) - self._at)

    def _fits_redirection(self) -> bool:
        """A file number before `>` or `<`, as in `2>&1`."""
        return self._peek().isdigit() and self._text[self._at + 1 : self._at + 2] in ("<", ">")

    def _skip_redirection(self) -> None:
        while self._peek() and self._peek() in "<>&|-":
            self._advance()
        while self._skip_blank():
            pass
        self.word(ends=" \t\n;&|()<>")
