"""`treadle audit`, `treadle replay`, `treadle annotate` and `treadle timeline`: what a journal proves and shows."""

from pathlib import Path
from typing import TYPE_CHECKING

from treadle.cli.parser import Arguments, Commands, add_command, run_argument
from treadle.errors import ConfigError, Mistake
from treadle.terminal import say, warn

if TYPE_CHECKING:
    from treadle.config import TrainConfig
    from treadle.inspect.replay import ReplayedStep
    from treadle.trainer.step import StepParts

MAX_SHOWN = 20


def register_audit(commands: Commands) -> None:
    command = add_command(commands, "audit", audit, "example: treadle audit runs/treadle/calculator")
    command.add_argument("run_dir", metavar="RUN", type=run_argument, help="run directory of a training run")


def audit(arguments: Arguments) -> int:
    """Prove from a run's journal that no task was skipped and none trained twice (status 1 where one was).

    Counts across every start of the run: what was killed and resumed is followed back to the checkpoint it went on
    from.
    """
    from treadle.inspect.audit import audit as keep_books

    _load_training(arguments.run_dir)
    found = keep_books(arguments.run_dir)
    say(f"starts     {found.starts}")
    say(f"steps      {found.steps}")
    say(f"tasks      {found.trained} trained, {found.removed} removed, {found.open} open")
    if (books := found.sampler) is not None:
        say(f"sampler    {books.name}: {books.drawn} of {books.tasks} tasks drawn, {books.repeated} draws were repeats")
        say(f"skipped    {books.skipped} tasks by the sampler, which are not lost: it has not drawn them")
    say(f"undone     {found.trained_again} were trained in steps that a crash undid, and trained again")
    say(f"reused     {found.reused} finished trajectories, {found.continued} half-generated ones continued")
    for problem in found.problems[:MAX_SHOWN]:
        say(f"PROBLEM    {problem}")
    if len(found.problems) > MAX_SHOWN:
        say(f"           and {len(found.problems) - MAX_SHOWN} more")
    if not found.problems:
        say("none lost, no draw trained twice" if books is not None else "none skipped, none trained twice")
    return 1 if found.problems else 0


def register_replay(commands: Commands) -> None:
    command = add_command(commands, "replay", replay, "example: treadle replay runs/treadle/calculator")
    command.add_argument("run_dir", metavar="RUN", type=run_argument, help="run directory of a training run")


def replay(arguments: Arguments) -> int:
    """Train again from a run's journal, and compare the weights after every step (status 1 where they differ)."""
    config = _load_training(arguments.run_dir)

    from treadle.inspect.replay import replay as replay_steps

    differing = 0
    for step in replay_steps(_load_step(config), arguments.run_dir):
        differing += not step.equal
        say(f"step {step.step}: {_verdict(step)}")
    warn("every step gives the weights it gave then" if not differing else f"{_steps(differing)} differ; {_EXACT}")
    return 1 if differing else 0


def _load_training(run_dir: Path) -> "TrainConfig":
    """The config of a training run that can be replayed."""
    from treadle.config import SFTRunConfig, TrainConfig, load

    resolved = run_dir / "config.yaml"
    if not resolved.is_file():
        fix = "give the directory that logging.run_dir named"
        raise ConfigError([Mistake(str(run_dir), "is no run directory: it has no config.yaml", fix=fix)])
    config = load(resolved)
    if not isinstance(config, TrainConfig):
        raise ConfigError([Mistake(str(run_dir), "is a rollout, not a training run: there is nothing to replay")])
    if isinstance(config, SFTRunConfig):
        problem = "is supervised fine-tuning, which sampled nothing: its journal has no trajectories to train on again"
        raise ConfigError([Mistake(str(run_dir), problem, fix="treadle sft with the same config repeats it")])
    return config


def _load_step(config: "TrainConfig") -> "StepParts":
    """The networks of a run as they were before its first step."""
    from treadle.cluster.runtime import load_networks
    from treadle.config.plan import place_trainer
    from treadle.data.tasks import load_training_tasks
    from treadle.engine.gpus import this_machine

    steps = config.total_steps(len(load_training_tasks(config.data)))
    return load_networks(config, steps, place_trainer(config, this_machine())).step


_EXACT = "exact are a CPU, the same versions and as many threads as then (OMP_NUM_THREADS)"


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _verdict(step: "ReplayedStep") -> str:
    if step.recorded is None:
        return f"{step.replayed}; no engine was given these weights, so there is nothing to compare"
    return "the same weights" if step.equal else f"OTHER weights: {step.recorded} then, {step.replayed} now"


def register_annotate(commands: Commands) -> None:
    examples = """
    During a run, `logging.annotations` keeps this for a share of the groups; the rest is computed here by training
    again from the journal: on a CPU the same numbers bit for bit, on a GPU as near as the last column says. The run
    must have ended. One step is replayed from the newest checkpoint before it; all steps from the first one, or, where
    logging.journal_max_mb dropped the first tokens, from the first checkpoint after them.

    examples:
      treadle annotate runs/treadle/calculator          every step
      treadle annotate runs/treadle/calculator 12       step 12 alone
    """
    command = add_command(commands, "annotate", annotate, examples)
    command.add_argument(
        "run_dir", metavar="RUN", type=run_argument, help="run directory of a training run that has ended"
    )
    command.add_argument("step", metavar="STEP", type=int, nargs="?", help="annotate this step alone")


def annotate(arguments: Arguments) -> int:
    """Compute the trainer's logprob, advantage, entropy and weight of every token of a run, for treadle view.

    Status 1 where the replay gives other weights than the run had.
    """
    config = _load_training(arguments.run_dir)

    from treadle.inspect.replay import annotate_run, journal_bytes, start_of_replay

    start = start_of_replay(arguments.run_dir, arguments.step)
    if start is not None:
        warn(f"replaying from {start}")
    differing, before = 0, journal_bytes(arguments.run_dir)
    for done in annotate_run(_load_step(config), arguments.run_dir, arguments.step):
        differing += not done.replayed.equal
        off = "" if done.largest_difference is None else f", logprobs differ by {done.largest_difference:.2g} at most"
        say(f"step {done.replayed.step}: {_verdict(done.replayed)}; {done.num_rows} rows annotated{off}")
    grown = journal_bytes(arguments.run_dir) - before
    if grown > 100_000:
        warn(f"the journal is {grown / 1e6:.1f} MB larger; only a run that goes on keeps to logging.journal_max_mb")
    if differing:
        warn(f"{_steps(differing)} gave other weights than the run: annotations are near, and not exact; {_EXACT}")
    return 1 if differing else 0


def register_timeline(commands: Commands) -> None:
    command = add_command(commands, "timeline", timeline, "example: treadle timeline runs/treadle/calculator")
    command.add_argument(
        "run_dir", metavar="RUN", type=run_argument, help="run directory of a training run, live or over"
    )


def timeline(arguments: Arguments) -> int:
    """Draw a training run over time, as timeline.svg in its directory: sessions, steps, waits, weights, validations.

    Every run draws it when it ends; this command draws it again, also while the run goes on.
    """
    from treadle.inspect.timeline import write_timeline

    say(write_timeline(arguments.run_dir))
    return 0
