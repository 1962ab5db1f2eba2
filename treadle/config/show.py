"""Config as YAML that loads again, the difference of two configs, and the secrets that are hidden in both.

Secrets are values that no run directory, journal or tracker is given: the environment of MCP servers, entries of
free-form maps that are called a key, token, secret or password, and credentials in addresses. Keys of endpoints are
named by their environment variable, which is no secret.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from typing import Any

import yaml

from treadle.config.bind import escape
from treadle.config.parse import YamlLoader, compose, construct, read_scalar
from treadle.config.section import TARGET, Section, Source, types_of
from treadle.config.tree import public_name, section_in_map, usual_class

HIDDEN = "(hidden)"
_NAMES = (
    r"(?:(?:api|access|account|private|secret|signing)[-_]?key|auth|token|secret|password|passwd|pwd|passphrase|bearer"
    r"|credentials?|authorization|cookie|signature|connection[-_]?string|webhook(?:[-_]?url)?)"
)
_SECRET = re.compile(rf"(?i)(?:^|[-_.]){_NAMES}$")
_OPTION = re.compile(rf"(?i)--?(?:[\w-]*[-_])?{_NAMES}")
"""An option of a program whose value is the next word."""
_IN_TEXT = (
    (re.compile(r"(?<=://)[^/@\s]+@"), "(hidden)@"),
    (re.compile(rf"(?i)([?&](?:[\w-]*[-_])?(?:{_NAMES}|key|sig)=)[^&#\s]+"), r"\1(hidden)"),
    (re.compile(rf"(?i)(--?(?:[\w-]*[-_])?{_NAMES}(?:=|\s+))(?!-)[^\s'\"]+"), r"\1(hidden)"),
    (re.compile(r"(?i)((?:^|[\s;&'\"])(?:\w*_)?" + _NAMES + r"=)[^\s;&'\"]+"), r"\1(hidden)"),
    (re.compile(r"(?i)(\b(?:authorization|cookie)\s*:\s*)[^\s'\"][^'\"\n]*"), r"\1(hidden)"),
)
"""Secrets inside of a text: of a URL, of an option or an assignment in a command, and of a header."""
_ENVIRONMENT = "env"
_OPTIONS = ("--key",)
"""Options of commands whose values are secret."""


def hide_secret(key: str, value: Any, *, digest: bool = False) -> Any:
    """The value of a dotted key with every secret hidden; with `digest`, so that a changed one can still be told."""
    return _hide(value, key.rpartition(".")[2] == _ENVIRONMENT, digest)


def hide_in_words(words: Sequence[str]) -> list[str]:
    """A command line with the values hidden that are secret: of `key=value` words, inside them, and of `--key`."""
    before = ["", *words]
    return [HIDDEN if option in _OPTIONS else _hide_word(word) for option, word in zip(before, words, strict=False)]


def _hide_word(word: str) -> str:
    key, equals, value = word.partition("=")
    parts = key.split(".")
    if equals and (_ENVIRONMENT in parts or _SECRET.search(parts[-1]) or key in _OPTIONS):
        return f"{key}={HIDDEN}"
    if equals and value.lstrip().startswith(("{", "[")):
        value = _hide_inside(value)
    return f"{key}{equals}{_hide_in_text(value)}" if equals else _hide_in_text(word)


def _hide_inside(text: str) -> str:
    """A list or a map as text; as it was written, where nothing in it is secret."""
    try:
        node = compose(text)
        value = None if node is None else construct(node)
    except yaml.YAMLError:
        return HIDDEN  # it cannot be read, and so nothing of it can be judged
    hidden = _hide(value, False, False)
    return text if as_yaml(hidden) == as_yaml(value) else as_yaml(hidden)


def _hide(value: Any, secret: bool, digest: bool) -> Any:
    if isinstance(value, Mapping):
        return {name: _hide(item, secret or _is_secret(name, item), digest) for name, item in value.items()}
    if isinstance(value, list | tuple):
        before = ("", *value)
        return tuple(
            _hide(item, secret or _is_option(option), digest) for option, item in zip(before, value, strict=False)
        )
    if not secret:
        return _hide_in_text(value) if isinstance(value, str) else value
    return f"{HIDDEN[:-1]} {blake2b(str(value).encode(), digest_size=4).hexdigest()})" if digest else HIDDEN


def _hide_in_text(text: str) -> str:
    for pattern, hidden in _IN_TEXT:
        text = pattern.sub(hidden, text)
    return text


def _is_option(word: object) -> bool:
    return isinstance(word, str) and bool(_OPTION.fullmatch(word))


def _is_secret(name: object, value: object) -> bool:
    return bool(_SECRET.search(str(name))) or (name == _ENVIRONMENT and isinstance(value, Mapping))


_WORD = re.compile(r"[A-Za-z][\w./-]*", re.ASCII)
"""Text that no quoting could change; most values are of this kind, and the dumper is slow."""


class _Dumper(yaml.SafeDumper):
    """Plain YAML, quoted exactly where our reader would otherwise see another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    is_plain = value.isprintable() and value == value.strip() and value != "<<"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if is_plain else '"')


