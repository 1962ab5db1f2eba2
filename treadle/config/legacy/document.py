"""Writes keys and values as YAML that our loader reads: sections in their order, comments beside values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from treadle.config.outline import is_section, subclasses
from treadle.config.root import TrainConfig
from treadle.config.section import TARGET, Section, fields_of, types_of
from treadle.config.source import Path
from treadle.config.syntax import Loader


class _Dumper(yaml.SafeDumper):
    """Quotes a string exactly where our reader would otherwise see another type."""


_Dumper.yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


@dataclass(frozen=True, slots=True)
class Line:
    """A value and the comment beside it."""

    value: Any
    comment: str = ""


Tree = dict[str, Any]


def write_document(lines: Mapping[Path, Line], title: str, left_out: Sequence[str] = ()) -> str:
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


def _order(path: Path) -> tuple[int, ...]:
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
        if isinstance(item, Line):
            yield from _entry(name, item, indent)
        else:
            yield f"{indent}{_scalar(name)}:"
            yield from _block(item, f"{indent}  ")


def _entry(name: str, line: Line, indent: str) -> Iterator[str]:
    note = f"  # {line.comment}" if line.comment else ""
    if isinstance(line.value, list | tuple) and line.value:
        yield f"{indent}{_scalar(name)}:{note}"
        yield from (f"{indent}  - {_scalar(item)}" for item in line.value)
    elif isinstance(line.value, dict) and line.value:
        yield f"{indent}{_scalar(name)}:{note}"
        yield from _block({key: Line(value) for key, value in line.value.items()}, f"{indent}  ")
    else:
        yield f"{indent}{_scalar(name)}: {_scalar(line.value)}{note}"


def _scalar(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.dump(plain, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
