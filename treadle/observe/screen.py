"""The live view on a terminal.

Owns the drawing, with rich. Imported only where there is a terminal to draw on.
Invariant: whatever happens to the terminal is an OSError or a ValueError here, never an exit.
"""

import os
from typing import NoReturn, TextIO

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from treadle.observe.progress import View
from treadle.terminal import cell, printable

_COLUMNS, _LINES = 80, 24
_STYLES = {"ready": "green", "paused": "yellow", "dead": "red"}


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Rich would end the process here."""
        raise BrokenPipeError("nobody reads the terminal any more")


class TerminalScreen:
    """A block of lines at the bottom of the terminal; what is printed meanwhile scrolls above it."""

    def __init__(self, live: Live, stream: TextIO) -> None:
        self._live = live
        self._stream = stream

    @classmethod
    def open(cls, stream: TextIO) -> "TerminalScreen | None":
        """A started screen, or None where the terminal cannot move its cursor."""
        console = _Console(file=stream, markup=False, emoji=False, highlight=False)
        if not console.is_terminal or console.is_dumb_terminal:
            return None
        live = Live(console=console, auto_refresh=False)
        live.start()
        return cls(live, stream)

    def show(self, view: View) -> None:
        self._fit()
        self._live.update(render(view), refresh=True)

    def close(self) -> None:
        """Leave the last view standing, and the cursor as it was."""
        self._live.stop()

    def _fit(self) -> None:
        """Follow the size of this very terminal: rich asks the standard streams, and would keep an odd answer."""
        columns, lines = os.get_terminal_size(self._stream.fileno())
        self._live.console.size = ConsoleDimensions(columns or _COLUMNS, lines or _LINES)


def render(view: View) -> RenderableType:
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
