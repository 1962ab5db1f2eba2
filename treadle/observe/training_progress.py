"""Live progress of a training run: on a terminal; elsewhere one plain line a step, and one a minute between them.

Owns what is shown while a run trains. Called with steps, phases and validations; changes nothing.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from treadle.terminal import cell, in_notebook, make_console, say

if TYPE_CHECKING:
    from rich.console import RenderableType

log = logging.getLogger(__name__)

HEARTBEAT_S = 60.0
_EXIT_TIMEOUT_S = 2.0
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60


@dataclass(slots=True)
class TrainingState:
    """State of a training run that is shown."""

    total_steps: int
    step: int = 0
    phase: str = "starting"
    rewards: list[float] = field(default_factory=list)
    """Of each step; its loss in supervised fine-tuning."""
    measure: str = "reward"
    successes: list[tuple[int, float]] = field(default_factory=list)
    """Validation success by step."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Validation loss by step."""
    tokens_per_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    """Trajectories that failed so far, by boundary."""
    truncated: float = 0.0
    """The share of the last batch that a limit ended."""


class TrainingView:
    """Shows a run while its `with` block runs."""

    def __init__(
        self,
        total_steps: int = 0,
        stream: TextIO | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        *,
        quiet: bool = False,
    ) -> None:
        """`total_steps`, where it is known before the run begins."""
        self._state = TrainingState(total_steps)
        self._phase: Callable[[], str] = str
        self._stream = stream or sys.stderr
        self._quiet = quiet
        """Whether lines go to the run's log alone."""
        self._live: Any = None
        self._heartbeat_s = heartbeat_s
        self._said = threading.Event()
        """Set with each line."""
        self._over = False
        self._line_at = time.monotonic()
        self._thread = threading.Thread(target=self._beat, name="treadle-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        if self._quiet:
            return self
        if in_notebook():
            from treadle.observe.rich_output import NotebookDisplay

            self._live = NotebookDisplay(self.draw)
            self._live.start()
        elif self._stream.isatty():
            from rich.live import Live

            self._live = Live(console=make_console(self._stream), get_renderable=self.draw, refresh_per_second=4)
            self._live.start()
        else:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._over = True
        self._said.set()
        if self._thread.is_alive():
            self._thread.join(_EXIT_TIMEOUT_S)

    def _beat(self) -> None:
        """Print the current phase whenever nothing was printed for a while."""
        while not self._over:
            if self._said.wait(self._heartbeat_s):
                self._said.clear()
            else:
                state, silent_s = self._state, time.monotonic() - self._line_at
                phase = self._phase() or state.phase
                done = f"after step {state.step} of {state.total_steps}: " if state.total_steps else ""
                line = f"{done}{phase}, no news for {silent_s:.0f} s"
                with suppress(OSError, ValueError):  # the stream is gone
                    say(line, file=self._stream)

    def _say(self, line: str) -> None:
        log.info("%s", line)
        if self._live is None and not self._quiet:
            say(line, file=self._stream)
            self._line_at = time.monotonic()
            self._said.set()

    def begin(self, total_steps: int) -> None:
        """The run is put together, and takes so many steps."""
        self._state.total_steps = total_steps

    def watch(self, phase: Callable[[], str]) -> None:
        """Show the current phase, which `phase` returns; empty between phases."""
        self._phase = phase

    def resume(self, step: int) -> None:
        """The run goes on after `step`."""
        self._state.step = step

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended."""
        state = self._state
        state.step = step
        if "sft/loss" in metrics:
            state.measure = "loss"
        state.rewards.append(metrics.get("sft/loss", metrics.get("reward/mean", 0.0)))
        state.tokens_per_s = metrics.get("rollout/tokens_per_s", metrics.get("sft/tokens_per_s", 0.0))
        state.seconds = {
            name.removeprefix("seconds/"): value for name, value in metrics.items() if name.startswith("seconds/")
        }
        state.truncated = metrics.get("rollout/truncated", 0.0)
        for name, count in metrics.items():
            if name.startswith("failed/"):
                boundary = name.removeprefix("failed/")
                state.failed[boundary] = state.failed.get(boundary, 0) + int(count)
        self._say(describe(state))

    def on_validation(self, step: int, success: float) -> None:
        """A validation has ended."""
        self._state.successes.append((step, success))
        self._say(f"validation after step {step}: success {success:.3f}")

    def on_validation_loss(self, step: int, loss: float) -> None:
        """A validation of supervised fine-tuning has ended."""
        self._state.losses.append((step, loss))
        self._say(f"validation after step {step}: loss {loss:.4f}")

    def draw(self) -> "RenderableType":
        """The view as it stands."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        state = self._state
        state.phase = self._phase() or state.phase
        table = Table.grid(padding=(0, 2))
        table.add_row("step", cell(f"{state.step} of {state.total_steps or '?'}   {state.phase}"))
        table.add_row("", ProgressBar(total=state.total_steps or None, completed=state.step, width=CURVE_WIDTH))
        if state.rewards:
            table.add_row(state.measure, f"{draw_curve(state.rewards)} {state.rewards[-1]:.3f}")
        if state.successes:
            shown = state.successes[-5:]
            table.add_row("success", "  ".join(f"{success:.2f} (step {step})" for step, success in shown))
        if state.losses:
            shown = state.losses[-5:]
            table.add_row("validation", "  ".join(f"{loss:.3f} (step {step})" for step, loss in shown))
        if state.seconds:
            table.add_row("rollout" if state.measure == "reward" else "speed", f"{state.tokens_per_s:,.0f} tokens/s")
            if trouble := describe_trouble(state):
                table.add_row("", cell(trouble, style="red" if state.failed else ""))
            table.add_row("seconds", "  ".join(f"{name} {value:.2f}" for name, value in state.seconds.items()))
        return table


def draw_curve(values: list[float], width: int = CURVE_WIDTH) -> str:
    """A curve one character high: the last `width` values, between the least and the most of them."""
    shown = values[-width:]
    least, most = min(shown), max(shown)
    reach = (most - least) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((value - least) / reach * len(BARS)))] for value in shown)


def describe(state: TrainingState) -> str:
    """A step in one line."""
    waited = "validation" in state.seconds  # then the validation itself is the same seconds once more
    spans = {name: value for name, value in state.seconds.items() if not (waited and name == "validating")}
    if not spans.get("validation", 1.0) >= 0.005:
        del spans["validation"]  # of a step without one
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in spans.items())
    trouble = describe_trouble(state)
    return (
        f"step {state.step}/{state.total_steps}: {state.measure} {state.rewards[-1]:.3f}, "
        f"{f'{trouble}, ' if trouble else ''}{state.tokens_per_s:,.0f} tokens/s, {seconds}"
    )


def describe_trouble(state: TrainingState) -> str:
    """What failed so far, by boundary, and the share of the last batch that limits ended; empty where neither."""
    parts = [f"{sum(state.failed.values())} failed ({_counts(state.failed)})"] if state.failed else []
    share = f"{state.truncated:.0%}" if state.truncated >= 0.005 else "under 1%"
    return ", ".join([*parts, f"{share} truncated"] if state.truncated else parts)


def _counts(failed: Mapping[str, int]) -> str:
    return ", ".join(f"{boundary} {count}" for boundary, count in sorted(failed.items()))
