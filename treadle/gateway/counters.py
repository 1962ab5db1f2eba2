"""Gateway counters: what the agent of one session did, counted.

They become `extra["gateway"]` of its trajectory, and are summed up in the line that a run ends with.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_NOTES = 16
"""Different notes that a session keeps."""

MAX_OPTIONS = 64
"""Different options that a session counts by name; what an agent sends beyond is counted together."""

OTHERS = "others"
MAX_OPTION_CHARS = 80
MAX_ASKED_CHARS = 200
"""Of the value of an option, as JSON."""

_PLACE = re.compile(r"\[\d+\]")


@dataclass(slots=True)
class GatewayCounters:
    """What an agent did, counted; becomes `extra["gateway"]` of its trajectory."""

    requests: Counter[str] = field(default_factory=Counter)
    """By dialect."""
    echoes: Counter[str] = field(default_factory=Counter)
    """Sampled turns that were sent back, by how they compare; each turn once."""
    forks: Counter[str] = field(default_factory=Counter)
    """Rows that branch off another, by why."""
    forked_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of the prompts of those rows that another row has, too, and that training computes again; by why."""
    roots: int = 0
    replaced: int = 0
    undelivered: int = 0
    auxiliary: int = 0
    """Turns that do not train: asked for again, never delivered, or for another model than the policy."""
    unfinished: int = 0
    """Turns that were being sampled when the session ended, or that an engine broke off for good."""
    replayed: int = 0
    """Requests that were given an answer again."""
    engine_failures: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Options that were refused, by name, whatever the place in a list."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Options without effect, by name: the run's settings hold."""
    asked: dict[str, Any] = field(default_factory=dict)
    """The first value of each of those, and of the options that bound and end a turn."""
    notes: dict[str, None] = field(default_factory=dict)

    def add_fork(self, why: str, num_tokens: int) -> None:
        """A row that branches off, and how much of its prompt another row has."""
        self.forks[why] += 1
        if num_tokens:
            self.forked_tokens[why] += num_tokens

    def add_refused(self, option: str) -> None:
        """Places in lists are left out of a name: an agent's history has any number of them."""
        self.refused[_PLACE.sub("[]", option)] += 1

    def add_options(self, ignored: Iterable[str], asked: Mapping[str, Any]) -> None:
        """Options of one request, and the first value of each; no more than `MAX_OPTIONS` names."""
        for option in ignored:
            name = option[:MAX_OPTION_CHARS]
            self.ignored[name if name in self.ignored or len(self.ignored) < MAX_OPTIONS else OTHERS] += 1
        for option, value in asked.items():
            name = option[:MAX_OPTION_CHARS]
            if name not in self.asked and len(self.asked) < MAX_OPTIONS:
                self.asked[name] = _bounded(value)

    def add_notes(self, notes: Iterable[str]) -> None:
        """Each once, and no more than `MAX_NOTES` of them."""
        for note in notes:
            if len(self.notes) < MAX_NOTES:
                self.notes[note] = None

    def as_extra(self) -> dict[str, Any]:
        """Everything that is not empty, as plain JSON."""
        values = {name: getattr(self, name) for name in self.__slots__}
        plain = {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}
        return {
            **{name: value for name, value in plain.items() if value},
            **({"notes": [*self.notes]} if self.notes else {}),
        }


def _bounded(value: Any) -> Any:
    """A value, or the beginning of it as JSON where it is long."""
    written = json.dumps(value, ensure_ascii=False)
    return value if len(written) <= MAX_ASKED_CHARS else f"{written[:MAX_ASKED_CHARS]}…"
