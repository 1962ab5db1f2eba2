"""Supervisor of processes, with the restart policy: when one that died is started again, and what is reported of it.

Owns the restart policy. Knows no process: what is started is whatever `start` returns.

    current    waits for a start that is under way, or makes one: for processes that are needed only when called
    restart    the attempts themselves, for a supervisor that keeps its process running (`engine`);
               `restart_blocking` for a thread that uses one process (`reward.classifier`)
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from treadle.errors import RunError, TreadleError
from treadle.terminal import warn


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The numbers behind giving up."""

    attempts: int = 3
    """Starts that may fail in a row, or processes that may end within `min_uptime_s` in a row."""
    min_uptime_s: float = 60.0
    """A process that lived longer did not die of its start."""
    first_wait_s: float = 1.0
    """Before the second attempt; doubled each time."""
    place_s: float = 30.0
    """How long a replica may look for another node before the run goes on without it."""

    def wait_s(self, attempt: int) -> float:
        """The back-off before an attempt, of which the first is 1."""
        return 0.0 if attempt < 2 else self.first_wait_s * 2 ** (attempt - 2)


DEFAULT_POLICY = RestartPolicy()


@dataclass(frozen=True, slots=True)
class Recovery:
    """What became of a process that died."""

    replica: str
    cause: str
    replacement: str | None
    """None: there is none, for `reason`. The same name: it is a new process under the old name."""
    seconds: float
    """From its death to its replacement's first request, or to this report."""
    reason: str = ""
    place: str = ""
    """Where the replacement is, if it had to move."""

    def __str__(self) -> str:
        moved = f" on {self.place}" if self.place else ""
        if self.replacement == self.replica:
            return f"{self.replica} serves again{moved} after {self.seconds:.1f} s: {self.cause}"
        died = f"{self.replica} died: {self.cause}"
        if self.replacement is None:
            return f"{died}; it could not be brought back: {self.reason}"
        return f"{died}; {self.replacement} took its place{moved} after {self.seconds:.1f} s"


def print_recovery(recovery: Recovery) -> None:
    """The default place for reports: standard error."""
    warn(f"note: {recovery}")


class RestartFailed(RunError):
    """A process could not be started again."""


T = TypeVar("T")


async def restart(
    start: Callable[[], Awaitable[T]],
    policy: RestartPolicy,
    quick_exits: int = 1,
    *,
    retry: type[Exception] = TreadleError,
) -> T:
    """What `start` starts. `quick_exits` is how often it ended within `min_uptime_s` in a row, the last time included.

    RestartFailed, with the last problem, when the policy's attempts are used up, or when `start` raises it. An error
    that is no `retry` passes.
    """
    problem, last = f"it died {quick_exits} times in a row, each time within {policy.min_uptime_s:g} s", None
    for attempt in range(quick_exits, policy.attempts + 1):
        await asyncio.sleep(policy.wait_s(attempt))
        try:
            return await start()
        except RestartFailed:
            raise
        except retry as error:
            problem, last = str(error), error
    raise RestartFailed(problem) from last


def restart_blocking(
    start: Callable[[], T],
    policy: RestartPolicy,
    *,
    retry: type[Exception] = TreadleError,
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """As `restart`, for code that does not await; `wait` may end a back-off early."""
    problem, last = "", None
    for attempt in range(1, policy.attempts + 1):
        wait(policy.wait_s(attempt))
        try:
            return start()
        except RestartFailed:
            raise
        except retry as error:
            problem, last = str(error), error
    raise RestartFailed(problem) from last


class Endable(Protocol):
    """A process as a supervisor sees it."""

    @property
    def over(self) -> bool:
        """Whether it serves no more."""
        ...

    async def end(self) -> None: ...


P = TypeVar("P", bound=Endable)


class Supervisor(Generic[P]):
    """Keeps one process at hand: when it is over, the next begins as soon as it is needed."""

    def __init__(self, start: Callable[[], Awaitable[P]], policy: RestartPolicy) -> None:
        self._start = start
        self._policy = policy
        self._process: P | None = None
        self._starting = asyncio.Lock()
        self._first = True

    @property
    def process(self) -> P | None:
        """The one that was started last, if it has not been ended."""
        return self._process

    async def current(self) -> P:
        """The process that runs, started if it has to be; an error where none starts.

        The first start fails as it fails: that is a mistake of the config, or of the machine. Later ones are tried
        again, since what killed the last process may kill the next as it starts.
        """
        if self._process is not None and not self._process.over:
            return self._process
        async with self._starting:
            if self._process is None or self._process.over:
                await self.end()
                first, self._first = self._first, False
                self._process = await (self._start() if first else self._restart())
            return self._process

    async def _restart(self) -> P:
        try:
            return await restart(self._start, self._policy, retry=RunError)
        except RestartFailed as failed:
            raise failed.__cause__ or failed from None

    async def end(self) -> None:
        """End the process that runs, if there is one."""
        if self._process is not None:
            await self._process.end()
            self._process = None
