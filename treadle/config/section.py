"""Config sections: frozen, typed, described groups of keys whose values know their origin.

Owns the base class, the key declaration, and origins: the file and line, command-line word or default that gave a
value, and what it overrode. Knows nothing about how files or command lines are read.
Invariant: a section that exists holds a checked value for every key, and no value changes; what is derived from
values is a method.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, ClassVar, NoReturn, Self, dataclass_transform, get_type_hints

from treadle.config.validate import Bounds, FrozenDict, check_value, freeze, one_line, shorten
from treadle.errors import ConfigError, Mistake, nearest


class Source(StrEnum):
    """The kinds of place a value can come from."""

    DEFAULT = "default"
    FILE = "file"
    COMMAND_LINE = "command line"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class Origin:
    """One place a value came from, and the detours (legacy key, reference) it took from there."""

    source: Source
    place: str
    via: tuple[str, ...] = ()

    @classmethod
    def default(cls, section: str, name: str) -> "Origin":
        return cls(Source.DEFAULT, f"{section}.{name}")

    @classmethod
    def code(cls, section: str, name: str) -> "Origin":
        return cls(Source.CODE, f"{section}.{name}")

    @classmethod
    def file(cls, path: str, line: int) -> "Origin":
        return cls(Source.FILE, f"{path}:{line}")

    @classmethod
    def command_line(cls, text: str) -> "Origin":
        return cls(Source.COMMAND_LINE, text)

    def through(self, detour: str) -> "Origin":
        """This origin, reached by one more detour."""
        return Origin(self.source, self.place, (*self.via, detour))

    def __str__(self) -> str:
        place = one_line(self.place) if self.source is Source.FILE else f"{self.source} ({shorten(self.place)})"
        return ", ".join((place, *map(shorten, self.via)))


class Unset(Enum):
    """The value of a leaf that takes back what earlier layers said."""

    UNSET = "unset"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value as it was written: the text is kept so that `007` can still become a string."""

    value: Any
    origin: Origin
    text: str | tuple[str | None, ...] | None = None
    """What a plain scalar looked like; of a list, what each item looked like; None where there is nothing to choose."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The origin of the value in force, and the leaves it overrode, newest first."""

    origin: Origin
    overrode: tuple[Leaf, ...] = ()


REQUIRED: Any = ...

TARGET = "_target_"
"""The key in which a config names the class of a section."""

Options = Mapping[str, Any]
"""A free-form map, handed on as it is to whatever the key names."""

Strings = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """One declared key: default, one-line description and bounds. The type is the annotation beside it."""

    default: Any
    description: str
    bounds: Bounds

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


