"""Config loader: read, translate legacy keys, merge, bind, resolve, check, build. Finds shipped recipes by name.

The one place that makes a config out of text. Every mistake of every stage is in the one error it raises.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pathlib import Path as FilePath
from typing import Any, get_args

from treadle.config import legacy
from treadle.config.bind import bind, nested, resolve
from treadle.config.parse import UNDECIDED, KeyPath, Layer, dotted, read_file, read_scalar, read_text, read_words
from treadle.config.root import Config, SFTRunConfig
from treadle.config.rules import UNKNOWN, check_cautions, check_rules
from treadle.config.section import TARGET, Leaf, Origin, Section, Source, Trace
from treadle.config.stages import first_stage, has_stages, own_names, second_stage
from treadle.config.tree import KeySlot, SectionOutline, hints_at, is_free_map, is_section, merge
from treadle.config.validate import FrozenDict, check_value, choices, shorten
from treadle.errors import ConfigError, Mistake, nearest

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


def recipe_names() -> list[str]:
    """The names a command accepts in place of a path."""
    return sorted(path.parent.name for path in RECIPES.glob("*/recipe.yaml"))


def read_config(name: str | Path, mistakes: list[Mistake]) -> Layer:
    """The leaves of a file or of a shipped recipe. A file of the same name wins."""
    path = Path(name)
    try:
        is_directory, is_there = path.is_dir(), path.exists()
    except OSError as error:
        mistakes.append(Mistake(shorten(str(path)), f"cannot be read: {error.strerror}"))
        return {}
    if is_there and not is_directory:
        return read_file(path, mistakes)
    if str(name) in recipe_names():
        return read_file(RECIPES / path / "recipe.yaml", mistakes, name=f"recipe {name}")
    problem = "is a directory" if is_directory else "no such file or recipe"
    mistakes.append(Mistake(shorten(str(path)), problem, fix=_missing_file_hint(path, is_directory)))
    return {}


def _missing_file_hint(path: Path, is_directory: bool) -> str:
    beside = path if is_directory else path.parent
    files = sorted(str(file) for file in beside.glob("*.y*ml")) if beside.is_dir() else []
    if is_directory and files:
        return f"give a file: {', '.join(files[:5])}"
    return nearest(str(path), [*files, *recipe_names()]) or f"give a YAML file or a recipe: {', '.join(recipe_names())}"


_EXPERIMENT = ("logging", "experiment_name")


class LegacyKeyWarning(UserWarning):
    """A config uses another framework's spelling of a key; the message names ours."""


class ConfigWarning(UserWarning):
    """A config that works, and is perhaps not what was meant; the message names the key and the fix."""


def load(
    files: Sequence[str | FilePath] | str | FilePath = (),
    overrides: Iterable[str] = (),
    *,
    sft: bool = False,
    rollout: bool = False,
) -> Config:
    """The config that `files` (paths or recipe names, later ones win) and then `key=value` words describe.

    A config with an `sft` section, or any with `sft`, is an SFTRunConfig, one with a `trainer` section a TrainConfig.
    With `rollout` it is a Config, whatever else the files have: for a rollout that stands alone, where the rules of
    training do not apply. One whose `sft` has sections of its own is both (`stages.py`): `sft` says which of them.
    Raises ConfigError with every mistake there is.
    """
    mistakes: list[Mistake] = []
    names = [files] if isinstance(files, str | FilePath) else files
    layers = [read_config(name, mistakes) for name in names]
    if sft and not any(path[0] == "sft" for layer in layers for path in layer):
        layers.insert(0, {("sft",): Leaf({}, Origin(Source.CODE, "treadle sft"))})
    given = _read_overrides(overrides, mistakes)
    if not any(_EXPERIMENT in layer for layer in (*layers, *given)):
        layers = [*_named_after(names), *layers]
    if not has_stages((*layers, *given)):
        return build([*layers, *given], mistakes, rollout=rollout)
    if sft:
        return build([*first_stage(layers), own_names([*layers, *given]), *first_stage(given)], mistakes)
    return build(second_stage([*layers, *given], mistakes), mistakes, rollout=rollout)


def _named_after(files: Sequence[str | FilePath]) -> list[Layer]:
    """A default that comes before every file: the experiment is called what its files are called."""
    name = "+".join(FilePath(file).stem for file in files)
    origin = Origin(Source.DEFAULT, f"the name of {', '.join(map(str, files))}")
    return [{_EXPERIMENT: Leaf(name, origin)}] if name else []


def loads(text: str, name: str = "text", overrides: Iterable[str] = ()) -> Config:
    """The config that YAML text describes; `name` stands for the file in origins and errors."""
    mistakes: list[Mistake] = []
    layers = [read_text(text, name, mistakes), *_read_overrides(overrides, mistakes)]
    return build(second_stage(layers, mistakes) if has_stages(layers) else layers, mistakes)


def _read_overrides(overrides: Iterable[str], mistakes: list[Mistake]) -> list[Layer]:
    """A layer for each word, so that a later one may replace part of an earlier one."""
    words = [overrides] if isinstance(overrides, str) else overrides
    return [read_words([word], mistakes) for word in words]


