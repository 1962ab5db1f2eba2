"""Reads config sources: YAML files and `key=value` words, into leaves that remember file and line.

Owns the form of a file and of a word. Knows nothing about sections or which keys exist.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path as FilePath

import yaml

from treadle.config.origin import Leaf, Origin, Unset
from treadle.config.syntax import TooMuch, compose, construct, scalar_node, written
from treadle.config.value import shorten
from treadle.errors import Mistake

Path = tuple[str, ...]
Layer = dict[Path, Leaf]
"""The leaves one source gives. A list is one leaf; so is an empty map."""

UNSET = Unset.UNSET
"""The value of a leaf that takes back what earlier layers said (Hydra's `~key`)."""

UNDECIDED = "???"
"""A value that has to be decided before the config can be used, as in OmegaConf."""

_MAX_BYTES = 4_000_000
_EXAMPLE = "write for example rollout.n=8"


def dotted(path: Path) -> str:
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
    except TooMuch as error:
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
            put(layer, path, leaf)
    return layer


def put(layer: Layer, path: Path, leaf: Leaf) -> None:
    """Set a leaf; the leaf itself, those below it and one above it give way."""
    for other in [other for other in layer if other[: len(path)] == path or path[: len(other)] == other]:
        del layer[other]
    layer[path] = leaf


def _read_word(word: str, mistakes: list[Mistake]) -> Iterator[tuple[Path, Leaf]]:
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


def _read_value(path: Path, text: str, origin: Origin, mistakes: list[Mistake]) -> Iterator[tuple[Path, Leaf]]:
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
    node: yaml.MappingNode, prefix: Path, origin_of: Callable[[yaml.Node], Origin], mistakes: list[Mistake]
) -> Iterator[tuple[Path, Leaf]]:
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


def _leaf(node: yaml.Node, origin: Origin, mistakes: list[Mistake], path: Path) -> Iterator[tuple[Path, Leaf]]:
    try:
        yield path, Leaf(construct(node), origin, written(node))
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
