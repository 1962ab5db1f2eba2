"""`treadle train`: an agent that learns."""

import asyncio
import sys
from typing import TYPE_CHECKING

from treadle.cli.check import require_preflight
from treadle.cli.environment import read_api_keys
from treadle.cli.parser import Arguments, Commands, add_command, add_words, load_words
from treadle.errors import ConfigError, Mistake
from treadle.terminal import cell, make_console, say, warn

if TYPE_CHECKING:
    from treadle.cluster.training import TrainingResult
    from treadle.config import TrainConfig
    from treadle.types import Trajectory

STATUS_INTERRUPTED = 130


def register(commands: Commands) -> None:
    examples = """
    examples:
      treadle train calculator                                 two minutes on two cores
      treadle train calculator trainer.total_training_steps=20 rollout.n=4
      treadle train my.yaml logging.logger=[console,tensorboard]

    Everything is kept in logging.run_dir. Ctrl-C, SIGTERM and SIGHUP save; the same command goes on from there. A
    directory whose run had another model, other tasks or other settings is refused with what changed.
    """
    command = add_command(commands, "train", train, examples)
    add_words(command)
    command.add_argument("--fresh", action="store_true", help="rename the run directory to RUN.1, .2, … and begin anew")
    command.add_argument("--allow-changes", action="store_true", help="go on with settings that changed since")


def train(arguments: Arguments) -> int:
    """Train a model with the agent loops, tools and rewards of a config.

    Status 0 when the run is done, 130 when interrupted.
    """
    from treadle.cli.environment import find_machines
    from treadle.cli.plan import describe_plan
    from treadle.config import TrainConfig, make_plan

    config = load_words(arguments.words)
    if not isinstance(config, TrainConfig):
        fix = "add `trainer: {}` to train, or use treadle rollout"
        raise ConfigError([Mistake("trainer", "this config has no trainer section: it is a rollout", fix=fix)])
    require_preflight(config)
    warn(describe_plan(config, make_plan(config, find_machines(config.cluster))))
    result = _train(config, arguments)
    _print_result(result)
    return STATUS_INTERRUPTED if result.interrupted else 0


def _train(config: "TrainConfig", arguments: Arguments) -> "TrainingResult":
    from treadle.cluster.training import train as train_here
    from treadle.data.tasks import load_training_tasks
    from treadle.observe.training_progress import TrainingView
    from treadle.trainer.terms import total_steps

    steps, quiet = total_steps(config, load_training_tasks(config.data)), "console" not in config.logging.logger
    with TrainingView(steps, quiet=quiet) as view:
        changes = {"fresh": arguments.fresh, "allow_changes": arguments.allow_changes}
        return asyncio.run(train_here(config, view, sys.argv, read_api_keys(config), **changes))


def _print_result(result: "TrainingResult") -> None:
    if len(result.validations) > 1:
        _print_comparison(result)
    say(f"\n{result.steps} steps, {result.trained} of them now; everything is in {result.run_dir}")
    if not result.trained and not result.interrupted and result.steps:
        say("nothing was trained: the run was done already (trainer.total_training_steps makes it longer)")
    for note in result.notes:
        say(f"note: {note}")
    if result.interrupted:
        say("interrupted and saved: the same command goes on from here")
    else:
        say(f"try next:  treadle replay {result.run_dir}    the same weights once more, from the journal")
        say("           treadle plan my.yaml              what your own config would do")


def _print_comparison(result: "TrainingResult") -> None:
    from rich.table import Table

    first, last = result.validations[0], result.validations[-1]
    table = Table("", f"before (step {first.step})", f"after (step {last.step})")
    table.add_row("success", f"{first.success:.3f}", f"{last.success:.3f}")
    for name, value in last.metrics().items():
        if name != "validation/success" and name in first.metrics():
            table.add_row(cell(name.removeprefix("validation/")), f"{first.metrics()[name]:.3f}", f"{value:.3f}")
    make_console().print(table)
    learned = [pair for pair in zip(first.trajectories, last.trajectories, strict=False) if _improved(*pair)]
    for before, after in sorted(learned, key=lambda pair: -pair[1].num_turns)[:2]:
        _print_transcripts(before, after)


def _improved(before: "Trajectory", after: "Trajectory") -> bool:
    return (before.reward.value if before.reward else 0) < (after.reward.value if after.reward else 0)


def _print_transcripts(before: "Trajectory", after: "Trajectory") -> None:
    for name, trajectory in (("before", before), ("after", after)):
        say(f"\n{name}, reward {trajectory.reward.value if trajectory.reward else 0:g}")
        for message in trajectory.messages:
            say(f"  {message['role']:9}  {message['content']}")
