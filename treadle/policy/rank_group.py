"""Data-parallel group: all ranks of a sharded run, called from the driving process.

Owns how they are called: all at once, with a deadline, and how their errors become one. The code that starts the
processes supplies handles; see `local_ranks`.
Waits: a call waits for every rank, until one fails; then a moment longer, to learn which failure came first.
Invariant: ranks that may be out of step are never called again.
"""

import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol

from treadle.errors import DeadlineError, RunError, TreadleError

GRACE_S = 5.0
"""How long the others may take to fail as well. A rank that dies breaks the connections of the rest, which may be seen
first; what is reported is the death."""


LAUNCH_KEY = "rollout.limits.launch_timeout_s"
"""What bounds the start of ranks."""


class RankDied(RunError):
    """The process of a rank ended."""


class RankFailed(RunError):
    """A rank raised an unexpected error: a bug, or the effect of another rank's end. A note has its traceback."""


class RankHandles(Protocol):
    """The far ends of a run's ranks, in their order."""

    @property
    def names(self) -> Sequence[str]:
        """What to call each in an error, such as `policy rank 1 (pid 4711)`."""
        ...

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Sequence[Future[Any]]:
        """Let every rank run `function(rank, *args)` (see `FSDPRank.run`); one future each, without waiting.

        `function` is importable by its name. A future fails with RankDied when the process ends, and otherwise with
        what `portable_error` makes of the rank's error.
        """
        ...

    def close(self) -> None:
        """End every process. Closing twice is harmless."""
        ...


class RankGroup:
    """Calls all ranks at once; a second thread waits for the first.

    `key` is the config key of `timeout_s`, for the error message.
    """

    def __init__(self, handles: RankHandles, timeout_s: float, key: str = "trainer.rank_timeout_s") -> None:
        self._handles = handles
        self._timeout_s = timeout_s
        self._key = key
        self._broken: RunError | None = None
        self._turn = threading.Lock()

    def __len__(self) -> int:
        return len(self._handles.names)

    def run(self, doing: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(rank, *args)` returned on each rank. `doing` says in errors what was under way."""
        with self._turn:
            return self._run(doing, function, *args)

    def _run(self, doing: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        if self._broken is not None:
            raise RunError(f"the policy's ranks cannot go on: {self._broken}") from self._broken
        futures = self._handles.submit(function, args)
        wait(futures, self._timeout_s, FIRST_EXCEPTION)
        if any(future.done() and future.exception() for future in futures):
            raise self._find_cause(doing, futures)
        if late := [name for name, future in zip(self._handles.names, futures, strict=True) if not future.done()]:
            limit = f"{self._timeout_s:g} s; if it needs longer, raise {self._key}"
            self._broken = DeadlineError(f"{', '.join(late)} did not finish {doing} within {limit}")
            raise self._broken
        return [future.result() for future in futures]

    def _find_cause(self, doing: str, futures: Sequence[Future[Any]]) -> BaseException:
        """The failure that the others follow from. RankGroup that all failed alike, on purpose, are still in step."""
        wait(futures, GRACE_S)
        failures = [future.exception() if future.done() else None for future in futures]
        at, cause = min(((at, found) for at, found in enumerate(failures) if found), key=lambda item: _rank(item[1]))
        cause.add_note(f"from {self._handles.names[at]}, in {doing}")
        if any(type(found) is not type(cause) for found in failures) or isinstance(cause, RankDied | RankFailed):
            self._broken = cause if isinstance(cause, RunError) else RunError(str(cause))
        return cause

    def close(self) -> None:
        self._handles.close()


def portable_error(error: Exception, name: str) -> TreadleError:
    """An error as it leaves the rank `name`: as it is where it is treadle's own, and otherwise by its words."""
    if isinstance(error, TreadleError):
        return error
    broke = RankFailed(f"{name} failed: {type(error).__name__}: {error}")
    broke.add_note("".join(traceback.format_exception(error)))
    return broke


def _rank(error: BaseException) -> int:
    """Causes before what may follow from them."""
    return 0 if isinstance(error, RankDied) else 2 if isinstance(error, RankFailed) else 1
