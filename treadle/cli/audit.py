"""`treadle audit`: proof that a run lost nothing and trained nothing twice."""

from pathlib import Path

from treadle.cli.parser import Arguments, Commands, add_command
from treadle.terminal import say

MAX_SHOWN = 20


def register(commands: Commands) -> None:
    command = add_command(commands, "audit", audit, "example: treadle audit runs/treadle/calculator")
    command.add_argument("run_dir", metavar="RUN", type=Path, help="run directory of a training run")


def audit(arguments: Arguments) -> int:
    """Prove from a run's journal that no task was skipped and none trained twice (status 1 where one was).

    Counts across every start of the run: what was killed and resumed is followed back to the checkpoint it went on
    from.
    """
    from treadle.trainer.audit import audit as keep_books

    found = keep_books(arguments.run_dir)
    say(f"starts     {found.starts}")
    say(f"steps      {found.steps}")
    say(f"tasks      {found.trained} trained, {found.removed} removed, {found.open} open")
    say(f"undone     {found.trained_again} were trained in steps that a crash undid, and trained again")
    say(f"reused     {found.reused} finished trajectories, {found.continued} half-generated ones continued")
    for problem in found.problems[:MAX_SHOWN]:
        say(f"PROBLEM    {problem}")
    if len(found.problems) > MAX_SHOWN:
        say(f"           and {len(found.problems) - MAX_SHOWN} more")
    if not found.problems:
        say("none skipped, none trained twice")
    return 1 if found.problems else 0
