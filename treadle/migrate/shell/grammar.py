"""Grammar of bash launch scripts: text to a tree of commands, conditions, loops and functions.

Owns quoting, comments, continuation lines, arrays, redirections, here-documents and nesting. Knows no variable and runs
nothing. Any text is read: what is not closed ends with the script, and what does not belong somewhere is passed over.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

OPERATORS = (";;&", ";;", ";&", "&&", "||", "\n", ";", "&", "|", "(", ")")
WORD_ENDS = " \t\n;&|()<>"
MAX_DEPTH = 40
"""Nesting beyond this is passed over: no script for people has it."""

_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=")


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


def parse(text: str, line: int = 1) -> Block:
    """The commands of a script, in order."""
    return _ScriptParser(text, line).block()[0]


def parse_word(text: str, line: int) -> Word:
    """One word that stands inside another, such as the default of a variable."""
    return _ScriptLexer(text, line).word(ends="", quoted=False)


class _ScriptLexer:
    """Words and operators, one after the other."""

    def __init__(self, text: str, line: int = 1) -> None:
        self._text = text
        self._at = 0
        self._line = line
        self._documents: list[str] = []
        """Ends of the here-documents that begin on the next line."""

    def token(self) -> Token | None:
        """The next word, array or operator; None at the end."""
        while self._at < len(self._text):
            if self._skip_blank():
                continue
            if self._peek() == "#":
                self._skip_to("\n")
            elif self._peek() in "<>" or self._text.startswith(("&>", "&>>"), self._at):
                self._skip_redirection()
            elif self._peek().isdigit() and self._text[self._at + 1 : self._at + 2] in ("<", ">"):
                self._advance()  # the file number of `2>&1`
            else:
                return self._operator() or self._word_or_array()
        return None

    def _operator(self) -> str:
        for operator in OPERATORS:
            if self._text.startswith(operator, self._at):
                self._advance(len(operator))
                if operator == "\n":
                    self._skip_documents()
                return operator
        return ""

    def _word_or_array(self) -> Word | ArrayItems:
        word = self.word(ends=WORD_ENDS)
        found = _ARRAY.fullmatch(word.bare())
        if found and self._peek() == "(":
            return ArrayItems(word.line, found.group(1), bool(found.group(2)), self._array())
        return word

    def _array(self) -> list[Word]:
        self._advance()
        items: list[Word] = []
        while self._at < len(self._text):
            if self._skip_blank():
                continue
            if self._peek() == "#":
                self._skip_to("\n")
            elif self._peek() in "\n(":
                self._advance()
            elif self._peek() == ")":
                self._advance()
                break
            else:
                items.append(self.word(ends=" \t\n()"))
        return items

    def double_bracket(self) -> list[Word]:
        """The words up to `]]`, in which operators are words."""
        words: list[Word] = []
        while self._at < len(self._text):
            if self._skip_blank() or self._peek() == "\n":
                self._advance() if self._peek() == "\n" else None
                continue
            operator = next((sign for sign in ("&&", "||", "(", ")", "<", ">") if self._starts(sign)), "")
            if operator and not (words and words[-1].bare() == "=~"):
                words.append(Word(self._line, [WordPart(PartKind.TEXT, operator)]))
                self._advance(len(operator))
                continue
            start = self._at
            word = self.word(ends=" \t\n" if words and words[-1].bare() == "=~" else " \t\n();&|")
            if word.bare() == "]]":
                break
            if self._at > start:
                words.append(word)
            else:
                self._advance()
        return words

    def double_parenthesis(self) -> str | None:
        """The text up to `))`, if the parenthesis that was just read opens an arithmetic command."""
        if self._peek() != "(":
            return None
        end = self._match(self._at, "(", ")")
        return self._cut(self._at + 1, end, end + 2)

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
                word.parts.append(WordPart(PartKind.TEXT, plain, quoted))
                plain = ""
            word.parts.extend(part)
        if plain or not word.parts:
            word.parts.append(WordPart(PartKind.TEXT, plain, quoted))
        return word

    def _part(self, quoted: bool) -> str | list[WordPart]:
        """Plain text, or the parts that a quote or an expansion here stands for."""
        letter = self._peek()
        if letter == "\\":
            return self._escaped(quoted)
        if letter == "'" and not quoted:
            end = self._find("'", self._at + 1)
            return [WordPart(PartKind.TEXT, self._cut(self._at + 1, end), True)]
        if letter == '"' and not quoted:
            return self._double_quoted()
        if letter == "`":
            end = self._find("`", self._at + 1)
            return [WordPart(PartKind.COMMAND, self._cut(self._at + 1, end), quoted)]
        if letter == "$":
            return self._expansion(quoted)
        self._advance()
        return letter

    def _escaped(self, quoted: bool) -> str | list[WordPart]:
        following = self._text[self._at + 1 : self._at + 2]
        self._advance(2)
        if following == "\n":
            return ""
        if quoted and following not in '$`"\\':
            return "\\" + following
        return [WordPart(PartKind.TEXT, following, True)]

    def _double_quoted(self) -> list[WordPart]:
        end = self._at + 1
        while end < len(self._text) and self._text[end] != '"':
            end = self._skip_over(end)
        inner = _ScriptLexer(self._text[self._at + 1 : end], self._line).word(ends="", quoted=True)
        self._cut(self._at, end)
        return [WordPart(part.kind, part.text, True) for part in inner.parts]

    def _skip_over(self, at: int) -> int:
        """The place after one letter, or after a whole escape or expansion, inside double quotes."""
        if self._text[at] == "\\":
            return at + 2
        for opening, closing in (("${", "}"), ("$(", ")")):
            if self._text.startswith(opening, at):
                return self._match(at + 1, opening[1], closing) + 1
        return at + 1

    def _expansion(self, quoted: bool) -> str | list[WordPart]:
        text = self._text
        if text.startswith("$((", self._at):
            end = self._match(self._at + 1, "(", ")")
            return [WordPart(PartKind.ARITHMETIC, self._cut(self._at + 3, end)[:-1], quoted)]
        if text.startswith("$(", self._at):
            end = self._match(self._at + 1, "(", ")")
            return [WordPart(PartKind.COMMAND, self._cut(self._at + 2, end), quoted)]
        if text.startswith("${", self._at):
            end = self._match(self._at + 1, "{", "}")
            return [WordPart(PartKind.VARIABLE, self._cut(self._at + 2, end), quoted)]
        end = self._at + 1
        while end < len(text) and (text[end].isalnum() or text[end] == "_") and not text[self._at + 1].isdigit():
            end += 1
        end = max(end, self._at + 2) if text[self._at + 1 : self._at + 2] in [*"@*#?!$-0123456789"] else end
        if end == self._at + 1:
            self._advance()
            return "$"
        return [WordPart(PartKind.VARIABLE, self._cut(self._at + 1, end, end), quoted)]

    def _match(self, at: int, opening: str, closing: str) -> int:
        """The place of the letter that closes the one at `at`."""
        depth = 0
        while at < len(self._text):
            letter = self._text[at]
            if letter == "\\":
                at += 1
            elif letter in "\"'":
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
        found = self._text[start:end]
        self._advance((end + 1 if after is None else after) - self._at)
        return found

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _starts(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _advance(self, count: int = 1) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _skip_blank(self) -> bool:
        if self._peek() in (" ", "\t", "\r"):
            self._advance()
            return True
        if self._starts("\\\n"):
            self._advance(2)
            return True
        return False

    def _skip_to(self, letter: str) -> None:
        self._advance(self._find(letter, self._at) - self._at)

    def _skip_redirection(self) -> None:
        document = self._starts("<<") and not self._starts("<<<")
        while self._peek() and self._peek() in "<>&|-":
            self._advance()
        while self._skip_blank():
            pass
        if self._peek() == "(":  # process substitution
            self._advance(self._match(self._at, "(", ")") + 1 - self._at)
            return
        word = self.word(ends=WORD_ENDS)
        if document:
            self._documents.append("".join(part.text for part in word.parts))

    def _skip_documents(self) -> None:
        for end in self._documents:
            while self._at < len(self._text):
                start = self._at
                self._skip_to("\n")
                line = self._text[start : self._at]
                self._advance()
                if line.strip("\t\r") == end:
                    break
        self._documents = []


class _ScriptParser:
    """The tree of a script, by recursive descent with one token of look-ahead."""

    def __init__(self, text: str, line: int) -> None:
        self._lexer = _ScriptLexer(text, line)
        self._line = line
        self._ahead: list[Token | None] = []
        self._depth = 0

    def block(self, *ends: str) -> tuple[Block, str]:
        """The commands up to one of `ends`, and which one it was: "" at the end of the text."""
        found: Block = []
        while (token := self._peek()) is not None:
            text = token if isinstance(token, str) else token.bare() if isinstance(token, Word) else ""
            if text in ends:
                self._next()
                return found, text
            if isinstance(token, str) and token != "(":
                self._next()  # a separator, or an operator that does not belong here
            else:
                found.append(self._chain())
        return found, ""

    def _chain(self) -> Command:
        first = self._pipeline()
        rest: list[tuple[str, Command]] = []
        while self._peek() in ("&&", "||"):
            operator = self._next()
            assert isinstance(operator, str), "looked at just before"
            self._skip_lines()
            rest.append((operator, self._pipeline()))
        return CommandChain(first.line, first, rest) if rest else first

    def _pipeline(self) -> Command:
        if isinstance(token := self._peek(), Word) and token.bare() in ("!", "time"):
            self._next()
            inner = self._pipeline()
            return Negation(token.line, inner) if token.bare() == "!" else inner
        commands = [self._command()]
        while self._peek() == "|":
            self._next()
            self._skip_lines()
            commands.append(self._command())
        return Pipeline(commands[0].line, commands) if len(commands) > 1 else commands[0]

    def _command(self) -> Command:
        token = self._peek()
        if token is None or (isinstance(token, str) and token != "("):
            return SimpleCommand(self._line, [])
        self._depth += 1
        try:
            if self._depth > MAX_DEPTH:
                self._next()
                return SimpleCommand(self._line, [])
            return self._compound(token) or self._simple()
        finally:
            self._depth -= 1

    def _compound(self, token: Token) -> Command | None:
        if token == "(":
            self._next()
            text = self._lexer.double_parenthesis() if not self._ahead else None
            line = self._line
            return Grouped(line, self.block(")")[0], True) if text is None else DoubleParenthesis(line, text)
        keyword = token.bare() if isinstance(token, Word) else ""
        readers: dict[str, Callable[[int], Command]] = {
            "if": self._if,
            "case": self._case,
            "for": self._for,
            "select": self._for,
            "while": lambda line: self._while(line, until=False),
            "until": lambda line: self._while(line, until=True),
            "function": self._function,
        }
        if keyword == "[[":
            self._next()
            return DoubleBracket(self._line, self._lexer.double_bracket())
        if keyword == "{":
            self._next()
            return Grouped(self._line, self.block("}")[0], False)
        if keyword not in readers:
            return None
        self._next()
        return readers[keyword](self._line)

    def _simple(self) -> Command:
        words: list[Word | ArrayItems] = []
        while isinstance(token := self._peek(), Word | ArrayItems):
            self._next()
            words.append(token)
            if len(words) == 1 and self._peek() == "(" and isinstance(token, Word):
                self._next()
                if self._peek() == ")":
                    self._next()
                self._skip_lines()
                return FunctionDefinition(token.line, token.bare(), self._command())
        return SimpleCommand(words[0].line if words else self._line, words)

    def _if(self, line: int) -> IfStatement:
        branches: list[tuple[Block, Block]] = []
        end = "elif"
        while end == "elif":
            condition, _ = self.block("then")
            body, end = self.block("elif", "else", "fi")
            branches.append((condition, body))
        return IfStatement(line, branches, self.block("fi")[0] if end == "else" else [])

    def _case(self, line: int) -> Command:
        word = self._next()
        self._skip_lines()
        self._next()  # in
        branches: list[tuple[Sequence[Word], Block]] = []
        while (token := self._peek()) is not None:
            if isinstance(token, Word) and token.bare() == "esac":
                self._next()
                break
            patterns: list[Word] = []
            while (token := self._next()) not in (")", None):
                patterns += [token] if isinstance(token, Word) else []
            body, end = self.block(";;", ";;&", ";&", "esac")
            branches += [(patterns, body)] if patterns else []
            self._skip_lines()
            if end in ("esac", ""):
                break
        return CaseStatement(line, word if isinstance(word, Word) else Word(line), branches)

    def _for(self, line: int) -> ForLoop:
        name = self._next()
        items: list[Word] = []
        self._skip_lines()
        if isinstance(token := self._peek(), Word) and token.bare() == "in":
            self._next()
            while isinstance(token := self._peek(), Word):
                items.append(token)
                self._next()
        else:
            items.append(Word(line, [WordPart(PartKind.VARIABLE, "@", True)]))
        self.block("do")
        return ForLoop(line, name.bare() if isinstance(name, Word) else "", items, self.block("done")[0])

    def _while(self, line: int, until: bool) -> WhileLoop:
        condition, _ = self.block("do")
        return WhileLoop(line, until, condition, self.block("done")[0])

    def _function(self, line: int) -> FunctionDefinition:
        name = self._next()
        while self._peek() in ("(", ")", "\n"):
            self._next()
        return FunctionDefinition(line, name.bare() if isinstance(name, Word) else "", self._command())

    def _skip_lines(self) -> None:
        while self._peek() == "\n":
            self._next()

    def _peek(self) -> Token | None:
        if not self._ahead:
            self._ahead.append(self._lexer.token())
        return self._ahead[0]

    def _next(self) -> Token | None:
        token = self._peek()
        self._ahead.clear()
        self._line = token.line if isinstance(token, Word | ArrayItems) else self._line
        return token
