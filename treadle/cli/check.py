"""`treadle check`: everything about a run that can be known without running it."""

import os
import sys
from typing import TYPE_CHECKING

from treadle.cli.parser import Arguments, Commands, add_command, add_words, load_words
from treadle.errors import ConfigError, Mistake
from treadle.terminal import say, warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treadle.config import Config, Plan


def register(commands: Commands) -> None:
    examples = """
    It reads every task, renders every prompt, imports what the config names, starts MCP servers and reward workers,
    scores the first task with its ground truth and with an empty answer, looks at the model, memory, disk, ports and
    keys, prints the first prompt as the model reads it, and ends with what a step will do. Nothing is sampled or
    trained, no run directory is made. `treadle train` and `treadle rollout` begin with the quick part of it;
    `treadle config check` looks at the config alone, at once.

    examples:
      treadle check calculator
      treadle check my.yaml trainer.mode=fully_async rollout.nnodes=1
    """
    add_words(add_command(commands, "check", check, examples))


def check(arguments: Arguments) -> None:
    """Check a config, its data, imports, tools, rewards, model and machine before a run.

    Status 0 when nothing is wrong, 2 with every mistake in one report.
    """
    config = load_words(arguments.words)

    from treadle.preflight.checks import inspect_run

    report = inspect_run(config, os.environ, thorough=True)
    plan, problems = _plan(config)
    say(report.describe())
    if plan is not None:
        from treadle.cli.plan import describe_plan

        say(f"\n{describe_plan(config, plan)}")
    if mistakes := [*report.mistakes, *problems]:
        sys.stdout.flush()
        raise ConfigError(mistakes)
    say("\nfine: nothing is wrong as far as can be known without running it")


def require_preflight(config: "Config") -> None:
    """The quick part, for commands that go on: mistakes end them, warnings are told."""
    from treadle.preflight.checks import inspect_run

    report = inspect_run(config, os.environ, thorough=False)
    if report.mistakes:
        raise ConfigError(report.mistakes)
    for warning in report.warnings:
        warn(f"warning: {warning}")


def _plan(config: "Config") -> "tuple[Plan | None, Sequence[Mistake]]":
    from treadle.cli.machines import find_machines
    from treadle.config import make_plan

    try:
        return make_plan(config, find_machines(config.cluster)), ()
    except ConfigError as error:
        return None, error.mistakes
