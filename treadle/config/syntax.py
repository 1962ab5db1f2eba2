"""The YAML we read: PyYAML's safe loader, with YAML 1.2's scalars and limits that a config never meets.

Owns what a scalar means: `true` and `false` are the booleans, `1e-4` is a number, `010` is ten, `yes` is a string.
Invariant: text becomes booleans, numbers, strings, null, lists and maps, or an error; nothing is ever run.
"""

import re
from typing import Any

import yaml

_MAX_DEPTH = 64
_MAX_NODES = 200_000
_SAFE_LENGTH = 5_000
"""Text this short cannot nest deeply enough to hurt the parser, which is recursive C."""

_YAML = "tag:yaml.org,2002:"
_KINDS = ("bool", "int", "float", "null", "str", "seq", "map")


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Text to values of the seven kinds above."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML's own attribute
    yaml_constructors = {  # noqa: RUF012
        tag: how
        for tag, how in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_YAML) in _KINDS
    }


_NUMBER = r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)"
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", rf"{_NUMBER}(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.0123456789")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    Loader.add_implicit_resolver(f"{_YAML}{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


def _construct_int(loader: Any, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 16 if text.startswith("0x") else 10)


def _construct_float(loader: Any, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower().replace("_", "")
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _construct_bool(loader: Any, node: yaml.ScalarNode) -> bool:
    text = str(loader.construct_scalar(node)).lower()
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


def _construct_map(loader: Any, node: yaml.MappingNode) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or (key_node.value == "<<" and not key_node.style):
            raise ValueError("a key must be a plain name")
        if key_node.value in found:
            raise ValueError(f"{key_node.value} is given twice")
        found[key_node.value] = loader.construct_object(value_node, deep=True)
    return found


Loader.add_constructor(f"{_YAML}bool", _construct_bool)
Loader.add_constructor(f"{_YAML}map", _construct_map)
Loader.add_constructor(f"{_YAML}int", _construct_int)
Loader.add_constructor(f"{_YAML}float", _construct_float)


class TooMuch(yaml.YAMLError):
    """Text that is YAML but no config: nested or repeated beyond any use."""


def compose(text: str) -> yaml.Node | None:
    """The tree of one YAML document; None for an empty one."""
    if len(text) > _SAFE_LENGTH:
        _refuse_depth(text)
    loader = Loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
    finally:
        loader.dispose()
    _refuse_size(node)
    return node


def _refuse_depth(text: str) -> None:
    loader = Loader(text)
    depth = 0
    try:
        while loader.check_event():
            event = loader.get_event()
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise TooMuch(f"nested more than {_MAX_DEPTH} deep")
    finally:
        loader.dispose()


def _refuse_size(root: yaml.Node | None) -> None:
    """Count nodes as often as aliases repeat them: an alias may even hold itself."""
    todo = [(root, 0)] if root is not None else []
    count = 0
    while todo:
        node, depth = todo.pop()
        count += 1
        if depth > _MAX_DEPTH:
            raise TooMuch(f"nested more than {_MAX_DEPTH} deep")
        if count > _MAX_NODES:
            raise TooMuch(f"more than {_MAX_NODES:,} values")
        if isinstance(node, yaml.CollectionNode):
            pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
            todo.extend((part, depth + 1) for pair in pairs for part in pair)


def scalar_node(text: str) -> yaml.ScalarNode:
    """One scalar, verbatim; empty text is an empty string."""
    tag = Loader("").resolve(yaml.ScalarNode, text, (True, False)) if text else f"{_YAML}str"
    return yaml.ScalarNode(tag, text)


def construct(node: yaml.Node) -> Any:
    """The value of a node."""
    return Loader("").construct_object(node, deep=True)


def read_scalar(text: str) -> Any:
    """What one scalar means; text that no number holds stays text."""
    try:
        return construct(scalar_node(text))
    except ValueError:
        return text


def written(node: yaml.Node) -> str | tuple[str | None, ...] | None:
    """What a plain scalar, or each item of a list, looked like in the text."""
    if isinstance(node, yaml.SequenceNode):
        return tuple(_plain_text(item) for item in node.value)
    return _plain_text(node)


def _plain_text(node: yaml.Node) -> str | None:
    return str(node.value) if isinstance(node, yaml.ScalarNode) and not node.style else None
