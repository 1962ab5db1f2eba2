"""Finds the command in a script that launches verl, and the words it is given.

Owns which programs are verl's and what each of them runs. Knows nothing about keys.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from treadle.config.legacy.shell.grammar import parse
from treadle.config.legacy.shell.interpreter import HOME, Expanded, Interpreter
from treadle.errors import ConfigError, Mistake, nearest
from treadle.types import NOTHING

MODULES: tuple[tuple[str, str], ...] = (
    (r"(verl\.experimental|recipe)\.fully_async_policy\.\w+", "fully_async"),
    (r"(verl\.experimental|recipe)\.one_step_off_policy\.\w+", "one_step_off"),
    (r"verl\.trainer\.main_ppo(_v0|_sync)?", "main_ppo"),
    (r"recipe\.dapo\.main_dapo", "main_ppo"),
)
"""Programs of verl, and which assumptions of verl they run under."""

ELSEWHERE: tuple[tuple[str, str], ...] = (
    (r"verl\.trainer\.(\w*sft\w*)", "There is no supervised fine-tuning."),
    (r"verl\.trainer\.main_generation\w*", "To sample without training, use `treadle rollout`."),
    (r"verl\.trainer\.main_eval", "To sample and score, use `treadle eval`."),
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
    words: list[Expanded] = field(default_factory=list)
    flags: dict[str, Expanded] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_launch(text: str, given: Mapping[str, str] = NOTHING) -> Launch | None:
    """The first command of a script that launches verl; None if there is none. `given` are variables of the caller."""
    found: list[Launch] = []

    def launched(words: Sequence[Expanded], line: int) -> bool:
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


def _launch(words: Sequence[Expanded], line: int) -> Launch | None:
    for at, word in enumerate(words):
        module = _module(words, at)
        known = next((recipe for pattern, recipe in MODULES if re.fullmatch(pattern, module)), None)
        reason = next((reason for pattern, reason in ELSEWHERE if re.fullmatch(pattern, module)), "")
        if known or reason:
            launch = Launch(module, word.line or line, known or "main_ppo", "" if known else reason)
            _take_words(launch, words[at + 1 :])
            return launch
    return None


def _module(words: Sequence[Expanded], at: int) -> str:
    """The module that `python -m MODULE` or `python path/to/module.py` names at this word, if it does."""
    text = words[at].text
    if at and words[at - 1].text == "-m":
        return text
    name = text.removesuffix(".py").replace("/", ".").lstrip(".")
    start = re.search(r"(?:^|\.)((?:verl|recipe)\..+)$", name)
    return start.group(1) if text.endswith(".py") and start else ""


def _take_words(launch: Launch, words: Sequence[Expanded]) -> None:
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


def _at_home(word: Expanded) -> Expanded:
    """`$HOME` at the start of a path is `~`; anywhere else its value is not known."""
    text = re.sub(rf"(^|[=\[,'\"\s]){HOME}(?=$|[/,\]'\"\s])", r"\1~", word.text)
    if HOME not in text:
        return replace(word, text=text)
    unknown = (*word.unknown, "$HOME has no value in the script")
    return replace(word, text=text.replace(HOME, "$HOME"), unknown=unknown)
