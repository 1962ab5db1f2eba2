"""What a migration says: the new YAML, and for every old key what became of it."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

STATUS_LOST = 3
"""Some keys have no counterpart."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One old key: its class (mapped, same or none), the new keys, the value before and after, and why."""

    old: str
    kind: str
    new: tuple[str, ...]
    before: Any
    after: Any
    reason: str
    place: str

    def __str__(self) -> str:
        head = f"{self.kind:6}  {self.old} = {_show(self.before)}"
        if self.kind == "mapped" and self.new:
            head += f"  →  {', '.join(self.new)} = {_show(self.after)}"
        return f"{head}\n        {self.reason} ({self.place})" if self.reason else f"{head}  ({self.place})"


@dataclass(frozen=True, slots=True)
class Migration:
    """A verl config in our spelling. `notes` are about the script around the keys."""

    yaml: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        """0 when every key was mapped or is the same, 3 when some have no counterpart."""
        return STATUS_LOST if any(entry.kind == "none" for entry in self.entries) else 0

    def counts(self) -> dict[str, int]:
        """How many keys are in each class."""
        found = Counter(entry.kind for entry in self.entries)
        return {kind: found[kind] for kind in ("mapped", "same", "none")}

    def report(self) -> str:
        """The report for people: what has no counterpart first."""
        order = sorted(self.entries, key=lambda entry: ("none", "mapped", "same").index(entry.kind))
        counts = ", ".join(f"{count} {kind}" for kind, count in self.counts().items())
        return "\n".join([*(str(entry) for entry in order), *(f"note    {note}" for note in self.notes), counts])

    def to_json(self) -> str:
        """The report for machines."""
        import json

        found = {
            "status": self.exit_status,
            "counts": self.counts(),
            "keys": [asdict(entry) for entry in self.entries],
            "notes": self.notes,
            "yaml": self.yaml,
        }
        return json.dumps(found, indent=2, ensure_ascii=False, default=str)


def _show(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
