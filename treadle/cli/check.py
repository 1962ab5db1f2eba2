"""`treadle check`: everything about a run that can be known without running it."""

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from treadle.cli.parser import Arguments, Commands, add_command, add_words, load_words
from treadle.errors import ConfigError
from treadle.exit_status import STATUS_CONFIG, STATUS_MISSING
from treadle.terminal import note, say, warn

if TYPE_CHECKING:
    from treadle.config import Config, Plan
    from treadle.preflight.report import PreflightReport

_MODEL_KEYS = ("path", "adapter", "tokenizer_path")
"""Names of keys that take a model, and so a run directory, too."""


def register(commands: Commands) -> None:
    examples = """
    It reads every task, renders every prompt, imports what the config names, starts MCP servers and reward workers,
    scores the first task with its ground truth and with an empty answer, looks at the model, memory, disk, ports and
    keys, prints the first prompt as the model reads it, and ends with what a step will do. Nothing is sampled or
    trained, no run directory is made. `treadle train` and `treadle rollout` begin with the quick part of it;
    `treadle config check` looks at the config alone, at once.

    exit status:
      0  nothing is wrong and nothing is missing
      2  something is wrong: it would be on every machine
      3  the config is right, and this machine lacks something: a model, files, packages, GPUs, API keys

    examples:
      treadle check calculator
      treadle check my.yaml --sft
      treadle check my.yaml trainer.mode=fully_async rollout.nnodes=1
      treadle check my.yaml --json | jq '.findings[] | select(.kind == "wrong")'
    """
    parser = add_command(commands, "check", check, examples)
    add_words(parser)
    parser.add_argument("--sft", action="store_true", help="check what treadle sft would run")
    parser.add_argument("--json", action="store_true", help="findings, plan and first prompt as one JSON object")


def check(arguments: Arguments) -> int:
    """Check a config, its data, imports, tools, rewards, model and machine before a run.

    What is wrong in the config and what is missing on this machine come apart, in two sections of one report.
    """
    from treadle.preflight.report import PreflightReport

    report, config, plan = PreflightReport(), None, None
    with report.gather():
        config = load_words(arguments.words, sft=arguments.sft)
    if config is not None:
        from treadle.preflight.checks import run_preflight

        report = run_preflight(config, os.environ, thorough=True)
        plan = _plan(config, report)
    status = STATUS_CONFIG if report.wrong else STATUS_MISSING if report.missing else 0
    if arguments.json:
        say(json.dumps(_as_json(report, plan, status), indent=2, default=str))
        return status
    if found := report.describe():
        say(found)
    if config is not None:
        note_checkpoints(config)
    if config is not None and plan is not None:
        from treadle.cli.plan import describe_plan

        say(f"\n{describe_plan(config, plan)}")
    sys.stdout.flush()
    if mistakes := report.describe_mistakes():
        warn(f"{mistakes}\n\n{report.conclude()}")
    else:
        say(f"\n{report.conclude()}")
    return status


def _as_json(report: "PreflightReport", plan: "Plan | None", status: int) -> dict[str, object]:
    return {
        "status": status,
        "conclusion": report.conclude(),
        "findings": report.findings(),
        "first_prompt": report.first_prompt or None,
        "first_prompt_tokens": report.first_prompt_tokens,
        "plan": None if plan is None else asdict(plan),
    }


def require_preflight(config: "Config") -> None:
    """The quick part, for commands that go on: mistakes end them, warnings are printed."""
    from treadle.preflight.checks import run_preflight

    report = run_preflight(config, os.environ, thorough=False)
    if report.mistakes:
        raise ConfigError(report.mistakes)
    for warning in report.warnings:
        warn(f"warning: {warning}")
    note_checkpoints(config)


def note_checkpoints(config: "Config") -> None:
    """Print which checkpoint is loaded, wherever a config names a run directory as a model."""
    from treadle.config.show import flatten
    from treadle.model.tokenizer import describe_checkpoint

    for key, value in flatten(config).items():
        section, _, name = key.rpartition(".")
        if name in _MODEL_KEYS and section != "checkpoint" and isinstance(value, str):
            found = describe_checkpoint(value)
            if found is not None:
                note(f"{key} {value}: {found}")


def _plan(config: "Config", report: "PreflightReport") -> "Plan | None":
    """The placement; on the machines the config names, where those here are too few."""
    from treadle.cli.environment import find_machines
    from treadle.config import make_plan
    from treadle.config.plan import asked_machines

    try:
        return make_plan(config, find_machines(config.cluster))
    except ConfigError as error:
        report.add(error.mistakes)
        if not all(mistake.missing for mistake in error.mistakes):
            return None
    with report.gather():
        plan = make_plan(config, asked_machines(config))
        report.warnings.append("the plan below is for machines as the config asks for them; they are not here")
        return plan
    return None
