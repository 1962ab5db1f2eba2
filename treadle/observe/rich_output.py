"""Rich output: live progress on a terminal or in a notebook, and the summary of a rollout as tables.

Owns the drawing. Imports rich, so it is imported only where something is drawn; the numbers come from `progress` and
`summary`.
Invariant: whatever happens to the terminal is an OSError or a ValueError here, never an exit. What a model or a tool
wrote is shown as it is, never read as markup or as an escape sequence.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from typing import Any, NoReturn, TextIO

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from treadle.observe.progress import ProgressView
from treadle.observe.summary import SourceSummary, Summary
from treadle.terminal import cell, printable

_COLUMNS, _LINES = 80, 24
_NOTEBOOK_COLUMNS = 100
_STYLES = {"ready": "green", "paused": "yellow", "dead": "red"}


class _ProgressConsole(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Rich would end the process here."""
        raise BrokenPipeError("the terminal is gone")


class TerminalScreen:
    """A block of lines at the bottom of the terminal; what is printed meanwhile scrolls above it."""

    def __init__(self, live: Live, stream: TextIO) -> None:
        self._live = live
        self._stream = stream

    @classmethod
    def open(cls, stream: TextIO) -> "TerminalScreen | None":
        """A started screen, or None where the terminal cannot move its cursor."""
        console = _ProgressConsole(file=stream, markup=False, emoji=False, highlight=False)
        if not console.is_terminal or console.is_dumb_terminal:
            return None
        live = Live(console=console, auto_refresh=False)
        live.start()
        return cls(live, stream)

    def show(self, view: ProgressView) -> None:
        self._fit()
        self._live.update(render_progress(view), refresh=True)

    def close(self) -> None:
        """Leave the last view standing, and the cursor as it was."""
        self._live.stop()

    def _fit(self) -> None:
        """Follow the size of this very terminal: rich asks the standard streams, and would keep an odd answer."""
        columns, lines = os.get_terminal_size(self._stream.fileno())
        self._live.console.size = ConsoleDimensions(columns or _COLUMNS, lines or _LINES)


class NotebookDisplay:
    """A block in the output of a notebook's cell that is drawn anew as it changes, once a second and at the end."""

    def __init__(self, get_renderable: Callable[[], RenderableType], interval_s: float = 1.0) -> None:
        self._get_renderable = get_renderable
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="treadle-display", daemon=True)

    def start(self) -> None:
        from IPython import display

        show: Callable[..., Any] = display.display
        self._handle = show(render_for_notebook(self._get_renderable()), raw=True, display_id=True)
        self._thread.start()

    def stop(self) -> None:
        """Draw the last state, and leave it standing."""
        self._over.set()
        self._thread.join()
        self._draw()

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            self._draw()

    def _draw(self) -> None:
        self._handle.update(render_for_notebook(self._get_renderable()), raw=True)


def render_for_notebook(renderable: RenderableType) -> dict[str, str]:
    """What a notebook shows, by MIME type."""
    console = Console(
        record=True,
        file=StringIO(),
        width=_NOTEBOOK_COLUMNS,
        force_terminal=True,
        force_jupyter=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(renderable)
    page = '<pre style="white-space:pre;line-height:normal">{code}</pre>'
    html = console.export_html(inline_styles=True, code_format=page, clear=False)
    return {"text/html": html, "text/plain": console.export_text()}


class NotebookScreen:
    """A rollout's progress in a notebook."""

    def __init__(self) -> None:
        self._view: ProgressView | None = None
        self._display = NotebookDisplay(self._render)
        self._display.start()

    def show(self, view: ProgressView) -> None:
        self._view = view

    def close(self) -> None:
        self._display.stop()

    def _render(self) -> RenderableType:
        return "" if self._view is None else render_progress(self._view)


def render_progress(view: ProgressView) -> RenderableType:
    """A progress bar, the numbers, and one line for each replica."""
    bar = Table.grid(expand=True)  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=view.total, completed=view.done, pulse=view.total is None))
    lines: list[RenderableType] = [bar, Text(printable(view.line), overflow="fold")]
    if view.replicas:
        table = Table.grid(padding=(0, 2))
        for replica in view.replicas:
            state = cell(replica.state, _STYLES.get(replica.state, ""))
            table.add_row(cell(replica.name), state, f"{replica.running} running")
        lines.append(table)
    return Group(*lines)


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
