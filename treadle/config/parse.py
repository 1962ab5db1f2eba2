"""Config parser: YAML files and `key=value` overrides into leaves that remember file and line.

PyYAML's safe loader, with YAML 1.2's scalars and size limits: `true` and `false` are the booleans, `1e-4` is a number,
`010` is ten, `yes` is a string. Owns the form of a file and of an override. Knows nothing about sections or which keys
exist.
Invariant: text becomes booleans, numbers, strings, null, lists and maps, or an error; nothing is ever run.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path as FilePath
from typing import Any

import yaml

from treadle.config.section import Leaf, Origin, Unset
from treadle.config.validate import shorten
from treadle.errors import Mistake

_MAX_DEPTH = 64
_MAX_NODES = 200_000
_SAFE_LENGTH = 5_000
"""Text this short cannot nest deeply enough to hurt the parser, which is recursive C."""

_YAML = "tag:yaml.org,2002:"
_KINDS = ("bool", "int", "float", "null", "str", "seq", "map")


class YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
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
    YamlLoader.add_implicit_resolver(f"{_YAML}{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


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


YamlLoader.add_constructor(f"{_YAML}bool", _construct_bool)
YamlLoader.add_constructor(f"{_YAML}map", _construct_map)
YamlLoader.add_constructor(f"{_YAML}int", _construct_int)
YamlLoader.add_constructor(f"{_YAML}float", _construct_float)


class ConfigTooLarge(yaml.YAMLError):
    """Text that is YAML but no config: nested or repeated beyond any use."""


def compose(text: str) -> yaml.Node | None:
    """The tree of one YAML document; None for an empty one."""
    if len(text) > _SAFE_LENGTH:
        _refuse_depth(text)
    loader = YamlLoader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
    finally:
        loader.dispose()
    _refuse_size(node)
    return node


def _refuse_depth(text: str) -> None:
    loader = YamlLoader(text)
    depth = 0
    try:
        while loader.check_event():
            event = loader.get_event()
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ConfigTooLarge(f"nested more than {_MAX_DEPTH} deep")
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
            raise ConfigTooLarge(f"nested more than {_MAX_DEPTH} deep")
        if count > _MAX_NODES:
            raise ConfigTooLarge(f"more than {_MAX_NODES:,} values")
        if isinstance(node, yaml.CollectionNode):
            pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
            todo.extend((part, depth + 1) for pair in pairs for part in pair)


def scalar_node(text: str) -> yaml.ScalarNode:
    """One scalar, verbatim; empty text is an empty string."""
    tag = YamlLoader("").resolve(yaml.ScalarNode, text, (True, False)) if text else f"{_YAML}str"
    return yaml.ScalarNode(tag, text)


def construct(node: yaml.Node) -> Any:
    """The value of a node."""
    return YamlLoader("").construct_object(node, deep=True)


def read_scalar(text: str) -> Any:
    """What one scalar means; text that no number holds stays text."""
    try:
        return construct(scalar_node(text))
    except ValueError:
        return text


def written_text(node: yaml.Node) -> str | tuple[str | None, ...] | None:
    """What a plain scalar, or each item of a list, looked like in the text."""
    if isinstance(node, yaml.SequenceNode):
        return tuple(_plain_text(item) for item in node.value)
    return _plain_text(node)


def _plain_text(node: yaml.Node) -> str | None:
    return str(node.value) if isinstance(node, yaml.ScalarNode) and not node.style else None


KeyPath = tuple[str, ...]
Layer = dict[KeyPath, Leaf]
"""The leaves one source gives. A list is one leaf; so is an empty map."""

UNSET = Unset.UNSET
"""The value of a leaf that takes back what earlier layers said (Hydra's `~key`)."""

UNDECIDED = "???"
"""A value that has to be decided before the config can be used, as in OmegaConf."""

_MAX_BYTES = 4_000_000
_EXAMPLE = "write for example rollout.n=8"


def dotted(path: KeyPath) -> str:
    """A path as people write it."""
    return ".".join(path)


def read_file(path: FilePath, mistakes: list[Mistake], name: str | None = None) -> Layer:
    """The leaves of a YAML file, called `name` in origins. What is wrong with it is added to `mistakes`."""
    name = name or str(path)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        mistakes.append(Mistake(name, f"cannot be read: {error.strerror}"))
        return {}
    if len(data) > _MAX_BYTES:
        mistakes.append(Mistake(name, f"is over {_MAX_BYTES // 1_000_000} MB: that is no config"))
        return {}
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        mistakes.append(Mistake(f"{name}:{line}", f"is not UTF-8 text: byte 0x{data[error.start]:02x}"))
        return {}
    return read_text(text, name, mistakes)


def read_text(text: str, name: str, mistakes: list[Mistake]) -> Layer:
    """The leaves of YAML text that came from `name`."""
    if not _is_text(text):
        mistakes.append(Mistake(name, "is not UTF-8 text"))
        return {}
    try:
        root = compose(text)
    except ConfigTooLarge as error:
        mistakes.append(Mistake(name, f"{error}: that is no config"))
        return {}
    except yaml.YAMLError as error:
        mistakes.append(_broken(error, name, text))
        return {}
    if root is None or root.value == "":
        return {}
    if not isinstance(root, yaml.MappingNode):
        mistakes.append(Mistake(name, "a config file is a map of sections", fix="start with a line such as `model:`"))
        return {}
    return dict(_leaves(root, (), lambda node: Origin.file(name, node.start_mark.line + 1), mistakes))


def read_words(words: Iterable[str], mistakes: list[Mistake]) -> Layer:
    """The leaves of `key=value` words. The same key twice: the later word wins, as on any command line."""
    layer: Layer = {}
    for word in words:
        for path, leaf in _read_word(word, mistakes):
            put_leaf(layer, path, leaf)
    return layer


def put_leaf(layer: Layer, path: KeyPath, leaf: Leaf) -> None:
    """Set a leaf; the leaf itself, those below it and one above it give way."""
    for other in [other for other in layer if other[: len(path)] == path or path[: len(other)] == other]:
        del layer[other]
    layer[path] = leaf


def _read_word(word: str, mistakes: list[Mistake]) -> Iterator[tuple[KeyPath, Leaf]]:
    origin = Origin.command_line(word)
    prefix, name, equals, text = _split(word)
    path = tuple(name.split("."))
    if not _is_text(word):
        mistakes.append(Mistake(ascii(word), "is not UTF-8 text"))
    elif prefix == "~" and equals:
        mistakes.append(Mistake(word, "`~` takes back a key, whatever its value", fix=f"write ~{name}"))
    elif prefix != "~" and not equals:
        mistakes.append(Mistake(word, "is not key=value", fix=_EXAMPLE))
    elif name != name.strip() and name.strip():
        fix = f"write {prefix}{name.strip()}={text.strip()}"
        mistakes.append(Mistake(name.strip(), "has spaces around its name", origin=origin, fix=fix))
    elif not all(part and part == part.strip() for part in path):
        mistakes.append(Mistake(name or word, "is not a key", origin=origin, fix=_EXAMPLE))
    elif prefix == "~":
        yield path, Leaf(UNSET, origin)
    else:
        yield from _read_value(path, text, origin.through(f"`{prefix}` is not needed") if prefix else origin, mistakes)


def _split(word: str) -> tuple[str, str, str, str]:
    """Hydra's prefix, the key, `=` and the value."""
    found = re.match(r"(\+{1,2}|~|)([^=]*)(=?)(.*)", word, re.DOTALL)
    assert found is not None, "the pattern matches any word"
    prefix, name, equals, text = found.groups()
    return prefix, name, equals, text


def _read_value(path: KeyPath, text: str, origin: Origin, mistakes: list[Mistake]) -> Iterator[tuple[KeyPath, Leaf]]:
    """Text that starts like a list, a map or a quoted string is YAML; anything else is one scalar, verbatim."""
    if text[:1] not in ("{", "[", '"', "'"):
        yield from _leaf(scalar_node(text), origin, mistakes, path)
        return
    try:
        node = compose(text)
    except yaml.YAMLError as error:
        fix = f"a value that starts with {text[0]} is read as YAML; put quotes around text that is none"
        mistakes.append(Mistake(dotted(path), _broken(error, "", text).problem, text, origin, fix))
        return
    assert node is not None, "text that starts a value holds one"
    if isinstance(node, yaml.MappingNode) and node.value:
        yield from _leaves(node, path, lambda _: origin, mistakes)
    else:
        yield from _leaf(node, origin, mistakes, path)


def _broken(error: yaml.YAMLError, name: str, text: str) -> Mistake:
    mark = getattr(error, "problem_mark", None)
    lines = text.splitlines() or [""]
    at = min(mark.line, len(lines) - 1) if mark else 0
    words = [word for word in (getattr(error, "context", None), getattr(error, "problem", None)) if word]
    problem = ", ".join(words) or str(error).partition("\n")[0]
    if mark is None:
        return Mistake(name, f"broken YAML: {problem}")
    return Mistake(f"{name}:{at + 1}", f"broken YAML: {problem}", fix=_mend(problem, lines[at]))


def _mend(problem: str, line: str) -> str | None:
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "indent with spaces, not tabs"
    if "another document" in problem:
        return "a file holds one config: remove the line `---`, or make it two files"
    if "${" in line and ("[" in line or "{" in line.replace("${", "")):
        return 'inside [] or {}, a reference needs quotes: "${section.key}"'
    if "mapping values are not allowed" in problem:
        return (
            f"put quotes around a value that holds `: `, and indent keys of one section alike: {shorten(line.strip())}"
        )
    return f"near: {shorten(line.strip())}" if line.strip() else None


def _leaves(
    node: yaml.MappingNode, prefix: KeyPath, origin_of: Callable[[yaml.Node], Origin], mistakes: list[Mistake]
) -> Iterator[tuple[KeyPath, Leaf]]:
    seen: dict[str, Origin] = {}
    for key_node, value_node in node.value:
        origin = origin_of(key_node)
        name = key_node.value
        path = (*prefix, str(name))
        merges = name == "<<" and not key_node.style
        if not isinstance(key_node, yaml.ScalarNode) or not name or merges:
            fix = "give several files instead; later ones win" if merges else None
            mistakes.append(Mistake(dotted(prefix) or "top level", "a key must be a plain name", None, origin, fix))
        elif name in seen:
            mistakes.append(Mistake(dotted(path), f"given twice, first at {seen[name]}", origin=origin))
        elif isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves(value_node, path, origin_of, mistakes)
        else:
            yield from _leaf(value_node, origin, mistakes, path)
        seen.setdefault(str(name), origin)


def _leaf(node: yaml.Node, origin: Origin, mistakes: list[Mistake], path: KeyPath) -> Iterator[tuple[KeyPath, Leaf]]:
    try:
        yield path, Leaf(construct(node), origin, written_text(node))
    except (yaml.YAMLError, ValueError) as error:
        problem = str(getattr(error, "problem", error)).partition(";")[0]
        problem = problem.replace("could not determine a constructor for the tag", "there is no tag")
        mistakes.append(Mistake(dotted(path), f"cannot be read: {problem}", origin=origin))


def _is_text(text: str) -> bool:
    """Whether text has a UTF-8 form; arguments that are other bytes reach Python as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
