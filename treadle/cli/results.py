"""`treadle show`, `treadle metrics` and `treadle export`: what came of a run, as text, as curves, as a model."""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.cli.parser import Arguments, Commands, add_command, run_argument, run_path
from treadle.errors import ConfigError, Mistake
from treadle.terminal import cell, make_console, say, warn

if TYPE_CHECKING:
    from treadle.inspect.run_records import FoundTrajectory, Order, RecordedTrajectory, RunRecords
    from treadle.inspect.transcript import TranscriptLine

MAX_COLUMNS = 100
"""Widest curve as text."""

SHOWN = 3
"""Trajectories that `treadle show` prints unless told otherwise."""


def register_show(commands: Commands) -> None:
    examples = """
    STEP is a whole number: what that step was trained on, or with --validation what was sampled after it. UID is a
    task as headings and errors name it, or UID/SAMPLE for one sample; the name that a validation task has in its file
    finds it in every validation. Without either: the newest step, or with --failed the whole run.

    examples:
      treadle show latest                                       the newest step of the newest run
      treadle show runs/treadle/calculator 40 --worst           the lowest rewards of step 40
      treadle show runs/treadle/calculator --validation --best
      treadle show runs/treadle/calculator --failed             what broke, with the cause
      treadle show runs/treadle/calculator --findings           groups without signal, rewards that may be gamed
      treadle show runs/treadle/calculator '7*8'                every sample of a task
      treadle show runs/treadle/calculator --diff '7*8'         its best sample beside its worst
      treadle show runs/treadle/calculator 'validation-0/6*7/0' --diff 'validation-40/6*7/0'
      treadle show runs/treadle/calculator --limit 1000 --json | jq 'select(.reward < 0.5) | .messages[-1].content'
    """
    command = add_command(commands, "show", show, examples)
    command.add_argument(
        "run_dir", metavar="RUN", type=run_argument, help="run directory, live or over; latest: the newest below runs/"
    )
    command.add_argument(
        "words", metavar="STEP | UID", nargs="*", default=[], help="a training step, or a task; see below"
    )
    order = command.add_mutually_exclusive_group()
    order.add_argument("--worst", action="store_true", help="lowest reward first")
    order.add_argument("--best", action="store_true", help="highest reward first")
    order.add_argument(
        "--failed", action="store_true", help="only trajectories that failed, repeated attempts included"
    )
    order.add_argument(
        "--findings", action="store_true", help="what to look at: no signal, repetition, rewards that may be gamed"
    )
    order.add_argument(
        "--diff", metavar="UID", help="compare STEP | UID with this one, or a task's samples, or validations"
    )
    command.add_argument("--validation", action="store_true", help="the validation after STEP, or the newest")
    command.add_argument("--limit", type=int, default=SHOWN, metavar="N", help=f"print at most N ({SHOWN})")
    command.add_argument("--json", action="store_true", help="one JSON object a line, with all messages")


def register_metrics(commands: Commands) -> None:
    examples = """
    Without --metric: success and reward, then what tells whether a run is healthy, as far as the runs have it. A
    pattern such as reward/* names several. Several runs are drawn with the same axes.

    examples:
      treadle metrics runs/treadle/calculator
      treadle metrics runs/treadle/one runs/treadle/other --metric reward/mean --metric 'validation/*'
      treadle metrics runs/treadle/calculator --list            every metric with its first and last value
      treadle metrics runs/treadle/calculator --output curves.svg
      treadle metrics runs/treadle/calculator --metric '*' --json > metrics.json
    """
    command = add_command(commands, "metrics", metrics, examples)
    command.add_argument("words", metavar="RUN", nargs="+", help="run directories of training runs, live or over")
    command.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="a metric or pattern; repeatable"
    )
    command.add_argument("--output", type=Path, metavar="FILE", help="write the curves as .svg or .png instead")
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("--list", action="store_true", help="names and values instead of curves")
    shown.add_argument("--json", action="store_true", help="{run: {metric: [[step, value], …]}}")


def metrics(arguments: Arguments) -> int:
    """Draw the metrics of training runs as curves: text in the terminal, or a picture with --output."""
    from shutil import get_terminal_size

    from treadle.inspect.curves import draw_text, format_value, read_panels, write_picture

    patterns = arguments.metric or (["*"] if arguments.list or arguments.json else [])
    panels = read_panels([run_path(word) for word in arguments.words], patterns)
    if arguments.output is not None:
        write_picture(panels, arguments.output)
        say(arguments.output)
    elif arguments.json:
        runs = list(dict.fromkeys(run for panel in panels for run in panel.curves))
        curves = {run: {panel.name: panel.curves[run] for panel in panels if run in panel.curves} for run in runs}
        say(json.dumps(curves))
    elif arguments.list:
        for panel in panels:
            for run, curve in panel.curves.items():
                named = f"  {run}" if len(arguments.words) > 1 else ""
                first, last = format_value(curve[0][1]), format_value(curve[-1][1])
                say(f"{panel.name:42} {first:>10} → {last:>10}  step {curve[-1][0]}{named}")
    else:
        width = min(get_terminal_size().columns, MAX_COLUMNS)
        say("\n\n".join(draw_text(panel, width) for panel in panels))
    return 0


