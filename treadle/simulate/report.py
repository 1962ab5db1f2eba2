"""Report of a comparison: assumptions, a table of forecasts, what waits for what, and the keys to set.

Owns the wording, and nothing else: every number comes from a forecast.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from math import gcd

from treadle.config import TrainConfig
from treadle.simulate.assumptions import RECORDED, Assumptions, option_name
from treadle.simulate.forecast import Forecast, ScheduleSetup, choose_max_sessions
from treadle.simulate.simulation import Comparison
from treadle.simulate.workload import RecordedWorkload, Workload

HEADER = ("mode", "train + sample", "step", "over sync", "of bound", "tokens/s", "training", "engine load", "staleness")


def describe(
    config: TrainConfig, assumptions: Assumptions, workload: Workload, compared: Comparison, gpus_per_node: int
) -> str:
    """The whole report. Assumptions are filled."""
    parts = [
        describe_comparison(config, compared),
        "assumed, as no config says it:\n" + describe_assumptions(assumptions, workload),
        draw_table([HEADER, *(_row(found, compared.sync) for found in compared.forecasts)]),
        describe_best(config, assumptions, workload, compared, gpus_per_node),
        "\n".join(f"note: {note}" for note in notes(config, compared.best)),
    ]
    return "\n\n".join(part for part in parts if part)


def describe_comparison(config: TrainConfig, compared: Comparison) -> str:
    """What was simulated, in a line."""
    spec, tasks, n = compared.spec, config.data.train_batch_size, config.rollout.n
    return (
        f"{spec.gpus} GPUs; steps of {tasks:,} tasks × {n} samples = {tasks * n:,} sessions; "
        f"at least {spec.steps} steps measured after each run has settled"
    )


def describe_assumptions(assumptions: Assumptions, workload: Workload) -> str:
    """Every number, what it means, and the option that changes it."""
    rows = [
        (f"  {option_name(item.name)}", f"{getattr(assumptions, item.name):,g}", _meaning(item.metadata["description"]))
        for item in fields(assumptions)
        if not (isinstance(workload, RecordedWorkload) and item.name in RECORDED)
    ]
    if isinstance(workload, RecordedWorkload):
        mean = workload.mean
        sampled = f"{mean.sampled_tokens:,.0f} tokens, {mean.tool_s:,.1f} s in tools on average"
        rows.insert(0, ("  --like", f"{len(workload):,}", f"recorded sessions: {sampled}"))
    return draw_table(rows, left=(0, 2))


def describe_best(
    config: TrainConfig, assumptions: Assumptions, workload: Workload, compared: Comparison, gpus_per_node: int
) -> str:
    """The choice, its reasons, and the keys that make it."""
    best, sync = compared.best, compared.sync
    places = choose_max_sessions(config.rollout, assumptions, workload.mean, best.setup)
    words = [*settings(best.setup, gpus_per_node), f"rollout.agent.max_concurrent_sessions={places}"]
    gain = f", {sync.step_s / best.step_s:.2f} × sync" if sync is not None and sync is not best else ""
    return "\n".join(
        [
            f"best: {best.setup}: {_seconds(best.step_s)} a step{gain}",
            f"  steps    {describe_steps(best)}",
            f"  trainer  {describe_trainer(best)}",
            f"  engines  {describe_engines(best)}",
            f"  tokens   {describe_age(best)}",
            f"  bound    {describe_bound(best)}",
            f"  set      {' '.join(words)}",
        ]
    )


def describe_steps(found: Forecast) -> str:
    """How much they differ."""
    bound = found.setup.staleness_bound
    in_rounds = bound and found.max_step_s > 1.25 * found.min_step_s
    rounds = f", in rounds of {bound + 1}: one waits for stragglers at their bound" if in_rounds else ""
    return f"{_seconds(found.min_step_s)} to {_seconds(found.max_step_s)}{rounds}"


def describe_trainer(found: Forecast) -> str:
    """Where the trainer's time went."""
    shares = (found.train_s, "training"), (found.wait_s, "waiting for groups"), (found.push_s, "pushing weights")
    return ", ".join(f"{seconds / found.step_s:.0%} {what}" for seconds, what in shares)


