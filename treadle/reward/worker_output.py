"""Worker output: what a reward function prints, on its way from its worker process to the console and the log.

Owns both ends. In the worker every line gets the name of the function that printed it; in the parent lines are cut,
counted and shown as foreign text. Invariant: printing never ends a score, and a flood of lines is cut short.
"""

import io
import logging
import os
from collections.abc import Callable

from treadle.terminal import printable, warn

log = logging.getLogger(__name__)

MAX_CHARS = 2_000
"""Of a line that are shown."""

MAX_LINES_PER_S = 100
"""Of one worker that are shown."""


class LabelledOutput(io.TextIOBase):
    """Standard output of a worker: whole lines, each with the name of the function that is running."""

    def __init__(self, descriptor: int) -> None:
        self.label = ""
        self._descriptor = descriptor
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        if len(self._line) > MAX_CHARS:
            lines, self._line = [*lines, self._line], ""
        for line in lines:
            self._send(line)
        return len(text)

    def end(self) -> None:
        """Send what stands on a line that was not ended."""
        if self._line:
            self._send(self._line)
            self._line = ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def _send(self, line: str) -> None:
        os.write(self._descriptor, f"{self.label}: {line[:MAX_CHARS]}\n".encode(errors="replace"))


class PrintedLines:
    """The lines of one worker, as they arrive."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rest = b""
        self._second = 0
        self._shown = 0
        self._left_out = 0

    def add(self, data: bytes) -> None:
        """Show the lines that are complete."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[: 4 * MAX_CHARS]
        for line in lines:
            self._show(line.decode(errors="replace"))

    def end(self) -> None:
        """Show what is left: the worker has gone."""
        if self._rest:
            self._show(self._rest.decode(errors="replace"))
            self._rest = b""
        self._say_left_out()

    def _show(self, line: str) -> None:
        second = int(self._clock())
        if second != self._second:
            self._say_left_out()
            self._second, self._shown = second, 0
        if self._shown >= MAX_LINES_PER_S:
            self._left_out += 1
            return
        self._shown += 1
        _say(line[: 2 * MAX_CHARS])

    def _say_left_out(self) -> None:
        if self._left_out:
            _say(f"{self._left_out:,} more printed lines left out: at most {MAX_LINES_PER_S} a second are shown")
        self._left_out = 0


def _say(line: str) -> None:
    text = f"printed by reward {line}"
    warn(text)
    log.info("%s", printable(text))
