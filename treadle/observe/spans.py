"""Where the time of a step goes: named spans, added up, and each with its beginning and end."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Interval = tuple[str, float, float]
"""A name, and when it began and ended, in seconds since the epoch."""


class Spans:
    """Spans since the last `take`. A span inside another counts in both."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._epoch = time.time() - clock()
        self._intervals: list[Interval] = []
        self.current = ""
        """The span that is open, for whoever shows what a run is doing."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block under `name`."""
        outer, self.current = self.current, name
        try:
            with self.beside(name):
                yield
        finally:
            self.current = outer

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """The same, for work that goes on beside the step's own."""
        began = self._clock()
        try:
            yield
        finally:
            self._intervals.append((name, self._epoch + began, self._epoch + self._clock()))

    def take(self) -> tuple[Interval, ...]:
        """The spans that ended, in order of ending; the next call starts from nothing."""
        taken, self._intervals = tuple(self._intervals), []
        return taken


def add_up(intervals: tuple[Interval, ...]) -> dict[str, float]:
    """Seconds by name."""
    seconds: dict[str, float] = {}
    for name, began, ended in intervals:
        seconds[name] = seconds.get(name, 0.0) + ended - began
    return seconds
