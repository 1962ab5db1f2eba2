"""`treadle timeline`: a picture of who sampled, who trained and who waited."""

from pathlib import Path

from treadle.cli.parser import Arguments, Commands, add_command
from treadle.terminal import say


def register(commands: Commands) -> None:
    command = add_command(commands, "timeline", timeline, "example: treadle timeline runs/treadle/calculator")
    command.add_argument("run_dir", metavar="RUN", type=Path, help="run directory of a training run, live or over")


def timeline(arguments: Arguments) -> int:
    """Draw a training run over time, as timeline.svg in its directory: sessions, steps, waits, weights, validations.

    Every run draws it when it ends; this command draws it again, also while the run goes on.
    """
    from treadle.trainer.timeline import write_timeline

    say(write_timeline(arguments.run_dir))
    return 0
