"""Interpreter of launch scripts: what the words of a command come to, without running any program.

Owns variables, arrays, defaults, arithmetic, conditions, loops and functions. Reads nothing from the environment:
values come from the script itself, or from the caller (`given`), and those of the caller win. A variable that has no
value is empty in a condition, as in bash, and unknown in a value: it is never guessed. A condition that cannot be
decided is followed both ways, and what the two ways do not agree on is unknown. `$HOME` is written `~` and `$PWD` `.`,
which mean the same.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial

from treadle.migrate.shell import grammar
from treadle.migrate.shell.arithmetic import calculate
from treadle.migrate.shell.grammar import ArrayItems, Block, Command, PartKind, Word, WordPart

HOME = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the home directory until it is known where in a value it comes."""

MAX_ROUNDS = 100
"""Rounds of a loop, and calls of functions in functions, that are followed."""

Truth = bool | None
"""How a command ended, or whether a condition holds; None where that cannot be known."""

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?!$-]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARATIONS = ("export", "local", "readonly", "declare", "typeset")
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}
_SUCCEED = frozenset({":", "true", "false", "set", "shopt", "trap", "ulimit", "cd", "mkdir"})
_NPU = re.compile(r"\bimport torch_npu\b")


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


class _Exit(Exception):
    """`exit` was reached."""


class _Return(Exception):
    """`return` was reached, or a loop was left."""


class Interpreter:
    """Follows one script. `launched` gets the words of each command that is no builtin, and says if it was sought."""

    def __init__(self, given: Mapping[str, str], launched: Callable[[Sequence[ExpandedWord], int], bool]) -> None:
        self._given = given
        self._launched = launched
        self._state = ScriptState({name: [ExpandedWord(value, 0)] for name, value in given.items()})
        self._functions: dict[str, Command] = {}
        self._calls = 0
        self._output: list[ExpandedWord] | None = None
        """What `echo` writes, inside a command substitution."""
        self._in_condition = False
        self._done = False
        """Whether the command that is looked for has been found."""
        self.notes: dict[str, None] = {}
        self.read: set[str] = set()
        """Names of variables that the script looks at or sets."""

    def run(self, block: Block) -> None:
        """Follow a whole script."""
        for command in block:
            try:
                self._command(command)
            except _Exit:
                if self._done:
                    return
                self._note(f"line {command.line}: bash would end here; what follows is read all the same")
            except _Return:
                pass

    def _note(self, text: str) -> None:
        self.notes[text] = None

    # Commands

    def _block(self, block: Block) -> Truth:
        status: Truth = True
        for command in block:
            status = self._command(command)
        return status

    def _command(self, command: Command) -> Truth:
        match command:
            case grammar.SimpleCommand():
                return self._simple(command)
            case grammar.CommandChain():
                return self._chain(command)
            case grammar.Negation():
                status = self._command(command.command)
                return None if status is None else not status
            case grammar.Pipeline():
                return [self._command(item) for item in command.commands][-1]
            case grammar.DoubleBracket():
                with self._condition():
                    return _test([item for word in command.words for item in self._whole(word)], globs=True)
            case grammar.DoubleParenthesis():
                with self._condition():
                    found = self._arithmetic(command.text, command.line)
                return None if found.unknown else found.text != "0"
            case grammar.Grouped():
                return self._grouped(command)
            case grammar.FunctionDefinition():
                self._functions[command.name] = command.body
                return True
        return self._branching(command)

    def _branching(self, command: Command) -> Truth:
        match command:
            case grammar.IfStatement():
                self._if(list(command.branches), command)
            case grammar.CaseStatement():
                self._case(command)
            case grammar.ForLoop():
                self._for(command)
            case grammar.WhileLoop():
                with self._condition():
                    goes_on = self._block(command.condition)
                if goes_on is not command.until:
                    self._either([lambda: None, lambda: self._body(command.body)], command.line)
        return None

    def _grouped(self, command: grammar.Grouped) -> Truth:
        before = self._state
        if command.subshell:
            self._state = before.copy()
        try:
            return self._block(command.body)
        finally:
            self._state = before if command.subshell else self._state

    def _chain(self, command: grammar.CommandChain) -> Truth:
        status = self._command(command.first)
        for operator, item in command.rest:
            wanted = operator == "&&"
            if status is None:
                self._either([lambda: None, partial(self._command, item)], item.line)
            elif status is wanted:
                status = self._command(item)
        return status

    def _if(self, branches: list[tuple[Block, Block]], command: grammar.IfStatement) -> None:
        if not branches:
            self._attempt(command.otherwise, command.line)
            return
        condition, body = branches[0]
        with self._condition():
            holds = self._block(condition)
        if holds is None:
            later = [lambda: self._attempt(body, command.line), lambda: self._if(branches[1:], command)]
            self._either(later, condition[0].line if condition else command.line)
        elif not holds or not self._attempt(body, command.line):
            self._if(branches[1:], command)

    def _case(self, command: grammar.CaseStatement) -> None:
        with self._condition():
            subject = self._joined(command.word)
        if subject.unknown:
            ways = [partial(self._body, body) for _, body in command.branches]
            anything = any(word.bare() == "*" for words, _ in command.branches for word in words)
            self._either([*ways, *([] if anything else [lambda: None])], command.line)
            return
        for patterns, body in command.branches:
            if any(fnmatchcase(subject.text, self._joined(word).text) for word in patterns):
                self._attempt(body, command.line)
                return

    def _for(self, command: grammar.ForLoop) -> None:
        items = [item for word in command.items for item in self.expand(word)]
        if any(item.unknown or item.only_if for item in items) or len(items) > MAX_ROUNDS:
            why = f"${command.name} takes values that are not known (line {command.line})"
            rounds = [ExpandedWord(f"${command.name}", command.line, (why,))]
            self._either([lambda: None, lambda: self._rounds(command, rounds)], command.line)
        else:
            self._rounds(command, items)

    def _rounds(self, command: grammar.ForLoop, items: Sequence[ExpandedWord]) -> None:
        for item in items:
            self._set(command.name, [item])
            self._body(command.body)

    def _body(self, block: Block) -> None:
        with suppress(_Return):
            self._block(block)

    def _attempt(self, block: Block, line: int) -> bool:
        """Follow a branch that bash would take; False, and nothing set, where it ends the script."""
        before = self._state.copy()
        try:
            self._block(block)
        except _Exit:
            if self._done:
                raise
            self._state = before
            self._note(f"line {line}: the script ends itself under this condition; it is read as if it went on")
            return False
        return True

    def _either(self, ways: Sequence[Callable[[], object]], line: int) -> None:
        """Follow each way from the state as it is, and keep what they agree on. A way that ends the script is none."""
        start, outcomes = self._state, []
        for way in ways:
            self._state = start.copy()
            try:
                way()
            except (_Exit, _Return):
                continue
            outcomes.append(self._state)
        if self._output is not None and ways:
            self._output.append(ExpandedWord("", line, ("a condition in it is not known",)))
        self._state = _merged(outcomes, line) if outcomes else start

    def _simple(self, command: grammar.SimpleCommand) -> Truth:
        words = list(command.words)
        while words and self._assign(words[0]):
            words.pop(0)
        if not words:
            return True
        name = words[0].literal() if isinstance(words[0], Word) else None
        if name in _DECLARATIONS:
            for item in words[1:]:
                self._assign(item)
            return True
        if name in ("[", "test"):
            with self._condition():
                inside = [item for word in words[1:] if isinstance(word, Word) for item in self._whole(word)]
            return _test(inside[:-1] if name == "[" else inside, globs=False)
        found = [item for word in words if isinstance(word, Word) for item in self.expand(word)]
        return self._builtin(found, command.line) if found else True

    def _builtin(self, words: Sequence[ExpandedWord], line: int) -> Truth:
        name, rest = words[0].text, words[1:]
        if name in self._functions and not words[0].unknown:
            return self._call(name, rest)
        if name == "exit":
            raise _Exit
        if name in ("return", "break", "continue"):
            raise _Return
        if name == "cd":
            self._set("PWD", [ExpandedWord("$PWD", line, (f"$PWD is not known after line {line} changes it",))])
        if name in _SUCCEED:
            return name != "false"
        if name in ("echo", "printf", "shift", "unset"):
            self._change(name, rest, line)
            return True
        return self._program(words, line)

    def _change(self, name: str, rest: Sequence[ExpandedWord], line: int) -> None:
        if name == "shift":
            self._state.arguments = self._state.arguments[1:]
        elif name == "unset":
            for item in rest:
                self._state.values.pop(item.text, None)
        elif self._output is not None:
            self._output.append(_join([item for item in rest if item.text != "-n"], line, " "))

    def _program(self, words: Sequence[ExpandedWord], line: int) -> Truth:
        """A command that bash would start: what it writes, and how it ends, is not known."""
        if words[0].text in ("source", "."):
            shown = " ".join(item.text for item in words)
            self._note(f"line {line}: `{shown}` is not read: variables that it sets have no value here")
            return None
        if any(_NPU.search(item.text) for item in words):
            self._note(f"line {line}: torch_npu is taken for missing: networks train on CUDA GPUs or on the CPU")
            return False
        if self._output is not None:
            self._output.append(ExpandedWord("", line, ("it would have to be run",)))
        self._done = self._launched(words, line) or self._done
        return None

    def _call(self, name: str, arguments: Sequence[ExpandedWord]) -> Truth:
        before, self._state.arguments = self._state.arguments, list(arguments)
        self._calls += 1
        try:
            return self._command(self._functions[name]) if self._calls <= MAX_ROUNDS else None
        except _Return:
            return None
        finally:
            self._calls -= 1
            self._state.arguments = before

    # Variables

    def _assign(self, word: Word | ArrayItems) -> bool:
        """Take an assignment; False if the word is none."""
        if isinstance(word, ArrayItems):
            before = self._state.values.get(word.name, []) if word.append else []
            self._set(word.name, [*before, *(item for part in word.items for item in self.expand(part))], array=True)
            return True
        first = word.parts[0]
        found = _ASSIGNMENT.match(first.text) if first.kind is PartKind.TEXT and not first.quoted else None
        if found is None:
            return False
        rest = Word(word.line, [WordPart(PartKind.TEXT, first.text[found.end() :]), *word.parts[1:]])
        value = self._joined(rest)
        if found.group(2) and (earlier := self._state.values.get(found.group(1))):
            value = _join([earlier[0], value], value.line)
        self._set(found.group(1), [value])
        return True

    def _set(self, name: str, value: list[ExpandedWord], array: bool = False) -> None:
        self.read.add(name)
        if name in self._given:
            return
        self._state.values[name] = value
        (self._state.arrays.add if array else self._state.arrays.discard)(name)

    @contextmanager
    def _condition(self) -> Iterator[None]:
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
        joined = self._joined(word)
        if len(word.parts) == 1 and word.parts[0].kind is PartKind.VARIABLE and not word.parts[0].quoted:
            return [replace(joined, text=text) for text in joined.text.split()]
        return [joined]

    def _whole(self, word: Word) -> list[ExpandedWord]:
        """The word as a condition sees it: never split, and there though it may be empty."""
        return self._array(word) or [self._joined(word)]

    def _array(self, word: Word) -> list[ExpandedWord] | None:
        if len(word.parts) != 1 or word.parts[0].kind is not PartKind.VARIABLE:
            return None
        name = word.parts[0].text
        if name in ("@", "*"):
            if not self._calls:
                self._note(f"line {word.line}: $@ stands for words the script does not have")
            return list(self._state.arguments)
        found = re.fullmatch(r"(\w+)\[[@*]\](?::?-(.*))?", name)
        if found is None:
            return None
        self.read.add(found.group(1))
        items = self._state.values.get(found.group(1), [])  # arrays cannot come from the environment
        return items or ([self._joined(grammar.parse_word(found.group(2), word.line))] if found.group(2) else [])

    def _known(self, name: str, line: int) -> list[ExpandedWord]:
        self.read.add(name)
        found = self._state.values.get(name)
        if found is None and name.isdigit() and 0 < int(name) <= len(self._state.arguments):
            found = [self._state.arguments[int(name) - 1]]
        if found is not None:
            return found
        if name == "HOME":
            return [ExpandedWord(HOME, line)]
        if name == "PWD":
            return [ExpandedWord(".", line)]  # where the script is started, which is where our paths start
        if name == "#":
            return [ExpandedWord(str(len(self._state.arguments)), line)]
        if self._in_condition and name not in ("?", "$", "!", "-"):
            self._note(f"line {line}: ${name} is not set in the script, and empty in its conditions; --set gives it")
            return [ExpandedWord("", line)]
        return [ExpandedWord(f"${name}", line, (f"${name} has no value in the script",))]

    def _joined(self, word: Word) -> ExpandedWord:
        return _join([self._part(part, word.line) for part in word.parts], word.line)

    def _part(self, part: WordPart, line: int) -> ExpandedWord:
        if part.kind is PartKind.TEXT:
            return ExpandedWord(part.text, line)
        if part.kind is PartKind.COMMAND:
            return self._substitution(part.text, line)
        if part.kind is PartKind.ARITHMETIC:
            return self._arithmetic(part.text, line)
        return self._variable(part.text, line)

    def _substitution(self, text: str, line: int) -> ExpandedWord:
        """What `$(text)` writes, where that follows from the script alone."""
        if text.strip() == "pwd":
            return _join(self._known("PWD", line), line)
        unknown = ExpandedWord(f"$({text})", line, (f"$({text}) would have to be run",))
        if self._calls >= MAX_ROUNDS:
            return unknown
        before, state, self._output = self._output, self._state, []
        self._state = state.copy()
        self._calls += 1
        try:
            self._body(grammar.parse(text, line))
        except _Exit:
            return unknown
        finally:
            written, self._output, self._state = self._output, before, state
            self._calls -= 1
        found = _join(written, line, "\n")
        return unknown if found.unknown or not written else found

    def _variable(self, text: str, line: int) -> ExpandedWord:
        found = _NAME.match(text)
        if found is None:
            return ExpandedWord(f"${{{text}}}", line, (f"${{{text}}} is an expansion that is not read",))
        name, rest = found.group(), text[found.end() :]
        if rest in ("", "[@]", "[*]"):
            return _join(self._known(name, line), line, " ")
        if rest in (",,", "^^"):
            value = _join(self._known(name, line), line, " ")
            return replace(value, text=value.text.lower() if rest == ",," else value.text.upper())
        if rest[:2] in (":-", ":=", ":+", ":?") or rest[:1] in ("-", "=", "+", "?"):
            operator, word = (rest[:2], rest[2:]) if rest[0] == ":" else (rest[:1], rest[1:])
            return self._with_default(name, operator, word, line)
        return ExpandedWord(f"${{{text}}}", line, (f"${{{text}}} is an expansion that is not read",))

    def _with_default(self, name: str, operator: str, word: str, line: int) -> ExpandedWord:
        """`${NAME:-word}` and its kin; with a colon, an empty value counts as none."""
        self.read.add(name)
        positional = name.isdigit() and 0 < int(name) <= len(self._state.arguments)
        is_set = name in self._state.values or name in ("HOME", "PWD") or positional
        value = _join(self._known(name, line), line, " ") if is_set else ExpandedWord("", line)
        if value.unknown:
            return value
        there = is_set and (bool(value.text) or not operator.startswith(":"))
        kind = operator[-1]
        if kind == "+":
            return self._joined(grammar.parse_word(word, line)) if there else ExpandedWord("", line)
        if there:
            return value
        if kind == "?":  # bash ends here; whatever the script does with it later is to be decided
            value = ExpandedWord(f"${name}", line, (f"${name} has no value in the script",))
            self._set(name, [value])
            return value
        value = self._joined(grammar.parse_word(word, line))
        if not is_set and not value.unknown:
            shown = value.text.replace(HOME, "~")
            note = f"line {line}: ${name} is not set in the script; its default {shown!r} is taken"
            value = replace(value, notes=(*value.notes, note))
        if kind == "=":
            self._set(name, [value])
        return value

    def _arithmetic(self, text: str, line: int) -> ExpandedWord:
        used: list[ExpandedWord] = []

        def value_of(found: re.Match[str]) -> str:
            value = self._variable(found.group(1) or found.group(2), line)
            used.append(value)
            return f"({value.text or 0})"

        expression = re.sub(r"\$\{([^{}]*)\}|\$?\b([A-Za-z_]\w*)\b", value_of, text)
        inside = _join(used, line)
        if inside.unknown:
            return replace(inside, text=f"$(({text}))")
        result = calculate(expression)
        if result is None:
            return ExpandedWord(f"$(({text}))", line, (f"$(({text})) cannot be worked out",))
        return replace(inside, text=str(result))


