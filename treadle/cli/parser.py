"""Command-line parsing shared by all commands: help that keeps its examples, and words that name configs.

The standard library's parser: it starts in milliseconds, where the popular ones import for longer than most of our
commands run.
"""

import argparse
import re
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from treadle.terminal import warn

if TYPE_CHECKING:
    from treadle.config import Config

_CHOICES = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """The standard library's parser; a word that is nearly one of its choices is answered with that one."""

    def error(self, message: str) -> NoReturn:
        if found := _CHOICES.search(message):
            near = get_close_matches(found[1], [word.strip(" '") for word in found[2].split(",")], 1)
            message += f"\ndid you mean {near[0]!r}?" if near else ""
        super().error(message)


Commands = Any
"""What `add_subparsers` returns; argparse gives it no public name."""

Arguments = argparse.Namespace


def new_parser(name: str, description: str, examples: str) -> Parser:
    """The parser of the whole command."""
    return Parser(
        prog=name,
        description=description,
        epilog=cleandoc(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_command(commands: Commands, name: str, run: Callable[[Arguments], int | None], examples: str) -> Parser:
    """A command whose help is its function's docstring, with examples below."""
    doc = cleandoc(run.__doc__ or "")
    parser: Parser = commands.add_parser(
        name,
        help=doc[0].lower() + doc.partition("\n")[0].removesuffix(".")[1:],
        description=doc,
        epilog=cleandoc(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def parse(parser: Parser, arguments: list[str]) -> Arguments:
    """Parse a command line. Words may also stand after options, which argparse alone does not allow."""
    parsed, rest = parser.parse_known_args(arguments)
    if rest and ("words" not in parsed or any(word.startswith("-") for word in rest)):
        parsed.parser.error(f"unknown: {' '.join(rest)}")
    parsed.words = [*getattr(parsed, "words", ()), *rest]
    return parsed


def add_words(parser: Parser, metavar: str = "CONFIG | KEY=VALUE", *, what: str = "files or recipes") -> None:
    """The configs and overrides most commands take."""
    parser.add_argument("words", nargs="+", metavar=metavar, help=f"{what}, then values that win")


LATEST = "latest"
"""Stands for the newest run below `runs/` where a command takes a run directory."""


def run_path(word: str) -> Path:
    """The run directory that a word names; `latest`, where no directory has that name, is the newest one."""
    if word != LATEST or Path(word).exists():
        return Path(word)
    from treadle.errors import ConfigError, Mistake
    from treadle.inspect.run_records import newest_runs

    runs = newest_runs()
    if not runs:
        fix = "give the directory of a run, or start one: treadle train calculator"
        raise ConfigError([Mistake(word, "there are no runs below runs/", fix=fix)])
    return runs[0]


def run_argument(word: str) -> Path:
    """`run_path` as the type of an argument, which argparse asks for its own error."""
    try:
        return run_path(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def load_words(words: list[str], *, sft: bool = False, rollout: bool = False) -> "Config":
    """The config that words on the command line describe; warnings go to standard error. The rest: as `load` has it."""
    from treadle.config import ConfigWarning, LegacyKeyWarning, load

    overrides = [word for word in words if _is_override(word)]
    files = [word for word in words if not _is_override(word)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", LegacyKeyWarning)
        warnings.simplefilter("always", ConfigWarning)
        try:
            return load(files, overrides, sft=sft, rollout=rollout)
        finally:
            for warning in caught:
                warn(f"warning: {warning.message}")


def _is_override(word: str) -> bool:
    """Whether a word gives a value; a path such as runs/lr=1e-4/config.yaml names a file."""
    return word[:1] in ("~", "+") or ("=" in word and not word.endswith((".yaml", ".yml")))