def describe_engines(found: Forecast) -> str:
    """Where the engines' time went."""
    why = "the same GPUs train, or sessions wait for tools" if found.setup.shared else "no session needs them"
    shares = (
        (found.decoding, "decoding"),
        (found.prefilling, "reading contexts"),
        (found.updating, "taking weights"),
        (found.idle, f"idle ({why})"),
    )
    return ", ".join(f"{share:.0%} {what}" for share, what in shares) + f"; {found.load:.0%} of their full speed"


def describe_age(found: Forecast) -> str:
    return (
        f"{found.staleness_mean:.2f} policy versions old on average, {found.staleness_max} at most; "
        f"a session takes {_seconds(found.session_s)}, {found.tool_s / found.session_s:.0%} of it in tools, "
        f"the longest {_seconds(found.max_session_s)}"
    )


def describe_bound(found: Forecast) -> str:
    join = "one after the other" if found.setup.shared else "side by side"
    return (
        f"{_seconds(found.bound_s)}: generation {_seconds(found.generation_s)} and training "
        f"{_seconds(found.training_s)}, {join}; {found.of_bound:.0%} reached"
    )


def settings(setup: ScheduleSetup, gpus_per_node: int) -> Iterator[str]:
    """The keys of a setup, as words for the command line."""
    yield f"trainer.mode={setup.mode}"
    yield from _nodes("trainer", setup.train_gpus, gpus_per_node)
    if setup.shared:
        yield from ("rollout.nnodes=0", "rollout.n_gpus_per_node=0")
    else:
        yield from _nodes("rollout", setup.rollout_gpus, gpus_per_node)
    if setup.mode == "fully_async":
        yield f"trainer.max_staleness={setup.max_staleness}"
    if max(setup.train_gpus, setup.rollout_gpus) > gpus_per_node:
        yield "cluster.backend=ray"
    if setup.train_gpus > 1:
        yield "actor._target_=treadle.config.FSDPActorConfig"


def notes(config: TrainConfig, best: Forecast) -> Iterator[str]:
    """What a real run of the best setup would trip over."""
    limits = config.rollout.limits
    if best.late:
        yield (
            f"{best.late:.1%} of the sessions take longer than rollout.limits.session_timeout_s = "
            f"{limits.session_timeout_s:g}, and would be cut off there; the longest takes {best.max_session_s:,.0f} s"
        )
    if best.setup.staleness_bound and config.algorithm.rollout_correction.rollout_is is None:
        yield "a real run needs a choice of algorithm.rollout_correction.rollout_is: token, sequence or none"


def draw_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0, 1)) -> str:
    """Columns as wide as they must be; those in `left` begin where the others end."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def _row(found: Forecast, sync: Forecast | None) -> tuple[str, ...]:
    setup = found.setup
    return (
        f"{setup.mode} {setup.max_staleness}" if setup.mode == "fully_async" else setup.mode,
        f"{setup.gpus} in turn" if setup.shared else f"{setup.train_gpus} + {setup.rollout_gpus}",
        _seconds(found.step_s),
        "-" if sync is None else f"{sync.step_s / found.step_s:.2f} ×",
        f"{found.of_bound:.0%}",
        f"{found.tokens_per_s:,.0f}",
        f"{found.training:.0%}",
        f"{found.load:.0%}",
        f"{found.staleness_mean:.2f}, max {found.staleness_max}",
    )


def _nodes(section: str, gpus: int, gpus_per_node: int) -> tuple[str, str]:
    each = gpus if gpus <= gpus_per_node else gcd(gpus, gpus_per_node)
    return f"{section}.nnodes={gpus // each}", f"{section}.n_gpus_per_node={each}"


def _meaning(description: str) -> str:
    return description.partition("; by default")[0]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"
