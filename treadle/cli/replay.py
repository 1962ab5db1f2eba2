"""`treadle replay`: proof that a run's weights follow from its journal."""

from pathlib import Path
from typing import TYPE_CHECKING

from treadle.cli.parser import Arguments, Commands, add_command
from treadle.errors import ConfigError, Mistake
from treadle.terminal import say, warn

if TYPE_CHECKING:
    from treadle.trainer.replay import Replayed


def register(commands: Commands) -> None:
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

    from treadle.cluster.networks import load_networks
    from treadle.trainer.replay import replay as replay_steps

    differing = 0
    for step in replay_steps(load_networks(config).step, arguments.run_dir):
        differing += not step.equal
        say(f"step {step.step}: {_verdict(step)}")
    warn("every step gives the weights it gave then" if not differing else f"{differing} steps differ")
    return 1 if differing else 0


def _verdict(step: "Replayed") -> str:
    if step.recorded is None:
        return f"{step.replayed}; no engine was given these weights, so there is nothing to compare"
    return "the same weights" if step.equal else f"OTHER weights: {step.recorded} then, {step.replayed} now"