def register_export(commands: Commands) -> None:
    examples = """
    DIR gets the weights as safetensors, config.json, the tokenizer with its chat template, and a model card (README.md)
    with the config's digest, data, rewards and metrics. transformers, vLLM and treadle load it by its path:

      treadle export runs/treadle/calculator my-model
      treadle rollout my.yaml model.path=my-model --validation

    examples:
      treadle export runs/treadle/calculator best-model --checkpoint best
      treadle export runs/treadle/calculator step-20 --checkpoint 20 --dtype fp32
      treadle export runs/treadle/calculator my-adapter --format peft
    """
    command = add_command(commands, "export", export, examples)
    command.add_argument("run_dir", metavar="RUN", type=run_argument, help="run directory of a training run")
    command.add_argument("directory", metavar="DIR", type=Path, help="where the model goes; it must not exist")
    command.add_argument(
        "--checkpoint",
        default="latest",
        metavar="NAME",
        help="latest (the default), best (by validation success, else by reward), a step, or a checkpoint's name",
    )
    command.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the weights (bf16)")
    command.add_argument(
        "--format",
        choices=("merged", "peft"),
        default="merged",
        help="of a run with adapters (LoRA): merged into the whole model (the default), or the adapter alone for peft",
    )


def export(arguments: Arguments) -> int:
    """Write a run's model as a Hugging Face directory: weights, tokenizer and a model card."""
    from treadle.inspect.export import export_run

    done = export_run(
        arguments.run_dir,
        arguments.directory,
        checkpoint=arguments.checkpoint,
        dtype=arguments.dtype,
        format=arguments.format,
    )
    what = "LoRA adapter in fp32" if arguments.format == "peft" else f"model in {arguments.dtype}"
    say(f"{done.directory}: {what} of {done.checkpoint.name}, with tokenizer and model card")
    return 0


def next_commands(run_dir: Path) -> str:
    """What can be done with a run that is over, for its last lines."""
    name = shlex.quote(str(run_dir))
    return _list_commands(
        [
            (f"treadle view {name}", "the run in the browser, down to single tokens"),
            (f"treadle show {name} --worst", "trajectories, the lowest rewards first"),
            (f"treadle metrics {name}", "the curves of the run"),
            (f"treadle export {name} my-model", "the model, its tokenizer and a model card"),
            (f"treadle serve {name}", "the model behind OpenAI's and Anthropic's APIs"),
        ]
    )


def next_sft_commands(run_dir: Path) -> str:
    """What to type next, for a run of supervised fine-tuning."""
    name = shlex.quote(str(run_dir))
    return _list_commands(
        [
            (f"treadle view {name}", "the run in the browser: curves, steps, config"),
            (f"treadle metrics {name}", "the curves of the run"),
            (f"treadle export {name} my-model", "the model, its tokenizer and a model card"),
            (f"treadle rollout my.yaml model.path={name} --validation", "how well it does its tasks"),
            (f"treadle train my.yaml model.path={name}", "reinforcement learning from here"),
        ]
    )


def _list_commands(commands: list[tuple[str, str]]) -> str:
    width = max(len(command) for command, _ in commands)
    lines = [f"{command:{width}}    {purpose}" for command, purpose in commands]
    return "\n".join(("try next:  " if at == 0 else " " * 11) + line for at, line in enumerate(lines))


def show(arguments: Arguments) -> int:
    """Print trajectories of a run: messages, tool calls, reward parts, stop reason and lengths.

    Status 1 where there is none of the kind that was asked for.
    """
    from treadle.inspect.run_records import RunRecords
    from treadle.inspect.transcript import to_json, transcript_lines

    if arguments.limit < 1:
        raise ConfigError([Mistake("--limit", "must be at least 1", arguments.limit)])
    if len(arguments.words) > 1:
        raise ConfigError([Mistake(" ".join(arguments.words), "give one STEP or UID; --diff UID names the other one")])
    arguments.which = arguments.words[0] if arguments.words else None
    records = RunRecords(arguments.run_dir)
    if arguments.findings:
        return _show_findings(arguments)
    if arguments.diff is not None:
        return _show_difference(records, arguments)
    step, uid = _read_which(arguments.which)
    order: Order = "worst" if arguments.worst else "best" if arguments.best else "written"
    found = records.find(step, uid, validation=arguments.validation, failed=arguments.failed, order=order)
    for at, recorded in enumerate(records.load(found[: arguments.limit])):
        if arguments.json:
            say(to_json(recorded))
        else:
            _print_lines(transcript_lines(recorded), gap=at > 0)
    if not found:
        warn(_explain_nothing(records, arguments))
        return 1
    if not arguments.json:
        warn(_summarize(found, min(arguments.limit, len(found)), order))
    return 0


