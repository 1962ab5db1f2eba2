"""`treadle rollout`: agent loops, engine and rewards with no trainer."""

import shlex
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.cli.check import require_preflight
from treadle.cli.environment import read_api_keys
from treadle.cli.parser import Arguments, Commands, add_command, add_words, load_words
from treadle.terminal import make_console, say

if TYPE_CHECKING:
    from treadle.config import Config
    from treadle.observe import RolloutCounters
    from treadle.rollout import RolloutParts
    from treadle.rollout.run import RolloutResult

STATUS_FAILED = 1
STATUS_INTERRUPTED = 130


def register(commands: Commands) -> None:
    examples = """
    examples:
      treadle rollout my.yaml                                  every task of data.train_files
      treadle rollout my.yaml --validation rollout.val_kwargs.n=8
      treadle rollout my.yaml rollout.name=openai rollout.openai.base_url=http://localhost:8000/v1

    Everything is kept in logging.run_dir. Ctrl-C keeps what is done; the same command goes on from there. What the
    directory holds of another model, sampling or prompt is never reported: --fresh sets it aside and begins anew.
    """
    command = add_command(commands, "rollout", rollout, examples)
    add_words(command)
    command.add_argument("--validation", action="store_true", help="roll out data.val_files, sampled as val_kwargs say")
    command.add_argument("--fresh", action="store_true", help="rename the run directory to RUN.1, .2, … and begin anew")
    command.add_argument("--json", action="store_true", help="print the summary as JSON")


def rollout(arguments: Arguments) -> int:
    """Run agent loops over tasks and score them, without a trainer.

    Status 0 when no trajectory failed, 1 when some did, 130 when interrupted.
    """
    config = load_words(arguments.words, rollout=True)
    result = run_evaluation(config, sys.argv, validation=arguments.validation, fresh=arguments.fresh)
    if arguments.json:
        say(result.summary.to_json())
    else:
        _print_summary(result)
    if result.interrupted:
        return STATUS_INTERRUPTED
    return STATUS_FAILED if result.summary.num_failed else 0


def run_evaluation(
    config: "Config",
    command: Sequence[str],
    *,
    validation: bool = False,
    fresh: bool = False,
    stop: threading.Event | None = None,
) -> "RolloutResult":
    """Check, roll out and show how it goes: the same for the command and for a call from Python."""
    config = config.without_training()
    tasks = require_preflight(config)

    from treadle.rollout.run import run_rollout

    with _supplied(config) as parts:
        return run_rollout(
            config,
            validation=validation,
            fresh=fresh,
            command=command,
            parts=replace(parts, api_keys=read_api_keys(config)),
            progress=_show_progress,
            stop=stop,
            tasks=tasks,
        )


def _supplied(config: "Config") -> AbstractContextManager["RolloutParts"]:
    """What the runtime supplies: nothing where the rollout builds its own parts."""
    from treadle.rollout import RolloutParts

    if config.cluster.backend == "local":
        from treadle.engine.gpus import plan_here
        from treadle.rollout.engines import RolloutBackend

        return nullcontext(RolloutParts(RolloutBackend(plan_here(config))))
    from treadle.cluster.ray import require_ray

    require_ray(config.cluster)
    from treadle.cluster.ray.rollout import started_rollout_blocking

    return started_rollout_blocking(config)


def _show_progress(counters: "RolloutCounters", total: int) -> AbstractContextManager[object]:
    from treadle.observe import LiveProgress

    return LiveProgress(counters, total=total, stream=sys.stderr)


def _print_summary(result: "RolloutResult") -> None:
    from treadle.observe.rich_output import render_summary

    make_console().print(render_summary(result.summary))
    if result.run_dir is not None:
        say(f"everything is in {result.run_dir}; treadle show {shlex.quote(str(result.run_dir))} prints trajectories")
    if result.interrupted:
        say("interrupted: the same command goes on from here")
