"""`run.log`: what a run says while it runs, in its directory.

Owns the handlers of Python's `logging` while a run goes on. Knows nothing of who logs.
Invariant: every message of treadle's loggers from INFO on, and every warning of anybody else's, is a line of the file;
warnings still reach standard error. A file that cannot be written never ends a run.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treadle.journal.directory import DIRECTORY_MODE

FILE_NAME = "run.log"
_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def logging_to(run_dir: Path) -> Iterator[None]:
    """Append what is logged to the run directory, which is made if it is not there."""
    run_dir.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    descriptor = os.open(run_dir / FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    root, own = logging.getLogger(), logging.getLogger("treadle")
    with os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace") as stream:
        file = _Quiet(stream)
        file.setFormatter(logging.Formatter(_FORM))
        file.addFilter(lambda record: record.name.startswith("treadle") or record.levelno >= logging.WARNING)
        handlers: list[logging.Handler] = [file]
        if not root.handlers:
            handlers.append(_to_standard_error())
        level = own.level
        own.setLevel(min(level or logging.INFO, logging.INFO))
        for handler in handlers:
            root.addHandler(handler)
        try:
            yield
        finally:
            own.setLevel(level)
            for handler in handlers:
                root.removeHandler(handler)


class _Quiet(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler whose stream may break: a full disk is the journal's to report."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing: there is nowhere left to say it."""


def _to_standard_error() -> logging.Handler:
    """What Python does by itself while no handler is there."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler
