"""Interpreter of launch scripts: the words of each command a script would start, without running any program.

Owns commands, chains, branches, loops and functions; `expansion` owns the values. A condition that cannot be decided is
followed both ways, and values on which the two ways differ are unknown.
"""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial

from treadle.migrate.shell import syntax_tree
from treadle.migrate.shell.conditions import Truth, holds
from treadle.migrate.shell.expansion import ExpandedWord, Expansion, join_words, merge_states
from treadle.migrate.shell.parser import parse
from treadle.migrate.shell.syntax_tree import Block, Command, Word

MAX_ROUNDS = 100
"""Rounds of a loop, and calls of functions in functions, that are followed."""

_DECLARATIONS = ("export", "local", "readonly", "declare", "typeset")
_SUCCEED = frozenset({":", "true", "false", "set", "shopt", "trap", "ulimit", "cd", "mkdir"})
_NPU = re.compile(r"\bimport torch_npu\b")


class _Exit(Exception):
    """`exit` was reached."""


class _Return(Exception):
    """`return` was reached, or a loop was left."""


class Interpreter:
    """Follows one script. `launched` gets the words of each command that is no builtin, and says if it was sought."""

    def __init__(self, given: Mapping[str, str], launched: Callable[[Sequence[ExpandedWord], int], bool]) -> None:
        self._launched = launched
        self._expansion = Expansion(given, self._substitute)
        self._functions: dict[str, Command] = {}
        self._output: list[ExpandedWord] | None = None
        """What `echo` writes, inside a command substitution."""
        self._done = False
        """Whether the command that is looked for has been found."""

    @property
    def notes(self) -> Sequence[str]:
        """Remarks for the report, in order."""
        return list(self._expansion.notes)

    @property
    def read(self) -> Set[str]:
        """Names of variables that the script reads or sets."""
        return self._expansion.read

    def run(self, block: Block) -> None:
        """Follow a whole script."""
        for command in block:
            try:
                self._command(command)
            except _Exit:
                if self._done:
                    return
                self._expansion.note(f"line {command.line}: bash would end here; what follows is read all the same")
            except _Return:
                pass

    # Commands

    def _block(self, block: Block) -> Truth:
        status: Truth = True
        for command in block:
            status = self._command(command)
        return status

    def _command(self, command: Command) -> Truth:
        match command:
            case syntax_tree.SimpleCommand():
                return self._simple(command)
            case syntax_tree.CommandChain():
                return self._chain(command)
            case syntax_tree.Negation():
                status = self._command(command.command)
                return None if status is None else not status
            case syntax_tree.Pipeline():
                return [self._command(item) for item in command.commands][-1]
            case syntax_tree.DoubleBracket():
                with self._expansion.condition():
                    return holds([item for word in command.words for item in self._expansion.whole(word)], globs=True)
            case syntax_tree.DoubleParenthesis():
                with self._expansion.condition():
                    found = self._expansion.arithmetic(command.text, command.line)
                return None if found.unknown else found.text != "0"
            case syntax_tree.Grouped():
                return self._grouped(command)
            case syntax_tree.FunctionDefinition():
                self._functions[command.name] = command.body
                return True
        return self._branching(command)

    def _branching(self, command: Command) -> Truth:
        match command:
            case syntax_tree.IfStatement():
                self._if(list(command.branches), command)
            case syntax_tree.CaseStatement():
                self._case(command)
            case syntax_tree.ForLoop():
                self._for(command)
            case syntax_tree.WhileLoop():
                with self._expansion.condition():
                    goes_on = self._block(command.condition)
                if goes_on is not command.until:
                    self._either([lambda: None, lambda: self._body(command.body)], command.line)
        return None

    def _grouped(self, command: syntax_tree.Grouped) -> Truth:
        before = self._expansion.state
        if command.subshell:
            self._expansion.state = before.copy()
        try:
            return self._block(command.body)
        finally:
            self._expansion.state = before if command.subshell else self._expansion.state

    def _chain(self, command: syntax_tree.CommandChain) -> Truth:
        status = self._command(command.first)
        for operator, item in command.rest:
            wanted = operator == "&&"
            if status is None:
                self._either([lambda: None, partial(self._command, item)], item.line)
            elif status is wanted:
                status = self._command(item)
        return status

    def _if(self, branches: list[tuple[Block, Block]], command: syntax_tree.IfStatement) -> None:
        if not branches:
            self._attempt(command.otherwise, command.line)
            return
        condition, body = branches[0]
        with self._expansion.condition():
            holds = self._block(condition)
        if holds is None:
            later = [lambda: self._attempt(body, command.line), lambda: self._if(branches[1:], command)]
            self._either(later, condition[0].line if condition else command.line)
        elif not holds or not self._attempt(body, command.line):
            self._if(branches[1:], command)

    def _case(self, command: syntax_tree.CaseStatement) -> None:
        with self._expansion.condition():
            subject = self._expansion.joined(command.word)
        if subject.unknown:
            ways = [partial(self._body, body) for _, body in command.branches]
            anything = any(word.bare() == "*" for words, _ in command.branches for word in words)
            self._either([*ways, *([] if anything else [lambda: None])], command.line)
            return
        for patterns, body in command.branches:
            if any(fnmatchcase(subject.text, self._expansion.joined(word).text) for word in patterns):
                self._attempt(body, command.line)
                return

    def _for(self, command: syntax_tree.ForLoop) -> None:
        items = [item for word in command.items for item in self._expansion.expand(word)]
        if any(item.unknown or item.only_if for item in items) or len(items) > MAX_ROUNDS:
            why = f"${command.name} takes values that are not known (line {command.line})"
            rounds = [ExpandedWord(f"${command.name}", command.line, (why,))]
            self._either([lambda: None, lambda: self._rounds(command, rounds)], command.line)
        else:
            self._rounds(command, items)

    def _rounds(self, command: syntax_tree.ForLoop, items: Sequence[ExpandedWord]) -> None:
        for item in items:
            self._expansion.set(command.name, [item])
            self._body(command.body)

    def _body(self, block: Block) -> None:
        with suppress(_Return):
            self._block(block)

    def _attempt(self, block: Block, line: int) -> bool:
        """Follow a branch that bash would take; False, and nothing set, where it ends the script."""
        before = self._expansion.state.copy()
        try:
            self._block(block)
        except _Exit:
            if self._done:
                raise
            self._expansion.state = before
            self._expansion.note(
                f"line {line}: the script ends itself under this condition; it is read as if it went on"
            )
            return False
        return True

    def _either(self, ways: Sequence[Callable[[], object]], line: int) -> None:
        """Follow each way from the state as it is, and keep what they agree on. A way that ends the script is none."""
        start, outcomes = self._expansion.state, []
        for way in ways:
            self._expansion.state = start.copy()
            try:
                way()
            except (_Exit, _Return):
                continue
            outcomes.append(self._expansion.state)
        if self._output is not None and ways:
            self._output.append(ExpandedWord("", line, ("a condition in it is not known",)))
        self._expansion.state = merge_states(outcomes, line) if outcomes else start

    def _simple(self, command: syntax_tree.SimpleCommand) -> Truth:
        words = list(command.words)
        while words and self._expansion.assign(words[0]):
            words.pop(0)
        if not words:
            return True
        name = words[0].literal() if isinstance(words[0], Word) else None
        if name in _DECLARATIONS:
            for item in words[1:]:
                self._expansion.assign(item)
            return True
        if name in ("[", "test"):
            with self._expansion.condition():
                inside = [item for word in words[1:] if isinstance(word, Word) for item in self._expansion.whole(word)]
            return holds(inside[:-1] if name == "[" else inside, globs=False)
        found = [item for word in words if isinstance(word, Word) for item in self._expansion.expand(word)]
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
            self._expansion.set(
                "PWD", [ExpandedWord("$PWD", line, (f"$PWD is not known after line {line} changes it",))]
            )
        if name in _SUCCEED:
            return name != "false"
        if name in ("echo", "printf", "shift", "unset"):
            self._change(name, rest, line)
            return True
        return self._program(words, line)

    def _change(self, name: str, rest: Sequence[ExpandedWord], line: int) -> None:
        if name == "shift":
            self._expansion.state.arguments = self._expansion.state.arguments[1:]
        elif name == "unset":
            for item in rest:
                self._expansion.state.values.pop(item.text, None)
        elif self._output is not None:
            self._output.append(join_words([item for item in rest if item.text != "-n"], line, " "))

    def _program(self, words: Sequence[ExpandedWord], line: int) -> Truth:
        """A command that bash would start: what it writes, and how it ends, is not known."""
        if words[0].text in ("source", "."):
            shown = " ".join(item.text for item in words)
            self._expansion.note(f"line {line}: `{shown}` is not read: variables that it sets have no value here")
            return None
        if any(_NPU.search(item.text) for item in words):
            self._expansion.note(
                f"line {line}: torch_npu is taken for missing: networks train on CUDA GPUs or on the CPU"
            )
            return False
        if self._output is not None:
            self._output.append(ExpandedWord("", line, ("it would have to be run",)))
        self._done = self._launched(words, line) or self._done
        return None

    def _call(self, name: str, arguments: Sequence[ExpandedWord]) -> Truth:
        before, self._expansion.state.arguments = self._expansion.state.arguments, list(arguments)
        self._expansion.depth += 1
        try:
            return self._command(self._functions[name]) if self._expansion.depth <= MAX_ROUNDS else None
        except _Return:
            return None
        finally:
            self._expansion.depth -= 1
            self._expansion.state.arguments = before

    def _substitute(self, text: str, line: int) -> ExpandedWord:
        """What `$(text)` writes, where that follows from the script alone."""
        if text.strip() == "pwd":
            return join_words(self._expansion.value_of("PWD", line), line)
        unknown = ExpandedWord(f"$({text})", line, (f"$({text}) would have to be run",))
        if self._expansion.depth >= MAX_ROUNDS:
            return unknown
        before, state, self._output = self._output, self._expansion.state, []
        self._expansion.state = state.copy()
        self._expansion.depth += 1
        try:
            self._body(parse(text, line))
        except _Exit:
            return unknown
        finally:
            written, self._output, self._expansion.state = self._output, before, state
            self._expansion.depth -= 1
        found = join_words(written, line, "\n")
        return unknown if found.unknown or not written else found
