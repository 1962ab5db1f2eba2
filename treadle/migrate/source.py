"""Migration source: the layers of a verl YAML file, or of the overrides a script launches verl with.

Owns which programs are verl's and what each of them runs, and verl's own config files and groups.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from treadle.config.parse import Layer, read_file, read_words
from treadle.config.section import Leaf, Origin
from treadle.config.section import Source as OriginSource
from treadle.errors import ConfigError, Mistake, nearest
from treadle.migrate.report import MigratedKey
from treadle.migrate.rule import RuleKind
from treadle.migrate.shell.expansion import HOME, ExpandedWord
from treadle.migrate.shell.interpreter import Interpreter
from treadle.migrate.shell.parser import parse
from treadle.types import NOTHING

MODULES: tuple[tuple[str, str], ...] = (
    (r"(verl\.experimental|recipe)\.fully_async_policy\.\w+", "fully_async"),
    (r"(verl\.experimental|recipe)\.one_step_off_policy\.\w+", "one_step_off"),
    (r"verl\.trainer\.main_ppo(_v0|_sync)?", "main_ppo"),
    (r"recipe\.dapo\.main_dapo", "main_ppo"),
)
"""Programs of verl, and which assumptions of verl they run under."""

ELSEWHERE: tuple[tuple[str, str], ...] = (
    (r"verl\.trainer\.(\w*sft\w*)", "For supervised fine-tuning, use `treadle sft` (docs/sft.md)."),
    (r"verl\.trainer\.main_generation\w*", "To sample without training, use `treadle rollout`."),
    (r"verl\.trainer\.main_eval", "To sample and score, use `treadle rollout`."),
    (r"verl\.model_merger", "Checkpoints are written in Hugging Face's layout; there is nothing to merge."),
    (r"recipe\.[\w.]+", "This recipe has a trainer of its own; its keys are read as those of verl.trainer.main_ppo."),
    (r"verl\.[\w.]+", "This program of verl's is not known here."),
)

FLAGS = {"--config-path": "config_path", "-cp": "config_path", "--config-name": "config_name", "-cn": "config_name"}


@dataclass(slots=True)
class Launch:
    """One launch of verl: which program, under which assumptions, with which words."""

    module: str
    line: int
    recipe: str = "main_ppo"
    problem: str = ""
    """Why the program has no counterpart, if it has none."""
    words: list[ExpandedWord] = field(default_factory=list)
    flags: dict[str, ExpandedWord] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_launch(text: str, given: Mapping[str, str] = NOTHING) -> Launch | None:
    """The first command of a script that launches verl; None if there is none. `given` are variables of the caller."""
    found: list[Launch] = []

    def launched(words: Sequence[ExpandedWord], line: int) -> bool:
        launch = _launch(words, line)
        if launch is None:
            return False
        if found:
            found[0].notes.append(f"line {launch.line}: launches {launch.module} again; only the first launch is read")
        else:
            found.append(launch)
        return True

    interpreter = Interpreter(given, launched)
    interpreter.run(parse(text))
    unread = [name for name in given if name not in interpreter.read]
    if unread:
        raise ConfigError(
            [
                Mistake(f"--set {name}", f"the script has no ${name}", fix=nearest(name, interpreter.read))
                for name in unread
            ]
        )
    if not found:
        return None
    found[0].notes[:0] = interpreter.notes
    return found[0]


def _launch(words: Sequence[ExpandedWord], line: int) -> Launch | None:
    for at, word in enumerate(words):
        module = _module(words, at)
        known = next((recipe for pattern, recipe in MODULES if re.fullmatch(pattern, module)), None)
        reason = next((reason for pattern, reason in ELSEWHERE if re.fullmatch(pattern, module)), "")
        if known or reason:
            launch = Launch(module, word.line or line, known or "main_ppo", "" if known else reason)
            _take_words(launch, words[at + 1 :])
            return launch
    return None


def _module(words: Sequence[ExpandedWord], at: int) -> str:
    """The module that `python -m MODULE` or `python path/to/module.py` names at this word, if it does."""
    text = words[at].text
    if at and words[at - 1].text == "-m":
        return text
    name = text.removesuffix(".py").replace("/", ".").lstrip(".")
    start = re.search(r"(?:^|\.)((?:verl|recipe)\..+)$", name)
    return start.group(1) if text.endswith(".py") and start else ""


def _take_words(launch: Launch, words: Sequence[ExpandedWord]) -> None:
    rest = iter(words)
    launch.notes.extend(dict.fromkeys(note for word in words for note in word.notes))
    for word in rest:
        name, equals, value = word.text.partition("=")
        if name in FLAGS:
            launch.flags[FLAGS[name]] = replace(word, text=value) if equals else next(rest, word)
        elif word.text.startswith("-"):
            launch.notes.append(f"line {word.line}: the flag {word.text} is Hydra's and has no counterpart")
        elif word.text:
            launch.words.append(_at_home(word))


def _at_home(word: ExpandedWord) -> ExpandedWord:
    """`$HOME` at the start of a path is `~`; anywhere else its value is not known."""
    text = re.sub(rf"(^|[=\[,'\"\s]){HOME}(?=$|[/,\]'\"\s])", r"\1~", word.text)
    if HOME not in text:
        return replace(word, text=text)
    unknown = (*word.unknown, "$HOME has no value in the script")
    return replace(word, text=text.replace(HOME, "$HOME"), unknown=unknown)


GROUPS = {
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "rollout": "actor_rollout_ref.rollout",
    "model": "actor_rollout_ref.model",
    "optim": "actor_rollout_ref.actor.optim",
    "data": "data",
    "critic": "critic",
    "reward": "reward",
    "algorithm": "algorithm.rollout_correction",
    "distillation": "distillation",
    "transfer_queue": "transfer_queue",
    "profiler": "global_profiler",
    "npu_profile": "trainer.npu_profile",
}
"""Where verl mounts the files of a config group, by the name of their folder."""

_TIGHT_COLON = re.compile(r"(?<=\w):(?=[^\s/])")

WHOLE = frozenset({"actor_rollout_ref", "trainer", "data", "algorithm", "critic", "async_training"})
"""A file with one of these at the top is no part of a group, whatever its folder is called."""

ENGINES = {"fsdp": "fsdp_config", "megatron": "megatron", "veomni": "veomni", "torchtitan": "torchtitan"}

VERLS_FILES = {
    "ppo_trainer": "main_ppo",
    "ppo_megatron_trainer": "main_ppo",
    "fully_async_ppo_trainer": "fully_async",
    "fully_async_ppo_megatron_trainer": "fully_async",
    "one_step_off_ppo_trainer": "one_step_off",
    "one_step_off_ppo_megatron_trainer": "one_step_off",
}
"""verl's own top-level files, and the assumptions they stand for."""

