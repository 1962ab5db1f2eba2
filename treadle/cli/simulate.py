"""`treadle simulate`: how long a step would take, without the GPUs."""

import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.cli.parser import Arguments, Commands, Parser, add_command, add_words, load_words
from treadle.cores import num_cores
from treadle.errors import ConfigError, Mistake
from treadle.terminal import say, warn

if TYPE_CHECKING:
    from treadle.config import Config, TrainConfig
    from treadle.simulate.assumptions import Assumptions
    from treadle.simulate.simulation import ComparisonSpec
    from treadle.simulate.workload import Workload

DEFAULT_GPUS = 8


def register(commands: Commands) -> None:
    examples = """
    Engines and trainer are replaced by models of their speed; schedules, admission, routing and
    sessions are the real ones, on a clock that jumps. So an hour of a cluster takes seconds here.
    Trust the comparison more than the seconds, and the seconds as far as the assumed speeds:
    measure one engine and one training step, and give what you found.

    examples:
      treadle simulate my.yaml --gpus 64
      treadle simulate my.yaml --gpus 64 --response-tokens 4000 --train-tokens-per-s 7000
      treadle simulate my.yaml --gpus 64 --like runs/small-run
      treadle simulate my.yaml --gpus 64 --modes fully_async --splits 16,32 --staleness 1,2,4,8
      treadle simulate my.yaml rollout.max_num_seqs=128 --turns 5 --tool-s 10 --tool-tail 20
    """
    command = add_command(commands, "simulate", simulate, examples)
    add_words(command)
    _add_comparison(command)
    _add_assumptions(command)


def simulate(arguments: Arguments) -> None:
    """Predict step time, utilisation and staleness of each schedule and GPU split; starts nothing.

    Runs each schedule in virtual time on the config's batch, with assumed lengths and speeds, and names the best.
    """
    from treadle.simulate.forecast import gpus_per_node
    from treadle.simulate.report import describe
    from treadle.simulate.simulation import compare

    config = _training(load_words(arguments.words))
    spec, assumptions = _comparison_spec(config, arguments), _assumptions(arguments).fill(config.rollout)
    workload = _workload(config, assumptions, arguments)
    compared = compare(config, assumptions, workload, spec, _report_progress)
    if arguments.json:
        found = [asdict(item) | {"of_bound": item.of_bound, "bound_s": item.bound_s} for item in compared.forecasts]
        best = compared.forecasts.index(compared.best)
        say(json.dumps({"assumptions": asdict(assumptions), "forecasts": found, "best": best}, indent=2))
    else:
        say(describe(config, assumptions, workload, compared, gpus_per_node(config)))


def _add_comparison(command: Parser) -> None:
    group = command.add_argument_group("what to compare")
    group.add_argument(
        "--gpus", type=int, metavar="N", help=f"GPUs in all; the config's, or {DEFAULT_GPUS} if it has none"
    )
    group.add_argument("--modes", metavar="MODE,…", help="schedules; all three by default")
    group.add_argument("--splits", metavar="N,…", help="GPUs that train, the others sample; some that look balanced")
    described = "trainer.max_staleness in fully_async; the config's, and where that is fastest twice and four times it"
    group.add_argument("--staleness", metavar="K,…", help=described)
    group.add_argument("--steps", type=int, default=8, metavar="N", help="steps to measure in each run (8)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths and latencies (0)")
    group.add_argument("--processes", type=int, metavar="N", help="simulations at once; by default one for each core")
    group.add_argument("--json", action="store_true", help="print everything as JSON")


def _add_assumptions(command: Parser) -> None:
    from treadle.simulate.assumptions import Assumptions, option_name

    title = "what to assume (defaults: a 7B model in bf16 on GPUs of the H100 class)"
    group = command.add_argument_group(title)
    described = "take lengths, turns and tool times from this run's journal instead"
    group.add_argument("--like", metavar="RUN_DIR", help=described)
    for item in fields(Assumptions):
        default = "" if item.default is None else f" ({item.default:g})"
        described = item.metadata["description"] + default
        group.add_argument(option_name(item.name), dest=item.name, type=float, metavar="X", help=described)


def _training(config: "Config") -> "TrainConfig":
    from treadle.config import TrainConfig

    if not isinstance(config, TrainConfig):
        fix = "add `trainer: {}`, or see what `treadle plan` says"
        raise ConfigError([Mistake("trainer", "is missing: only training has schedules to compare", fix=fix)])
    return config


def _assumptions(arguments: Arguments) -> "Assumptions":
    from treadle.simulate.assumptions import Assumptions, check_assumptions

    given = {item.name: getattr(arguments, item.name) for item in fields(Assumptions)}
    made = Assumptions(**{name: value for name, value in given.items() if value is not None})
    check_assumptions(made)
    return made


def _workload(config: "TrainConfig", assumptions: "Assumptions", arguments: Arguments) -> "Workload":
    from treadle.simulate.workload import AssumedWorkload, RecordedWorkload

    if arguments.like:
        return RecordedWorkload.read(Path(arguments.like), arguments.seed)
    return AssumedWorkload(assumptions, config.rollout, arguments.seed)


def _comparison_spec(config: "TrainConfig", arguments: Arguments) -> "ComparisonSpec":

    from treadle.simulate.forecast import MODES, setup_of
    from treadle.simulate.simulation import ComparisonSpec

    modes = _words("--modes", arguments.modes, MODES) or MODES
    planned = setup_of(config).gpus if config.trainer.n_gpus_per_node else DEFAULT_GPUS
    gpus = arguments.gpus or planned
    most_train = gpus if modes == ("sync",) else gpus - 1
    return ComparisonSpec(
        gpus=gpus,
        modes=tuple(mode for mode in MODES if mode in modes),
        splits=_numbers("--splits", arguments.splits, 1, most_train),
        staleness=_numbers("--staleness", arguments.staleness, 0, 1000),
        steps=_within("--steps", arguments.steps, 1, 10_000),
        processes=_within("--processes", arguments.processes or num_cores(), 1, 1024),
    )


def _words(flag: str, text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    words = tuple((text or "").split(",")) if text else ()
    for word in words:
        if word not in known:
            raise ConfigError([Mistake(flag, f"{word!r} is none of {', '.join(known)}", word)])
    return words


def _numbers(flag: str, text: str | None, least: int, most: int) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError([Mistake(flag, f"{text!r} is not a list of whole numbers", fix="write 8,16,32")]) from None
    return tuple(sorted({_within(flag, number, least, most) for number in numbers}))


def _within(flag: str, number: int, least: int, most: int) -> int:
    if not least <= number <= most:
        raise ConfigError([Mistake(flag, f"{number} is not between {least} and {most}", number)])
    return number


def _report_progress(text: str) -> None:
    if sys.stderr.isatty():
        warn(f"{text} …")
