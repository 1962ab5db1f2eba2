"""Where the time of a step goes: named spans, added up."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Spans:
    """Seconds by name since the last `take`. A span inside another counts in both."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self.current = ""
        """The span that is open, for whoever shows what a run is doing."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block under `name`."""
        began, outer, self.current = self._clock(), self.current, name
        try:
            yield
        finally:
            self.current = outer
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - began

    def take(self) -> dict[str, float]:
        """The seconds so far; the next call starts from nothing."""
        taken, self._seconds = self._seconds, {}
        return taken
