"""`treadle audit`: proof that a run lost nothing and trained nothing twice."""

from pathlib import Path

from treadle.cli.parser import Arguments, Commands, add_command

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
    print(f"starts     {found.starts}")
    print(f"steps      {found.steps}")
    print(f"tasks      {found.trained} trained, {found.removed} removed, {found.open} open")
    print(f"undone     {found.trained_again} were trained in steps that a crash undid, and trained again")
    print(f"reused     {found.reused} finished trajectories, {found.continued} half-generated ones continued")
    for problem in found.problems[:MAX_SHOWN]:
        print(f"PROBLEM    {problem}")
    if len(found.problems) > MAX_SHOWN:
        print(f"           and {len(found.problems) - MAX_SHOWN} more")
    if not found.problems:
        print("none skipped, none trained twice")
    return 1 if found.problems else 0