def _show_findings(arguments: Arguments) -> int:
    """What to look at in the newest groups of a run, a few of each kind."""
    from dataclasses import asdict

    from treadle.inspect.findings import scan_run

    found = scan_run(arguments.run_dir)
    if arguments.json:
        for finding in found.findings:
            say(json.dumps(asdict(finding)))
        return 0
    for line, findings in found.sections():
        say(line)
        for finding in findings[: arguments.limit]:
            say(f"  {finding.uid}/{finding.sample}: {finding.detail}")
    warn(f"\n{found.describe_reading()}")
    if not found.findings:
        warn("nothing was found")
    return 0


def _read_which(which: str | None) -> tuple[int | None, str | None]:
    if which is None:
        return None, None
    return (int(which), None) if which.isdecimal() else (None, which)


def _show_difference(records: "RunRecords", arguments: Arguments) -> int:
    """Compare the two that are named; a task's samples, or its first and last validation, where one is."""
    from treadle.inspect.transcript import diff_trajectories

    if arguments.json:
        raise ConfigError([Mistake("--json", "does not go with --diff", fix="leave one of the two out")])
    if arguments.which is not None:
        one, other = (_find_one(records, name) for name in (arguments.which, arguments.diff))
    else:
        one, other = _choose_pair(records, arguments.diff)
    _print_lines(diff_trajectories(one, other))
    return 0


def _find_one(records: "RunRecords", name: str) -> "RecordedTrajectory":
    found = records.select(uid=name)
    if not found:
        raise ConfigError(
            [Mistake(name, f"{records.run_dir} has no trajectory of this name", fix=_how_to_name(records))]
        )
    return found[0]


def _choose_pair(records: "RunRecords", name: str) -> "tuple[RecordedTrajectory, RecordedTrajectory]":
    """First and last sample of a task in several validations; worst and best of one that is in a single place."""
    found = records.select(uid=name)
    if len(found) < 2:
        problem = f"{len(found)} trajectories of this name in {records.run_dir}: there is nothing to compare"
        raise ConfigError([Mistake("--diff", problem, name, fix=_how_to_name(records))])
    if found[0].step != found[-1].step:
        return found[0], found[-1]
    ordered = records.select(uid=name, order="worst")
    return ordered[0], ordered[-1]


def _how_to_name(records: "RunRecords") -> str:
    some = records.select(limit=1)
    return f"a name is such as {some[0].name!r}" if some else "the run has recorded no trajectories yet"


def _explain_nothing(records: "RunRecords", arguments: Arguments) -> str:
    from treadle.config import SFTRunConfig

    if not records.config.logging.journal:
        return "there are no trajectories: the run was started with logging.journal=false"
    if isinstance(records.config, SFTRunConfig):
        return "there are no trajectories: supervised fine-tuning samples nothing; treadle metrics has its curves"
    if arguments.failed:
        return "no trajectory failed"
    step, uid = _read_which(arguments.which)
    if uid is not None:
        return f"no trajectory of a task {uid!r}; {_how_to_name(records)}"
    steps = records.validations() if arguments.validation else records.steps()
    what = "validation" if arguments.validation else "step"
    known = f"{what}s {steps[0]} to {steps[-1]} are recorded" if steps else f"no {what} is recorded yet"
    return f"no trajectories of {what} {step}; {known}"


def _summarize(found: "list[FoundTrajectory]", shown: int, order: str) -> str:
    rewards = [recorded.reward for recorded in found if recorded.reward is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    hint = "" if shown == len(found) else f"; --limit {len(found)} prints all"
    hint += "" if order != "written" or shown == len(found) else ", --worst and --best sort them"
    return f"\n{shown} of {len(found)} trajectories{mean}{hint}"


def _print_lines(lines: "Iterable[TranscriptLine]", *, gap: bool = False) -> None:
    console = make_console()
    if gap:
        say()
    for line in lines:
        console.print(cell(line.text, line.style), soft_wrap=True)