def _merged(outcomes: Sequence[ScriptState], line: int) -> ScriptState:
    """What all outcomes agree on. Of arrays that differ, the items that only some of them have say so."""
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    merged = ScriptState(arguments=first.arguments)
    for name in dict.fromkeys(name for state in outcomes for name in state.values):
        found = [state.values.get(name) for state in outcomes]
        merged.arrays |= {name} if any(name in state.arrays for state in outcomes) else set()
        if all(value is not None and _texts(value) == _texts(found[0] or []) for value in found):
            merged.values[name] = found[0] or []
        elif name in merged.arrays:
            merged.values[name] = _items([value or [] for value in found], line)
        else:
            why = f"${name} depends on a condition that is not known (line {line}); --set {name}=… gives it"
            merged.values[name] = [ExpandedWord(f"${name}", line, (why,))]
    return merged


def _items(arrays: Sequence[Sequence[ExpandedWord]], line: int) -> list[ExpandedWord]:
    shared = 0
    while all(len(array) > shared and array[shared].text == arrays[0][shared].text for array in arrays):
        shared += 1
    why = f"only under a condition that is not known (line {line})"
    rest = {item.text: replace(item, only_if=item.only_if or why) for array in arrays for item in array[shared:]}
    return [*arrays[0][:shared], *rest.values()]


