"""Signals that end a training run: SIGINT, SIGTERM (Slurm, Kubernetes) and SIGHUP (a closed terminal) all save.

Owns the handlers while a run goes on. What stopping means is the run's.

    before the run is put together   what was started is closed again, as after any error
    after that                       the run is asked to stop: sampling ends at once, the step under way is finished and
                                     saved; after SIGTERM and SIGHUP within `checkpoint.grace_s`, or the process ends
                                     without it, at its last checkpoint
    where code holds the interpreter the process is killed at the third Ctrl-C, or after the grace, from outside
                                     (treadle/process/interrupt_watcher.py)
`run.json` says "interrupted" from the moment of the signal, whatever comes after it.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType, TracebackType
from typing import Self

from treadle.errors import TreadleError
from treadle.journal import Journal, RunStatus
from treadle.process.interrupt_watcher import watched_interrupts
from treadle.terminal import show_cursor, warn

log = logging.getLogger(__name__)

STATUS_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLOSE_S = 5.0


class StopSignals:
    """Used as a context around a run, on its loop; signals reach the main thread alone, `request` any other."""

    def __init__(self, grace_s: float, leave: Callable[[int], None] = os._exit) -> None:
        self._grace_s = grace_s
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._stop: Callable[[], None] | None = None
        self._before: dict[signal.Signals, object] = {}
        self._watcher = ExitStack()
        self.journal: Journal | None = None
        """Told of the signal, once there is one."""
        self.received: str | None = None

    def __enter__(self) -> Self:
        self._watcher.enter_context(watched_interrupts(self._grace_s))
        self.install()
        return self

    def install(self) -> None:
        """Set the handlers, again where a library has set its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, self._handle):  # ignored, as nohup asks for
                self._before.setdefault(number, before)
                signal.signal(number, self._handle)  # the loop's own handlers would take the watcher's socket

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
        self._watcher.close()

    def stop_with(self, stop: Callable[[], None]) -> None:
        """From now on a signal calls `stop`; one that came before does so now."""
        self._stop = stop
        self.install()
        if self.received is not None:
            stop()

    def request(self) -> None:
        """Stop as after SIGINT; from any thread."""
        with suppress(RuntimeError):  # the loop is closed, and the run over
            self._loop.call_soon_threadsafe(self._stop_once)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._receive, signal.Signals(number))

    def _stop_once(self) -> None:
        if self.received is None:
            self._receive(signal.SIGINT)

    def _receive(self, number: signal.Signals) -> None:
        first, self.received = self.received is None, self.received or number.name
        if number is signal.SIGINT and not first:
            warn("interrupted again: once more ends it at once")
            signal.signal(number, signal.SIG_DFL)
            show_cursor()
            return
        if first:
            warn(f"{number.name}: stopping, and saving what is done")
            log.info("received %s", number.name)
        if self.journal is not None and first:
            self.journal.interrupt(number.name)
        if self._stop is not None:
            self._stop()
        elif self._task is not None:
            self._task.cancel()
        if number is not signal.SIGINT and first:
            self._loop.call_later(self._grace_s, self._give_up)

    def _give_up(self) -> None:
        """The grace is over: end here, before the process is killed with its last records unwritten."""
        warn(
            f"{self.received}: the step under way was not done and saved within checkpoint.grace_s = {self._grace_s:g} "
            "s: the run ends here, and the same command goes on from its last checkpoint"
        )
        if self.journal is not None:
            try:
                self.journal.close_blocking(RunStatus.INTERRUPTED, self.received, _CLOSE_S)
            except TreadleError as error:
                log.warning("%s", error)
        self._leave(STATUS_INTERRUPTED)
