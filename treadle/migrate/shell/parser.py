"""Parser of bash launch scripts: words and operators to a syntax tree.

Owns nesting: groups, conditions, loops and functions. Runs nothing. Any text is read: a block that is not closed ends
with the script, and a token that does not belong where it stands is skipped.
"""

from collections.abc import Callable, Sequence

from treadle.migrate.shell.lexer import ScriptLexer
from treadle.migrate.shell.syntax_tree import (
    ArrayItems,
    Block,
    CaseStatement,
    Command,
    CommandChain,
    DoubleBracket,
    DoubleParenthesis,
    ForLoop,
    FunctionDefinition,
    Grouped,
    IfStatement,
    Negation,
    PartKind,
    Pipeline,
    SimpleCommand,
    Token,
    WhileLoop,
    Word,
    WordPart,
)

MAX_DEPTH = 40
"""Nesting beyond this is skipped: no script written by hand has it."""


def parse(text: str, line: int = 1) -> Block:
    """The commands of a script, in order."""
    return _ScriptParser(text, line).block()[0]


class _ScriptParser:
    """The tree of a script, by recursive descent with one token of look-ahead."""

    def __init__(self, text: str, line: int) -> None:
        self._lexer = ScriptLexer(text, line)
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
