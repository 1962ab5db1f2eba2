"""The summary of a rollout as tables for a terminal.

Owns the drawing, with rich; imported by those who print. The numbers are made in `summary`.
Invariant: what a model or a tool wrote is shown as it is, never read as markup or as an escape sequence.
"""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from treadle.observe.summary import SourceSummary, Summary
from treadle.terminal import cell

_MAX_EXAMPLE = 160


def render_summary(summary: Summary) -> RenderableType:
    """Rewards, endings, failures and timings, each a table of its own."""
    return Group(*_sections(summary))


def _sections(summary: Summary) -> Iterator[RenderableType]:
    yield _rewards(summary)
    if any(len(source.parts) > 1 for source in summary.sources):
        yield _parts(summary)
    yield _endings(summary)
    if summary.failures:
        yield _failures(summary)
    yield _timings(summary)
    yield cell(_totals(summary))
    for note in summary.notes:
        yield cell(f"note: {note}")


def _rewards(summary: Summary) -> Table:
    ks = sorted({found.k for source in summary.sources for found in source.pass_at_k})
    table = _table("data source", "trajectories", "scored", "failed", "reward", *(f"pass@{k}" for k in ks))
    for source in summary.sources:
        _add(table, source.data_source or "-", *_counts(source), _reward(source), *_chances(source, ks))
    return table


def _parts(summary: Summary) -> Table:
    names = list(dict.fromkeys(name for source in summary.sources for name in source.parts))
    table = _table("parts of the reward", *names)
    for source in summary.sources:
        means = (f"{source.parts[name]:.3f}" if name in source.parts else "-" for name in names)
        _add(table, source.data_source or "-", *means)
    return table


def _counts(source: SourceSummary) -> Iterator[str]:
    for count in (source.num_trajectories, source.num_scored, source.num_failed):
        yield f"{count:,}"


def _reward(source: SourceSummary) -> str:
    if source.reward_mean is None:
        return "-"
    spread = "" if source.reward_std is None else f" ± {source.reward_std:.3f}"
    return f"{source.reward_mean:.3f}{spread}"


def _chances(source: SourceSummary, ks: Sequence[int]) -> Iterator[str]:
    values = {found.k: f"{found.value:.3f}" for found in source.pass_at_k}
    for k in ks:
        yield values.get(k, "-")


def _endings(summary: Summary) -> Table:
    table = _table("stop reason", "trajectories", "share")
    for reason, count in summary.stop_reasons.items():
        _add(table, reason, f"{count:,}", f"{count / summary.num_trajectories:.1%}")
    return table


def _failures(summary: Summary) -> Table:
    table = _table("failed at", "trajectories", "for example")
    table.columns[-1].justify = "left"
    table.columns[-1].overflow = "fold"
    for failure in summary.failures:
        detail = " ".join(failure.example.split())
        shown = detail if len(detail) <= _MAX_EXAMPLE else f"{detail[: _MAX_EXAMPLE - 1]}…"
        _add(table, failure.boundary, f"{failure.count:,}", f"{failure.example_uid}: {shown}")
    return table


def _timings(summary: Summary) -> Table:
    table = _table("stage", "mean", "max", "slowest")
    for stage in summary.stages:
        _add(table, stage.name, _seconds(stage.mean_s), _seconds(stage.max_s), stage.slowest or "-")
    return table


def _totals(summary: Summary) -> str:
    dropped = f", {summary.num_dropped:,} tasks dropped" if summary.num_dropped else ""
    dropped += f", {summary.num_cut:,} prompts cut" if summary.num_cut else ""
    forks = f", {summary.num_forks:,} forks" if summary.num_forks else ""
    return (
        f"{summary.num_trajectories:,} trajectories of {summary.num_tasks:,} tasks{forks}{dropped}; "
        f"{summary.sampled_tokens:,} tokens in {_seconds(summary.wall_s)} ({summary.tokens_per_s:,.0f} tokens/s)"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 1, 0), collapse_padding=True)
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right")
    return table


def _add(table: Table, *texts: str) -> None:
    table.add_row(*(cell(text) for text in texts))