def _texts(items: Sequence[ExpandedWord]) -> list[tuple[str, tuple[str, ...], str]]:
    return [(item.text, item.unknown, item.only_if) for item in items]


def _join(parts: Sequence[ExpandedWord], line: int, between: str = "") -> ExpandedWord:
    unknown = dict.fromkeys(item for part in parts for item in part.unknown)
    notes = dict.fromkeys(item for part in parts for item in part.notes)
    return ExpandedWord(between.join(part.text for part in parts), line, tuple(unknown), tuple(notes))


# Conditions: `[ … ]` and `[[ … ]]`


def _test(words: Sequence[ExpandedWord], globs: bool) -> Truth:
    """Whether the words between the brackets hold; None where that takes a look at the machine."""
    rest = list(words)
    found = _any_of(rest, globs)
    return None if rest else found


def _any_of(rest: list[ExpandedWord], globs: bool) -> Truth:
    found = _all_of(rest, globs)
    while rest and rest[0].text in ("||", "-o"):
        rest.pop(0)
        other = _all_of(rest, globs)
        found = True if found or other else None if found is None or other is None else False
    return found


def _all_of(rest: list[ExpandedWord], globs: bool) -> Truth:
    found = _primary(rest, globs)
    while rest and rest[0].text in ("&&", "-a"):
        rest.pop(0)
        other = _primary(rest, globs)
        found = False if found is False or other is False else None if found is None or other is None else True
    return found


