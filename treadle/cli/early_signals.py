"""Early signals: SIGINT, SIGTERM and SIGHUP while the command itself is still being imported, which takes a moment.

Nothing has been started then, so the process says that it was interrupted, and ends at once. `main` sets its own
handlers when it begins. Imports nothing that takes time.
"""

import os
import signal
from contextlib import suppress
from types import FrameType

from treadle.exit_status import STATUS_INTERRUPTED
from treadle.terminal import warn

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_USUAL = (signal.SIG_DFL, signal.default_int_handler)


def handle_early_signals() -> None:
    """End in order from now on; a signal that the caller ignores or handles (nohup) is left alone."""
    for number in _SIGNALS:
        if signal.getsignal(number) in _USUAL:
            signal.signal(number, _end)


def restore_signals() -> None:
    """Hand the signals over, as they were: to handlers that know what has been started."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(Exception):  # whatever keeps it from being said, it ends
        warn(f"interrupted by {signal.Signals(number).name} before anything was started")
    os._exit(STATUS_INTERRUPTED)
