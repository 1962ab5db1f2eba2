"""`treadle audit`, `treadle replay` and `treadle timeline`: what a run's journal proves and shows."""

from pathlib import Path
from typing import TYPE_CHECKING

from treadle.cli.parser import Arguments, Commands, add_command
from treadle.errors import ConfigError, Mistake
from treadle.terminal import say, warn

if TYPE_CHECKING:
    from treadle.inspect.replay import ReplayedStep

MAX_SHOWN = 20


def register_audit(commands: Commands) -> None:
    command = add_command(commands, "audit", audit, "example: treadle audit runs/treadle/calculator")
    command.add_argument("run_dir", metavar="RUN", type=Path, help="run directory of a training run")


def audit(arguments: Arguments) -> int:
    """Prove from a run's journal that no task was skipped and none trained twice (status 1 where one was).

    Counts across every start of the run: what was killed and resumed is followed back to the checkpoint it went on
    from.
    """
    from treadle.inspect.audit import audit as keep_books

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


def register_replay(commands: Commands) -> None:
    command = add_command(commands, "replay", replay, "example: treadle replay runs/treadle/calculator")
    command.add_argument("run_dir", metavar="RUN", type=Path, help="run directory of a training run")


def replay(arguments: Arguments) -> int:
    """Train again from a run's journal, and compare the weights after every step (status 1 where they differ)."""
    from treadle.config import TrainConfig, load

    resolved = arguments.run_dir / "config.yaml"
    if not resolved.is_file():
        fix = "give the directory that logging.run_dir named"
        raise ConfigError([Mistake(str(arguments.run_dir), "is no run directory: it has no config.yaml", fix=fix)])
    config = load(resolved)
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            [Mistake(str(arguments.run_dir), "is a rollout, not a training run: there is nothing to replay")]
        )

    from treadle.cluster.runtime import load_networks
    from treadle.inspect.replay import replay as replay_steps

    differing = 0
    for step in replay_steps(load_networks(config).step, arguments.run_dir):
        differing += not step.equal
        say(f"step {step.step}: {_verdict(step)}")
    warn("every step gives the weights it gave then" if not differing else f"{differing} steps differ")
    return 1 if differing else 0


def _verdict(step: "ReplayedStep") -> str:
    if step.recorded is None:
        return f"{step.replayed}; no engine was given these weights, so there is nothing to compare"
    return "the same weights" if step.equal else f"OTHER weights: {step.recorded} then, {step.replayed} now"


def register_timeline(commands: Commands) -> None:
    command = add_command(commands, "timeline", timeline, "example: treadle timeline runs/treadle/calculator")
    command.add_argument("run_dir", metavar="RUN", type=Path, help="run directory of a training run, live or over")


def timeline(arguments: Arguments) -> int:
    """Draw a training run over time, as timeline.svg in its directory: sessions, steps, waits, weights, validations.

    Every run draws it when it ends; this command draws it again, also while the run goes on.
    """
    from treadle.inspect.timeline import write_timeline

    say(write_timeline(arguments.run_dir))
    return 0
