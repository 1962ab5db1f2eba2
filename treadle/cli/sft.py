"""`treadle sft`: a model that learns from conversations."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from treadle.cli.check import require_preflight
from treadle.cli.parser import Arguments, Commands, add_command, add_words, load_words
from treadle.cli.results import next_sft_commands
from treadle.exit_status import STATUS_INTERRUPTED
from treadle.terminal import note, say, warn

if TYPE_CHECKING:
    from treadle.cluster.sft import SFTData, SFTResult
    from treadle.cluster.signals import StopSignals
    from treadle.config import SFTRunConfig


def register(commands: Commands) -> None:
    examples = """
    data.train_files names files whose rows hold `messages`, or `prompt` and `response`; or run directories, whose
    trajectories with a reward of at least sft.min_reward train with the very tokens that were sampled.

    examples:
      treadle sft model.path=my-model data.train_files=[chats.jsonl] data.val_files=[held_out.jsonl]
      treadle sft my.yaml data.train_files=[runs/treadle/my-rollout] sft.min_reward=1     rejection sampling
      treadle train my.yaml model.path=runs/treadle/my                                    goes on from it with rewards

    Everything is kept in logging.run_dir. Ctrl-C, SIGTERM and SIGHUP save; the same command goes on from there.
    """
    command = add_command(commands, "sft", sft, examples)
    add_words(command)
    command.add_argument("--fresh", action="store_true", help="rename the run directory to RUN.1, .2, … and begin anew")
    command.add_argument("--allow-changes", action="store_true", help="go on with settings that changed since")


def sft(arguments: Arguments) -> int:
    """Fine-tune a model on conversations, or on the best trajectories of a run.

    Status 0 when the run is done, 130 when interrupted.
    """
    from treadle.config import SFTRunConfig

    config = load_words(arguments.words, sft=True)
    assert isinstance(config, SFTRunConfig), "it was asked for"
    result = run_sft(config, sys.argv, fresh=arguments.fresh, allow_changes=arguments.allow_changes)
    print_result(result)
    return STATUS_INTERRUPTED if result.interrupted else 0


def run_sft(
    config: "SFTRunConfig",
    command: Sequence[str],
    *,
    fresh: bool = False,
    allow_changes: bool = False,
    on_signals: "Callable[[StopSignals], None] | None" = None,
) -> "SFTResult":
    """Check, say what there is to learn from, train and show how it goes: for the command and for calls from Python."""
    import asyncio

    from treadle.cli.environment import find_machines
    from treadle.cli.plan import describe_plan
    from treadle.cluster.sft import fine_tune
    from treadle.config import make_plan
    from treadle.observe.training_progress import TrainingView

    def tell(data: "SFTData") -> None:
        steps, batch = config.total_steps(len(data.training.source)), config.data.train_batch_size
        note("\n".join([*data.describe(), f"steps      {steps:,} of {batch} rows"]))
        if repeats := data.describe_repeats(batch):
            warn(f"note: {repeats}")

    require_preflight(config)
    note(describe_plan(config, make_plan(config, find_machines(config.cluster))))
    with TrainingView(quiet="console" not in config.logging.logger) as view:
        work = fine_tune(
            config,
            view,
            command,
            fresh=fresh,
            allow_changes=allow_changes,
            on_data=tell,
            on_signals=on_signals,
        )
        return asyncio.run(work)


def print_result(result: "SFTResult") -> None:
    if len(result.validations) > 1:
        first, last = result.validations[0], result.validations[-1]
        say(f"\nvalidation loss {first.loss:.4f} (step {first.step}) → {last.loss:.4f} (step {last.step})")
    say(f"\n{describe_end(result)}")
    if result.interrupted:
        say("interrupted and saved: the same command goes on from here")
    else:
        say(next_sft_commands(result.run_dir))


def describe_end(result: "SFTResult") -> str:
    """The last lines of a run before the commands that come next."""
    lines = [f"{result.steps} steps, {result.trained} of them now; everything is in {result.run_dir}"]
    if not result.trained and not result.interrupted and result.steps:
        lines.append("nothing was trained: the run was done already (trainer.total_training_steps makes it longer)")
    return "\n".join(lines)
