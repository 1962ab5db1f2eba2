"""The report of a preflight: what was found fine, what is worth knowing, and every mistake.

Owns the record and its text. Looks at nothing itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from treadle.errors import ConfigError, Mistake


@dataclass(slots=True)
class PreflightReport:
    """Filled as checks go on, one after the other."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    """What was looked at and what it came to, in order."""
    warnings: list[str] = field(default_factory=list)
    """What may be meant, and is worth a look."""
    mistakes: list[Mistake] = field(default_factory=list)
    """What keeps the run from working. None: it is fine as far as can be known."""
    first_prompt: str = ""
    """The first task's prompt as the model reads it."""
    first_prompt_tokens: int = 0

    def note(self, subject: str, text: str) -> None:
        self.facts.append((subject, text))

    @contextmanager
    def gather(self) -> Iterator[None]:
        """A check: its mistakes are added to the report, and the next check goes on."""
        try:
            yield
        except ConfigError as error:
            self.mistakes += [mistake for mistake in error.mistakes if mistake not in self.mistakes]

    def describe(self) -> str:
        """The facts and warnings as text; mistakes are left to the error that carries them."""
        lines, before = [], ""
        for subject, text in self.facts:
            lines.append(f"{'' if subject == before else subject:10} {text}")
            before = subject
        lines += [f"warning    {text}" for text in self.warnings]
        if self.first_prompt:
            lines += ["", f"the first prompt, {self.first_prompt_tokens:,} tokens:"]
            lines += [f"  | {line}" for line in self.first_prompt.splitlines()]
        return "\n".join(lines)