def build(layers: Sequence[Layer], mistakes: list[Mistake], *, rollout: bool = False) -> Config:
    """The config that layers of leaves describe. `mistakes` are those found in reading them; `rollout`: see `load`."""
    unread, found = tuple(mistakes), list[Mistake]()
    translation = legacy.translate(layers)
    found.extend(translation.mistakes)
    for warning in translation.warnings:
        warnings.warn(LegacyKeyWarning(warning), stacklevel=3)
    merged = merge(translation.layers, _is_section_path, found)
    drawn = bind(merged.tree, found)
    resolve(drawn, found)
    missing: list[Mistake] = []
    config = _Builder(merged.overrode, found, missing).section(drawn)
    assert isinstance(config, Config), "the root of an outline is a config"
    if rollout:
        config = config.without_training()
    if not unread:  # what could not be read may well have said what is missing
        found.extend((*check_rules(config), *missing))
    if unread or found:
        raise ConfigError((*unread, *_in_reading_order(found, layers)))
    for caution in _in_reading_order(check_cautions(config), layers):
        warnings.warn(ConfigWarning(str(caution)), stacklevel=3)
    return config


def _is_section_path(path: KeyPath) -> bool:
    return any(is_section(hint) for hint in hints_at(SFTRunConfig, path))


def _in_reading_order(mistakes: Iterable[Mistake], layers: Sequence[Layer]) -> list[Mistake]:
    """Files from left to right and top to bottom, then command-line overrides, then defaults."""
    sources = [_source(leaf.origin)[0] for layer in layers for leaf in layer.values()]
    order = {name: at for at, name in enumerate(dict.fromkeys(sources))}

    def place(mistake: Mistake) -> tuple[int, int]:
        name, line = _source(mistake.origin) if isinstance(mistake.origin, Origin) else ("", 0)
        return order.get(name, len(order)), line

    return sorted(mistakes, key=place)


def _source(origin: Origin) -> tuple[str, int]:
    """The file and line, or the command-line override, of a value."""
    name, _, line = origin.place.rpartition(":")
    return (name, int(line)) if origin.source is Source.FILE else (origin.place, 0)


class _Builder:
    """Checks values and builds sections from the inside out. A value with a mistake is unknown, so that the rules
    can still check the others."""

    def __init__(
        self, overrode: Mapping[KeyPath, tuple[Leaf, ...]], mistakes: list[Mistake], missing: list[Mistake]
    ) -> None:
        self._overrode = overrode
        self._mistakes = mistakes
        self._missing = missing

    def section(self, drawn: SectionOutline) -> Section:
        values: dict[str, Any] = {}
        traces = {TARGET: Trace(drawn.target.origin, self._overrode.get((*drawn.path, TARGET), ()))}
        for name, part in drawn.parts.items():
            path = (*drawn.path, name)
            if isinstance(part, SectionOutline):
                values[name] = self.section(part)
            elif isinstance(part, KeySlot):
                values[name] = self._value(path, part)
                traces.update(self._traces(path, name, part))
            else:
                values[name] = FrozenDict({inner: self.section(below) for inner, below in part.items()})
        return drawn.cls.with_traces(values, traces)

    def _value(self, path: KeyPath, slot: KeySlot) -> Any:
        if slot.broken:
            return UNKNOWN
        if not slot.leaves:
            fix = f"set {dotted(path)} in a file or on the command line"
            self._missing.append(Mistake(dotted(path), f"is required: {slot.key.description}", fix=fix))
            return UNKNOWN
        undecided = next((leaf for leaf in slot.leaves.values() if leaf.value == UNDECIDED), None)
        if undecided is not None:
            problem = f"is {UNDECIDED}, which stands for a value that has to be decided: {slot.key.description}"
            self._mistakes.append(Mistake(dotted(path), problem, UNDECIDED, undecided.origin, "write the value there"))
            return UNKNOWN
        raw = {below: _as_text(leaf, slot.hint) for below, leaf in slot.leaves.items()}
        given = raw[()] if () in raw else nested(raw)
        checked = check_value(given, slot.hint, slot.key.bounds)
        if checked.problem:
            origin = next(iter(slot.leaves.values())).origin
            self._mistakes.append(Mistake(dotted(path), checked.problem, given, origin, _mend(given, slot)))
            return UNKNOWN
        return checked.value

    def _traces(self, path: KeyPath, name: str, slot: KeySlot) -> dict[str, Trace]:
        return {
            dotted((name, *below)): Trace(leaf.origin, self._overrode.get((*path, *below), ()))
            for below, leaf in slot.leaves.items()
        }


def _as_text(leaf: Leaf, hint: Any) -> Any:
    """A plain scalar takes the type of its key: `experiment_name: 007` is the string 007."""
    if not _takes_text(hint):
        return leaf.value
    if isinstance(leaf.text, tuple):
        return [_one_as_text(item, text) for item, text in zip(leaf.value, leaf.text, strict=True)]
    return _one_as_text(leaf.value, leaf.text)


def _takes_text(hint: Any) -> bool:
    """Whether a key holds a string, or a list or a map of them."""
    arguments = get_args(hint)
    return hint is str or (arguments[1] is str if is_free_map(hint) else str in arguments)


def _one_as_text(value: Any, text: str | None) -> Any:
    return text if text is not None and isinstance(value, bool | int | float) else value


def _mend(given: Any, slot: KeySlot) -> str | None:
    if not isinstance(given, str):
        return None
    meant = nearest(given, choices(slot.hint, slot.key.bounds))
    plain = given.strip()
    fits = plain and check_value(read_scalar(plain), slot.hint, slot.key.bounds).problem is None
    return meant or (f"write {plain} without quotes or spaces" if fits else None)
