"""Preflight report: facts, warnings, mistakes in the config, and what this machine lacks.

Owns the record, its text and its JSON form. Checks nothing itself.
Invariant: what is wrong with a config and what is missing on a machine are never mixed.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from treadle.data.tasks import NOT_READ, RunTasks
from treadle.errors import ConfigError, Mistake

SHOWN_NAMES = 3
"""Names of missing things in the closing sentence."""


@dataclass(slots=True)
class PreflightReport:
    """Filled as checks go on, one after the other."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    """What was looked at and what it came to, in order."""
    warnings: list[str] = field(default_factory=list)
    """What may be meant, and is worth a look."""
    unchecked: list[tuple[str, str]] = field(default_factory=list)
    """What could not be looked at, and why."""
    mistakes: list[Mistake] = field(default_factory=list)
    """What keeps the run from working. None: it is fine as far as can be known."""
    first_prompt: str = ""
    """The first task's prompt as the model reads it."""
    first_prompt_tokens: int = 0
    tasks: RunTasks = NOT_READ
    """What was read and has no mistakes, for the run that comes next."""

    @property
    def wrong(self) -> list[Mistake]:
        """Mistakes that no other machine would mend."""
        return [mistake for mistake in self.mistakes if not mistake.missing]

    @property
    def missing(self) -> list[Mistake]:
        """What the config may rightly ask for, and this machine does not have."""
        return [mistake for mistake in self.mistakes if mistake.missing]

    def note(self, subject: str, text: str) -> None:
        self.facts.append((subject, text))

    def skip(self, subject: str, why: str) -> None:
        self.unchecked.append((subject, why))

    def add(self, mistakes: Iterable[Mistake]) -> None:
        """Each once, however many checks find it."""
        self.mistakes += [mistake for mistake in mistakes if mistake not in self.mistakes]

    @contextmanager
    def gather(self) -> Iterator[None]:
        """A check: its mistakes are added to the report, and the next check goes on."""
        try:
            yield
        except ConfigError as error:
            self.add(error.mistakes)

    def describe(self) -> str:
        """Facts, warnings and what was not checked; mistakes come after, in sections of their own."""
        lines, before = [], ""
        for subject, text in self.facts:
            lines.append(f"{'' if subject == before else subject:10} {text}")
            before = subject
        lines += [f"warning    {text}" for text in self.warnings]
        lines += [f"not checked: {subject}, because {why}" for subject, why in self.unchecked]
        if self.first_prompt:
            lines += ["", f"the first prompt, {self.first_prompt_tokens:,} tokens:"]
            lines += [f"  | {line}" for line in self.first_prompt.splitlines()]
        return "\n".join(lines)

    def describe_mistakes(self) -> str:
        """What is wrong, then what is missing, each under its heading; empty where there is neither."""
        headed = (("wrong in the config:", self.wrong), ("missing on this machine:", self.missing))
        parts = ["\n".join([heading, *map(str, found)]) for heading, found in headed if found]
        return "\n\n".join(parts)

    def conclude(self) -> str:
        """The closing sentence."""
        lacks = f"missing on this machine: {count_missing(self.missing)}" if self.missing else ""
        if self.wrong:
            count = len(self.wrong)
            others = f"; {lacks}" if lacks else ""
            return f"{count} mistake{'s' if count > 1 else ''}{others}; nothing was started"
        if lacks:
            return f"The config is right, as far as it could be checked here; {lacks}."
        return "fine: nothing is wrong as far as can be known without running it"

    def findings(self) -> list[dict[str, Any]]:
        """Everything as records for programs: kind (wrong, missing, warning, unchecked or ok), key, message, fix."""
        mistakes = [
            ("missing" if item.missing else "wrong", item.key, item.problem, item.fix) for item in self.mistakes
        ]
        rows = [
            *mistakes,
            *(("warning", None, text, None) for text in self.warnings),
            *(("unchecked", subject, f"because {why}", None) for subject, why in self.unchecked),
            *(("ok", subject, text, None) for subject, text in self.facts),
        ]
        return [{"kind": kind, "key": key, "message": message, "fix": fix} for kind, key, message, fix in rows]


def count_missing(missing: Iterable[Mistake]) -> str:
    """What a machine lacks, by kind: `1 model (Qwen/Qwen3-8B), 2 files (a.parquet, b.parquet), 8 GPUs`."""
    kinds: dict[str, list[Mistake]] = {}
    for mistake in missing:
        kinds.setdefault(mistake.missing, []).append(mistake)
    return ", ".join(_count_kind(kind, found) for kind, found in kinds.items())


def _count_kind(kind: str, found: list[Mistake]) -> str:
    named = all(isinstance(item.value, str) for item in found)
    names = list(dict.fromkeys(item.value for item in found)) if named else []
    count = len(names) or sum(item.count for item in found)
    counted = f"{count:,} {kind}{'' if count == 1 else 's'}" if any(item.count for item in found) else kind
    listed = ", ".join(names[:SHOWN_NAMES]) + (", …" if len(names) > SHOWN_NAMES else "")
    return f"{counted} ({listed})" if listed else counted
