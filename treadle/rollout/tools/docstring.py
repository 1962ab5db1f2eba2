"""What a docstring says of a function and its parameters: Google style (`Args:`) and plain `:param name:`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from inspect import cleandoc

_SECTION = re.compile(
    r"(args|arguments|parameters|params|returns?|yields?|raises|examples?|notes?|keyword args|attributes):\s*$",
    re.IGNORECASE,
)
_ARGUMENT_SECTIONS = ("args", "arguments", "parameters", "params", "keyword args")
_GOOGLE = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_FIELD = re.compile(r":(\w+)(?:\s+([^:]*?))?:\s*(.*)")


@dataclass(frozen=True, slots=True)
class Docs:
    """The description of a function, and those of its parameters by name."""

    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> Docs:
    """The parts of a docstring; lines of one part are joined."""
    reader = _Reader()
    for line in cleandoc(text or "").splitlines():
        reader.take(line)
    described = {name: _joined(lines) for name, lines in reader.parameters.items()}
    return Docs(_joined(reader.description), {name: words for name, words in described.items() if words})


class _Reader:
    """Walks over the lines, and knows which part the next one belongs to."""

    def __init__(self) -> None:
        self.description: list[str] = []
        self.parameters: dict[str, list[str]] = {}
        self._part: list[str] = self.description
        self._in_arguments = False
        self._indent: int | None = None

    def take(self, line: str) -> None:
        indent = len(line) - len(line.lstrip())
        if indent == 0 and (section := _SECTION.match(line)):
            self._in_arguments = section[1].lower() in _ARGUMENT_SECTIONS
            self._part, self._indent = [], None
        elif indent == 0 and (found := _FIELD.match(line)):
            self._start_field(found[1], found[2] or "", found[3])
        elif self._in_arguments and line.strip():
            self._take_argument(line.strip(), indent)
        else:
            self._part.append(line)

    def _start_field(self, kind: str, subject: str, words: str) -> None:
        """A `:param int name: words` line, or another field, which describes no parameter."""
        self._in_arguments = False
        self._part = [words]
        if kind in ("param", "parameter", "arg", "argument") and subject:
            self.parameters[subject.split()[-1]] = self._part

    def _take_argument(self, words: str, indent: int) -> None:
        """A line of an `Args:` section: a new parameter, or more about the last one where it is indented further."""
        self._indent = indent if self._indent is None else self._indent
        if indent <= self._indent and (found := _GOOGLE.match(words)):
            self._part = [found[2]]
            self.parameters[found[1]] = self._part
        else:
            self._part.append(words)


def _joined(lines: Iterable[str]) -> str:
    return " ".join(" ".join(lines).split())