_Dumper.yaml_implicit_resolvers = YamlLoader.yaml_implicit_resolvers
_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, True))
_Dumper.add_multi_representer(dict, lambda dumper, value: dumper.represent_dict(dict(value).items()))


def to_yaml(config: Section, *, origins: bool = False, secrets: bool = True, given: bool = False) -> str:
    """Every value, in an order a reader expects; loading it again gives an equal config. `secrets` may be left out.

    With `given`, only what a file, the command line or code gave: everything else is the default.
    """
    return "\n".join(_lines(config, "", _YamlOptions(origins, secrets, given))) + "\n"


@dataclass(frozen=True, slots=True)
class _YamlOptions:
    origins: bool
    secrets: bool
    given: bool


def _lines(section: Section, indent: str, options: _YamlOptions) -> Iterator[str]:
    for name, value in section.values().items():
        if isinstance(value, Section):
            below = list(_section_lines(value, usual_class(type(section), name), f"{indent}  ", options))
            if below or not options.given:
                yield f"{indent}{name}:"
                yield from below
        elif section_in_map(types_of(type(section))[name]) and value:
            yield f"{indent}{name}:"
            for inner, item in value.items():
                yield f"{indent}  {as_yaml(inner)}:"
                yield from _section_lines(item, usual_class(type(section), name), f"{indent}    ", options)
        elif not options.given or _is_given(section, name):
            value = value if options.secrets else hide_secret(name, value)
            yield f"{indent}{name}: {as_yaml(value)}{_note(section, name, options)}"


def _section_lines(section: Section, usual: type[Section], indent: str, options: _YamlOptions) -> Iterator[str]:
    if type(section) is not usual:
        yield f"{indent}{TARGET}: {public_name(type(section))}{_note(section, TARGET, options)}"
    yield from _lines(section, indent, options)


def _is_given(section: Section, name: str) -> bool:
    return any(section.origin(key).source is not Source.DEFAULT for key in section.traced(name) or [name])


def _note(section: Section, name: str, options: _YamlOptions) -> str:
    if not options.origins:
        return ""
    origins = [section.origin(key) for key in section.traced(name) or [name]]
    if not options.secrets:  # a word of the command line is told as it was given
        origins = [
            replace(origin, place=_hide_word(origin.place)) if origin.source is Source.COMMAND_LINE else origin
            for origin in origins
        ]
    return f"  # {'; '.join(dict.fromkeys(map(str, origins)))}"


def as_yaml(value: Any) -> str:
    """A value on one line, as our own reader reads it back."""
    if value is None or isinstance(value, bool | int):
        return "null" if value is None else str(value).lower()
    if isinstance(value, str) and _WORD.fullmatch(value) and isinstance(read_scalar(value), str):
        return value
    text = yaml.dump(_escaped(value), Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_escaped(item) for item in value)
    return escape(value) if isinstance(value, str) else value


def flatten(section: Section, prefix: str = "") -> dict[str, Any]:
    """Every leaf by its dotted key; sections that are not of the usual class also give their `_target_`."""
    found: dict[str, Any] = {}
    for name, value in section.values().items():
        usual = usual_class(type(section), name)
        if section_in_map(types_of(type(section))[name]):
            parts = {f"{prefix}{name}.{inner}": below for inner, below in value.items()}
        elif isinstance(value, Section):
            parts = {f"{prefix}{name}": value}
        else:
            found[f"{prefix}{name}"] = value
            continue
        for path, below in parts.items():
            if type(below) is not usual:
                found[f"{path}.{TARGET}"] = public_name(type(below))
            found.update(flatten(below, f"{path}."))
    return found


class Absent(Enum):
    """Stands for the value of a key that one of two configs does not have."""

    ABSENT = "(absent)"


ABSENT = Absent.ABSENT


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose value differs between two configs; `ABSENT` where one of them has no such key."""

    key: str
    left: Any
    right: Any

    def __str__(self) -> str:
        left, right = (item.value if item is ABSENT else as_yaml(item) for item in (self.left, self.right))
        return f"{self.key}: {left} → {right}"


_NAME = "logging.experiment_name"


def _is_named_by_its_file(config: Section) -> bool:
    """Whether the experiment has its default name: two files then differ in it by their own names alone."""
    logging = config.values().get("logging")
    return isinstance(logging, Section) and logging.origin("experiment_name").source is Source.DEFAULT


def diff(left: Section, right: Section) -> list[Difference]:
    """The keys whose resolved values differ, in the order of the left config."""
    before, after = flatten(left), flatten(right)
    if all(_is_named_by_its_file(config) for config in (left, right)):
        before.pop(_NAME), after.pop(_NAME)
    keys = [*before, *(key for key in after if key not in before)]
    pairs = ((key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys)
    return [Difference(key, old, new) for key, old, new in pairs if old != new]