def key(
    default: Any,
    description: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    names: tuple[str, ...] | None = None,
    schemes: tuple[str, ...] = (),
) -> Any:
    """Declare a key of a section. With `names`, a string must be one of them, an import path or `scheme:name`."""
    return Key(freeze(default), description, Bounds(ge, gt, le, lt, names, schemes))


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section:
    """A frozen group of keys. Each key holds a plain value, another section, or a map of sections by name."""

    _keys: ClassVar[Mapping[str, Key]] = {}
    _types: ClassVar[Mapping[str, Any]] = {}
    _traces: Mapping[str, Trace]

    def __init_subclass__(cls) -> None:
        own = {name: item for name, item in vars(cls).items() if isinstance(item, Key)}
        inherited = {
            name: item for base in reversed(cls.__mro__[1:]) for name, item in getattr(base, "_keys", {}).items()
        }
        annotated = [
            name
            for name, hint in vars(cls).get("__annotations__", {}).items()
            if not name.startswith("_") and "ClassVar" not in str(hint)
        ]
        for name in (*annotated, *(name for name in inherited if name in vars(cls))):
            if name not in own:  # it looks like a key and would be ignored
                raise TypeError(f"{cls.__name__}.{name} is not declared as a key: write key(default, description)")
        cls._keys = inherited | own

    def __init__(self, **values: Any) -> None:
        mistakes = list(self._mistakes(values))
        if mistakes:
            raise ConfigError(mistakes)
        for name, declared in fields_of(type(self)).items():
            self.__dict__[name] = values.get(name, declared.default)
        self.__dict__["_traces"] = FrozenDict()

    def _mistakes(self, values: dict[str, Any]) -> Iterator[Mistake]:
        """Check `values` and put them in their final form, in place."""
        cls = type(self)
        declared, hints = fields_of(cls), types_of(cls)
        for name in [name for name in values if name not in declared]:
            yield Mistake(f"{cls.__name__}.{name}", "no such key", values[name], fix=nearest(name, declared))
        for name, item in declared.items():
            if name in values:
                checked = check_value(values[name], hints[name], item.bounds)
                if checked.problem:
                    yield Mistake(f"{cls.__name__}.{name}", checked.problem, value=values[name])
                values[name] = checked.value
            elif item.required:
                yield Mistake(f"{cls.__name__}.{name}", f"is required: {item.description}")

    @classmethod
    def with_traces(cls, values: Mapping[str, Any], traces: Mapping[str, Trace]) -> Self:
        """A section of checked values that know where they came from. For loaders; other code calls the class."""
        built = cls.__new__(cls)
        built.__dict__.update({name: values[name] for name in fields_of(cls)}, _traces=FrozenDict(traces))
        return built

    def replaced(self, name: str, value: Any, origin: Origin) -> Self:
        """This section with another checked value of `name` (dotted for nested keys), which came from `origin`."""
        first, _, rest = name.partition(".")
        if rest:
            changed, traces = self.__dict__[first].replaced(rest, value, origin), dict(self._traces)
        else:
            changed, traces = value, {**self._traces, name: Trace(origin)}
        return self.with_traces({**self.values(), first: changed}, traces)

    def origin(self, name: str) -> Origin:
        """Where the value of `name` (dotted for nested keys) came from."""
        return self.trace(name).origin

    def trace(self, name: str) -> Trace:
        """The origin of `name` and every earlier value it overrode, newest first."""
        first, _, rest = name.partition(".")
        if name not in self._traces and first not in (TARGET, *fields_of(type(self))):
            raise KeyError(f"{type(self).__name__} has no key {name!r}")
        value = self.__dict__.get(first)
        if rest and isinstance(value, Mapping) and isinstance(value.get(rest.partition(".")[0]), Section):
            inner, _, rest = rest.partition(".")
            value = value[inner]
        if isinstance(value, Section):
            if not rest:
                raise KeyError(f"{name!r} is a section; its keys have origins")
            return value.trace(rest)
        return self._traces[name] if name in self._traces else self._near_trace(name, first, value)

    def _near_trace(self, name: str, first: str, value: Any) -> Trace:
        """The trace of part of a value, of a map of several leaves, or of a value that no loader gave."""
        given = self.traced(first)
        near = [key for key in given if key.startswith(f"{name}.") or name.startswith(f"{key}.")]
        if near and isinstance(value, Mapping):
            return self._traces[near[0]]
        if given or (name != first and not isinstance(value, Mapping)):
            raise KeyError(f"{type(self).__name__} has no key {name!r}")
        is_default = first == TARGET or value == fields_of(type(self))[first].default
        return Trace((Origin.default if is_default else Origin.code)(type(self).__name__, first))

    def traced(self, name: str) -> list[str]:
        """The leaves that make up the value of `name`: itself, or those below it in a free-form map."""
        return [key for key in self._traces if key == name or key.startswith(f"{name}.")]

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"config does not change after loading: cannot set {type(self).__name__}.{name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"config does not change after loading: cannot delete {type(self).__name__}.{name}")

    def values(self) -> dict[str, Any]:
        """The values by key, sections as they are."""
        return {name: self.__dict__[name] for name in fields_of(type(self))}

    def __eq__(self, other: object) -> bool:
        """Sections are equal when their values are, wherever the values came from."""
        return isinstance(other, Section) and type(self) is type(other) and self.values() == other.values()

    def __hash__(self) -> int:
        return hash((type(self), *self.values().values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.values().items())})"


def fields_of(cls: type[Section]) -> Mapping[str, Key]:
    """The keys a section class declares, base classes first, in the order a reader sees them."""
    return cls._keys


def types_of(cls: type[Section]) -> Mapping[str, Any]:
    """The annotation of each key, resolved on first use."""
    if "_types" not in vars(cls):
        hints = get_type_hints(cls)
        cls._types = {name: hints[name] for name in cls._keys}
    return cls._types
