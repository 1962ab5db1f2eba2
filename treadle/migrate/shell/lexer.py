"""Lexer of bash launch scripts: text to words, arrays and operators.

Owns quoting, comments, continuation lines, arrays, redirections and here-documents. Knows no variable and runs nothing.
Any text is read: a quote or bracket that is not closed ends with the script.
"""

import re

from treadle.migrate.shell.syntax_tree import ArrayItems, PartKind, Token, Word, WordPart

OPERATORS = (";;&", ";;", ";&", "&&", "||", "\n", ";", "&", "|", "(", ")")
WORD_ENDS = " \t\n;&|()<>"

_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=")


def parse_word(text: str, line: int) -> Word:
    """One word that stands inside another, such as the default of a variable."""
    return ScriptLexer(text, line).word(ends="", quoted=False)


class ScriptLexer:
    """Words, arrays and operators of a text, one after the other."""

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
        inner = ScriptLexer(self._text[self._at + 1 : end], self._line).word(ends="", quoted=True)
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