MEGATRON = "There is no Megatron backend: networks train on one device or with FSDP2 (fsdp_config)."


@dataclass(slots=True)
class MigrationSource:
    """Old keys in layers, and everything around them that a report must mention."""

    name: str
    layers: list[Layer] = field(default_factory=list)
    recipe: str | None = None
    """Whose assumptions of verl's hold for keys that are not named; None if every key is."""
    unknown: dict[str, ExpandedWord] = field(default_factory=dict)
    entries: list[MigratedKey] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def report(self, old: str, kind: RuleKind, before: Any, reason: str, line: int) -> None:
        self.entries.append(MigratedKey(old, kind, (), before, None, reason, f"{self.name}:{line}"))


def read_source(path: FilePath, mistakes: list[Mistake], variables: Mapping[str, str]) -> MigrationSource:
    """The source at `path`: YAML by its ending, anything else is a script."""
    if path.suffix in (".yaml", ".yml"):
        if variables:
            mistakes.append(Mistake("--set", "gives variables of a launch script, and this is a YAML file"))
        return _read_yaml(path, mistakes)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        mistakes.append(Mistake(str(path), f"cannot be read: {error.strerror}"))
        return MigrationSource(str(path))
    except UnicodeDecodeError:
        mistakes.append(Mistake(str(path), "cannot be read: it is not UTF-8 text"))
        return MigrationSource(str(path))
    launch = read_launch(text, variables)
    if launch is None:
        fix = "a line such as `python3 -m verl.trainer.main_ppo key=value …` is looked for"
        mistakes.append(Mistake(str(path), "launches no program of verl's", fix=fix))
        return MigrationSource(str(path))
    return _read_launch(path, launch, mistakes)


def _read_yaml(path: FilePath, mistakes: list[Mistake]) -> MigrationSource:
    source = MigrationSource(str(path))
    layer = read_file(path, mistakes)
    defaults = layer.pop(("defaults",), None)
    source.layers = [_mounted(layer, path)]
    if defaults is not None:
        _read_defaults(source, defaults, path)
    if any(name[0] == "async_training" for name in layer):
        source.recipe = source.recipe and "fully_async"
    elif ("rollout", "nnodes") in layer and source.recipe:
        source.recipe = "one_step_off"
    return source


def _mounted(layer: Layer, path: FilePath) -> Layer:
    """A file of a config group, with its keys where verl would put them."""
    folder = path.parent.name
    prefix = GROUPS.get(folder)
    if folder == "engine":
        prefix = f"actor_rollout_ref.actor.{ENGINES[path.stem]}" if path.stem in ENGINES else "engine"
    if prefix is None or any(name[0] in WHOLE for name in layer):
        return layer
    parts = tuple(prefix.split("."))
    return {(*parts, *name): leaf for name, leaf in layer.items()}


