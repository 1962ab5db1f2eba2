"""A view of a rollout while it runs: live on a terminal, a plain line every few seconds anywhere else.

Owns when something is shown and the plain words for it; `screen` draws on terminals. Reads a tally, changes nothing.
Invariant: a view never ends a rollout: when its stream is closed, full or stuck, it falls silent.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO

from treadle.observe.tally import Tally
from treadle.terminal import say

_EXIT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """How one replica does, in a word."""

    name: str
    state: str
    running: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """What there is to show at one moment."""

    done: int
    total: int | None
    running: int
    line: str
    replicas: tuple[ReplicaState, ...] = ()


class Screen(Protocol):
    """Somewhere to show a view. Raises OSError or ValueError when the stream is gone."""

    def show(self, view: View) -> None: ...

    def close(self) -> None: ...


class PlainScreen:
    """One line for each view."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, view: View) -> None:
        busy = ", ".join(f"{replica.name} {replica.state}" for replica in view.replicas if replica.state != "ready")
        say(f"{view.line}, {busy}" if busy else view.line, file=self._stream)

    def close(self) -> None:
        """Nothing to put back."""


class LiveProgress:
    """Shows a tally while its `with` block runs, from a thread of its own."""

    def __init__(
        self,
        tally: Tally,
        *,
        total: int | None = None,
        replicas: Callable[[], Sequence[ReplicaState]] | None = None,
        stream: TextIO | None = None,
        interval_s: float = 0.25,
        plain_interval_s: float = 5.0,
    ) -> None:
        self._tally = tally
        self._total = total
        self._replicas = replicas
        self._stream = stream or sys.stdout
        self._interval_s = interval_s
        self._plain_interval_s = plain_interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="treadle-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the last numbers. A stream that nobody reads is left behind after a moment."""
        self._over.set()
        self._thread.join(_EXIT_TIMEOUT_S)

    def view(self) -> View:
        """The numbers of this moment."""
        tally = self._tally
        replicas = () if self._replicas is None else tuple(self._replicas())
        return View(tally.done, self._total, tally.running, describe(tally, self._total), replicas)

    def _run(self) -> None:
        try:
            screen, interval_s = self._choose()
            try:
                while not self._over.wait(interval_s):
                    screen.show(self.view())
                screen.show(self.view())
            finally:
                screen.close()
        except (OSError, ValueError):
            return  # the stream is gone, and with it whoever looked on

    def _choose(self) -> tuple[Screen, float]:
        if not self._stream.isatty():
            return PlainScreen(self._stream), self._plain_interval_s
        from treadle.observe.screen import TerminalScreen  # rich is slow to import, and needed here only

        terminal = TerminalScreen.open(self._stream)
        if terminal is None:
            return PlainScreen(self._stream), self._plain_interval_s
        return terminal, self._interval_s


def describe(tally: Tally, total: int | None = None) -> str:
    """The numbers so far in one line of plain characters."""
    parts = [f"{tally.done}/{total} done" if total is not None else f"{tally.done} done", f"{tally.running} running"]
    if tally.failed:
        boundaries = ", ".join(f"{boundary} {count}" for boundary, count in sorted(tally.failed.copy().items()))
        parts.append(f"{tally.num_failed} failed ({boundaries})")
    if tally.truncated:
        parts.append(f"{sum(tally.truncated.copy().values())} truncated")
    if tally.retried:
        parts.append(f"{tally.retried} retried")
    if tally.dropped:
        parts.append(f"{tally.dropped} dropped")
    parts.append(f"{tally.tokens_per_s:,.0f} tokens/s")
    if tally.mean_reward is not None:
        parts.append(f"reward {tally.mean_reward:.4g}")
    return ", ".join(parts)
