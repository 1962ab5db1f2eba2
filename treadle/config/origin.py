"""Where a config value came from, and what it replaced.

Owns the words for provenance. Knows nothing about how values are read or checked.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from treadle.config.value import one_line, shorten


class Source(StrEnum):
    """The kinds of place a value can come from."""

    DEFAULT = "default"
    FILE = "file"
    COMMAND_LINE = "command line"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class Origin:
    """One place a value came from, and the detours (legacy key, reference) it took from there."""

    source: Source
    place: str
    via: tuple[str, ...] = ()

    @classmethod
    def default(cls, section: str, name: str) -> "Origin":
        return cls(Source.DEFAULT, f"{section}.{name}")

    @classmethod
    def code(cls, section: str, name: str) -> "Origin":
        return cls(Source.CODE, f"{section}.{name}")

    @classmethod
    def file(cls, path: str, line: int) -> "Origin":
        return cls(Source.FILE, f"{path}:{line}")

    @classmethod
    def command_line(cls, text: str) -> "Origin":
        return cls(Source.COMMAND_LINE, text)

    def through(self, detour: str) -> "Origin":
        """This origin, reached by one more detour."""
        return Origin(self.source, self.place, (*self.via, detour))

    def __str__(self) -> str:
        place = one_line(self.place) if self.source is Source.FILE else f"{self.source} ({shorten(self.place)})"
        return ", ".join((place, *map(shorten, self.via)))


class Unset(Enum):
    """The value of a leaf that takes back what earlier layers said."""

    UNSET = "unset"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value as somebody wrote it: the text is kept so that `007` can still become a string."""

    value: Any
    origin: Origin
    text: str | tuple[str | None, ...] | None = None
    """What a plain scalar looked like; of a list, what each item looked like; None where there is nothing to choose."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The origin of the value in force, and the leaves it overrode, newest first."""

    origin: Origin
    overrode: tuple[Leaf, ...] = ()