def _read_defaults(source: MigrationSource, leaf: Leaf, path: FilePath) -> None:
    """Hydra's list of defaults: verl's own are written out as far as they differ; other files are named."""
    names = [str(item) for item in leaf.value or ()] if isinstance(leaf.value, Sequence) else []
    line = int(str(leaf.origin.place).rpartition(":")[2] or 0)
    known = [name for name in VERLS_FILES if name in names]
    if known or path.stem in VERLS_FILES:
        source.recipe = VERLS_FILES[known[0] if known else path.stem]
    elif any("@actor_rollout_ref" in name for name in names):  # a copy of ppo_trainer.yaml under another name
        source.recipe = "main_ppo"
    others = [name for name in names if not _is_verls_own(name)]
    if others or "megatron" in str(names):
        reason = MEGATRON if not others else f"Migrate the files behind {', '.join(others)} too, and list them."
        source.report("defaults", RuleKind.NONE, names, reason, line)
    else:
        note = (
            "verl's own defaults are written out where ours differ" if source.recipe else "the other keys are elsewhere"
        )
        source.report("defaults", RuleKind.MAPPED, names, note, line)


def _is_verls_own(name: str) -> bool:
    """A name verl ships: one of its files, `_self_`, or a choice within one of its groups."""
    group = re.match(r"\{'(?:override )?(?:\.\./)?/?(\w+)", name)
    plain = name in VERLS_FILES or name in ("_self_", "legacy_reward_impl") or name in GROUPS
    return plain or (group is not None and group.group(1) in (*GROUPS, "engine", "model_engine"))


def _read_launch(path: FilePath, launch: Launch, mistakes: list[Mistake]) -> MigrationSource:
    source = MigrationSource(str(path), recipe=launch.recipe, notes=list(launch.notes))
    place = f"python -m {launch.module}"
    if launch.problem:
        source.report(place, RuleKind.NONE, None, launch.problem, launch.line)
    else:
        source.notes.append(f"line {launch.line}: {place}")
    source.layers = [*_base(source, launch, path, mistakes), _take_overrides(source, launch)]
    return source


def _base(source: MigrationSource, launch: Launch, path: FilePath, mistakes: list[Mistake]) -> list[Layer]:
    """The file that --config-name chooses, where it can be found beside the script."""
    name, folder = launch.flags.get("config_name"), launch.flags.get("config_path")
    if folder is not None:
        source.report("--config-path", RuleKind.MAPPED, folder.text, "where --config-name is looked for", folder.line)
    if name is None:
        return []
    stem = name.text.removesuffix(".yaml")
    if stem in VERLS_FILES:
        source.recipe = VERLS_FILES[stem]
        reason = MEGATRON if "megatron" in stem else "verl's own file; its values are written out where ours differ"
        source.report(
            "--config-name", RuleKind.NONE if "megatron" in stem else RuleKind.MAPPED, stem, reason, name.line
        )
        return []
    found = _find(path.parent, folder.text if folder else "", f"{stem}.yaml") if not name.unknown else None
    if found is None:
        reason = f"{stem}.yaml is not here to be read: migrate it too, and list its result first."
        source.report("--config-name", RuleKind.NONE, stem, reason, name.line)
        return []
    inner = _read_yaml(found, mistakes)
    source.entries.extend(inner.entries)
    source.report("--config-name", RuleKind.MAPPED, stem, f"read from {found}", name.line)
    return inner.layers


def _find(beside: FilePath, folder: str, name: str) -> FilePath | None:
    places = [beside / folder / name, FilePath(folder) / name]
    return next((place for place in places if place.is_file()), None)


def _take_overrides(source: MigrationSource, launch: Launch) -> Layer:
    layer: Layer = {}
    for word in launch.words:
        key = re.sub(r"^(\+{1,2}|~)", "", word.text.partition("=")[0])
        if word.unknown or word.only_if:
            source.unknown[key] = word
            layer.pop(tuple(key.split(".")), None)
            continue
        source.unknown.pop(key, None)  # a later word wins
        problems: list[Mistake] = []
        text = word.text.partition("=")[0] if word.text.startswith("~") else _spaced(word.text)
        for path, leaf in read_words([text], problems).items():
            origin = Origin(OriginSource.FILE, f"{source.name}:{word.line}", leaf.origin.via)
            layer[path] = Leaf(leaf.value, origin, leaf.text)
        source.notes.extend(f"line {word.line}: {problem.key} {problem.problem}" for problem in problems)
    return layer


def _spaced(word: str) -> str:
    """Hydra reads `{a:1}` as a map; YAML wants a space there."""
    key, equals, value = word.partition("=")
    return f"{key}{equals}{_TIGHT_COLON.sub(': ', value)}" if value.startswith("{") else word
