"""`treadle train`: an agent that learns."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from treadle.cli.check import require_preflight
from treadle.cli.environment import read_api_keys
from treadle.cli.parser import Arguments, Commands, add_command, add_words, load_words
from treadle.cli.results import next_commands
from treadle.errors import ConfigError, Mistake
from treadle.terminal import cell, make_console, note, say

if TYPE_CHECKING:
    from treadle.cluster.signals import StopSignals
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
    from treadle.config import SFTRunConfig, TrainConfig

    config = load_words(arguments.words)
    if isinstance(config, SFTRunConfig):
        fix = (
            "train it with treadle sft; then treadle train with model.path=RUN goes on from its best checkpoint. For "
            "both in one file, put what is for fine-tuning alone inside sft, such as sft.data.train_files"
        )
        raise ConfigError([Mistake("sft", "this config has an sft section: it is supervised fine-tuning", fix=fix)])
    if not isinstance(config, TrainConfig):
        fix = "add `trainer: {}` to train, or use treadle rollout"
        raise ConfigError([Mistake("trainer", "this config has no trainer section: it is a rollout", fix=fix)])
    result = run_training(config, sys.argv, fresh=arguments.fresh, allow_changes=arguments.allow_changes)
    print_result(result)
    return STATUS_INTERRUPTED if result.interrupted else 0


def run_training(
    config: "TrainConfig",
    command: Sequence[str],
    *,
    fresh: bool = False,
    allow_changes: bool = False,
    on_signals: "Callable[[StopSignals], None] | None" = None,
) -> "TrainingResult":
    """Check, print the plan, train and show how it goes: the same for the command and for a call from Python."""
    import asyncio  # not before it is needed: help and mistakes do without

    from treadle.cli.environment import find_machines
    from treadle.cli.plan import describe_plan
    from treadle.cluster.training import train as train_here
    from treadle.config import make_plan
    from treadle.observe.training_progress import TrainingView

    tasks = require_preflight(config)
    note(describe_plan(config, make_plan(config, find_machines(config.cluster))))
    with TrainingView(quiet="console" not in config.logging.logger) as view:
        work = train_here(
            config,
            view,
            command,
            read_api_keys(config),
            fresh=fresh,
            allow_changes=allow_changes,
            on_signals=on_signals,
            tasks=tasks,
        )
        return asyncio.run(work)


def print_result(result: "TrainingResult") -> None:
    if len(result.validations) > 1:
        _print_comparison(result)
    say(f"\n{describe_end(result)}")
    if result.interrupted:
        say("interrupted and saved: the same command goes on from here")
    else:
        say(next_commands(result.run_dir))


def describe_end(result: "TrainingResult") -> str:
    """The last lines of a run before the commands that come next: steps, directory, notes and findings."""
    lines = [f"{result.steps} steps, {result.trained} of them now; everything is in {result.run_dir}"]
    if not result.trained and not result.interrupted and result.steps:
        lines.append("nothing was trained: the run was done already (trainer.total_training_steps makes it longer)")
    lines += [f"note: {text}" for text in result.notes]
    return "\n".join([*lines, *(f"look at: {text}" for text in result.findings)])


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
