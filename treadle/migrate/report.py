"""Migration report: the new YAML document, and for every old key what became of it.

Writes YAML that our loader reads: sections in their order, comments beside values.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from treadle.config.parse import KeyPath, YamlLoader
from treadle.config.root import TrainConfig
from treadle.config.section import TARGET, Section, fields_of, types_of
from treadle.config.tree import is_section, subclasses

STATUS_LOST = 3
"""Some keys have no counterpart."""


@dataclass(frozen=True, slots=True)
class MigratedKey:
    """One old key: its class (mapped, same or none), the new keys, the value before and after, and why."""

    old: str
    kind: str
    new: tuple[str, ...]
    before: Any
    after: Any
    reason: str
    place: str

    def __str__(self) -> str:
        head = f"{self.kind:6}  {self.old} = {_show_value(self.before)}"
        if self.kind == "mapped" and self.new:
            head += f"  →  {', '.join(self.new)} = {_show_value(self.after)}"
        return f"{head}\n        {self.reason} ({self.place})" if self.reason else f"{head}  ({self.place})"


@dataclass(frozen=True, slots=True)
class Migration:
    """A verl config in our spelling. `notes` are about the script around the keys."""

    yaml: str
    entries: tuple[MigratedKey, ...]
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


def _show_value(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


class _MigrationDumper(yaml.SafeDumper):
    """Quotes a string exactly where our reader would otherwise see another type."""


_MigrationDumper.yaml_implicit_resolvers = YamlLoader.yaml_implicit_resolvers


@dataclass(frozen=True, slots=True)
class YamlLine:
    """A value and the comment beside it."""

    value: Any
    comment: str = ""


Tree = dict[str, Any]


def write_document(lines: Mapping[KeyPath, YamlLine], title: str, left_out: Sequence[str] = ()) -> str:
    """The YAML text of these keys; `left_out` are comments at the end."""
    tree: Tree = {}
    sections = {path[:end] for path in lines for end in range(len(path))}
    for path, line in sorted(lines.items(), key=lambda item: _order(item[0])):
        if path in sections:  # an empty section that has keys after all
            continue
        inner = tree
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = line
    comments = ["", "# Left out, and why:", *(f"#   {text}" for text in left_out)] if left_out else []
    return "\n".join([f"# {title}", *_block(tree, ""), *comments]) + "\n"


def _order(path: KeyPath) -> tuple[int, ...]:
    """Where a key stands in its section; keys of free-form maps keep the order they came in."""
    places: list[int] = []
    cls: type[Section] | None = TrainConfig
    for part in path:
        names = [TARGET, *(name for variant in subclasses(cls) for name in fields_of(variant))] if cls else []
        places.append(names.index(part) if part in names else len(names))
        cls = _section_at(cls, part) if cls else None
    return tuple(places)


def _section_at(cls: type[Section], name: str) -> type[Section] | None:
    hints = [types_of(variant)[name] for variant in subclasses(cls) if name in fields_of(variant)]
    return hints[0] if hints and is_section(hints[0]) else None


def _block(tree: Tree, indent: str) -> Iterator[str]:
    for name, item in tree.items():
        if isinstance(item, YamlLine):
            yield from _entry(name, item, indent)
        else:
            yield f"{indent}{_scalar(name)}:"
            yield from _block(item, f"{indent}  ")


def _entry(name: str, line: YamlLine, indent: str) -> Iterator[str]:
    note = f"  # {line.comment}" if line.comment else ""
    if isinstance(line.value, list | tuple) and line.value:
        yield f"{indent}{_scalar(name)}:{note}"
        yield from (f"{indent}  - {_scalar(item)}" for item in line.value)
    elif isinstance(line.value, dict) and line.value:
        yield f"{indent}{_scalar(name)}:{note}"
        yield from _block({key: YamlLine(value) for key, value in line.value.items()}, f"{indent}  ")
    else:
        yield f"{indent}{_scalar(name)}: {_scalar(line.value)}{note}"


def _scalar(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.dump(plain, Dumper=_MigrationDumper, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
