"""Interrupts of a call from Python: what is raised, and how a script ends that does not catch it.

A command that was interrupted ends with status 130 and one line. A script ends the same way: left to Python it ends
with a traceback, and with status 1 where a library's clean-up hides the interrupt from it. In a REPL, in a notebook and
where the script catches it, KeyboardInterrupt is an exception like any other.
"""

import atexit
import os
import sys
import traceback
from contextlib import suppress
from types import TracebackType

from treadle.exit_status import STATUS_INTERRUPTED
from treadle.terminal import warn


def make_interrupt(message: str) -> KeyboardInterrupt:
    """The exception to raise. A script that does not catch it ends with its message and status 130."""
    interrupt, before = KeyboardInterrupt(message), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is not interrupt or hasattr(sys, "ps1") or sys.flags.interactive:
            before(kind, error, trace)
            return
        warn("".join(traceback.format_exception_only(error)).rstrip())
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(STATUS_INTERRUPTED)

    sys.excepthook = hook
    return interrupt