def _primary(rest: list[ExpandedWord], globs: bool) -> Truth:
    if not rest:
        return False
    first = rest.pop(0)
    if first.text == "!" and rest:
        inner = _primary(rest, globs)
        return None if inner is None else not inner
    if first.text == "(":
        inner = _any_of(rest, globs)
        if rest:
            rest.pop(0)
        return inner
    if rest and (rest[0].text in ("=", "==", "!=", "=~", "<", ">") or rest[0].text in _COMPARISONS):
        operator = rest.pop(0).text
        return _compare(first, operator, rest.pop(0) if rest else ExpandedWord("", first.line), globs)
    if re.fullmatch(r"-[a-zA-Z]", first.text) and rest and rest[0].text not in ("&&", "||", ")"):
        value = rest.pop(0)
        if value.unknown or first.text not in ("-z", "-n"):
            return False if not value.unknown and not value.text else None
        return (value.text == "") is (first.text == "-z")
    return None if first.unknown else first.text != ""


def _compare(left: ExpandedWord, operator: str, right: ExpandedWord, globs: bool) -> Truth:
    if left.unknown or right.unknown or operator in ("<", ">"):
        return None
    if operator in _COMPARISONS:
        try:
            return _COMPARISONS[operator](int(left.text), int(right.text))
        except ValueError:
            return False
    if operator == "=~":
        try:
            return re.search(right.text, left.text) is not None
        except re.error:
            return None
    same = fnmatchcase(left.text, right.text) if globs else left.text == right.text
    return same is (operator != "!=")
