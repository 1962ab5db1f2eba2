"""Errors: every one that treadle raises on purpose, as a tree.

    TreadleError
    ├── ConfigError            a bad config is an exit: every mistake in one report, status 2     (also a ValueError)
    ├── MisuseError            the API was called in a way that cannot work                       (also a RuntimeError)
    ├── SandboxFailure         a box did not start, died or did not answer: the boundary that used it takes it over
    ├── RowFull                messages leave no room for a token in a row: the agent loop decides what becomes of it
    ├── Failure                a bad trajectory is data: it belongs to exactly one boundary
    │   ├── PromptFailure        the task could not be rendered, or is too long
    │   ├── EngineFailure        an engine did not answer, or died
    │   │   └── RequestRefused     it works, and will not serve this request: no use to try again
    │   ├── ToolFailure          a tool's infrastructure broke; a tool that answers "no" is an observation
    │   ├── EnvironmentFailure   an environment or user simulator broke
    │   ├── LoopFailure          an agent loop's own code broke
    │   └── RewardFailure        a reward function crashed, ran out of time or gave no number
    │       └── ScoreFailure       which function, and which of these (treadle.reward.result)
    └── RunError               a run cannot go on: it ends with this cause and a non-zero status
        ├── NotFiniteError       a training step's numbers are not finite: its batch may be to blame
        ├── BudgetSpent          more trajectories failed than `rollout.failures` allows
        ├── EnginesLost          no engine of a rollout can go on with what was asked of it
        └── DeadlineError        a wait took longer than its deadline; the message says what was waited for

Anything else that escapes is a bug, and crashes as one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, ClassVar


class TreadleError(Exception):
    """The root of the tree above."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing wrong with a config: which key, what is wrong, and how to mend it."""

    key: str
    problem: str
    value: Any = None
    origin: object = None
    fix: str | None = None
    missing: str = ""
    """The config may be right, and this machine lacks something: its kind (model, file, package, GPU). Else empty."""
    count: int = 1
    """How many of that kind; 0 where they are not counted, as with memory."""

    def __str__(self) -> str:
        lines = [f"{self.key}: {self.problem}"]
        if self.origin is not None:
            lines.append(f"    from {self.origin}")
        if self.fix:
            lines.append(f"    {self.fix}")
        return "\n".join(lines)


class ConfigError(TreadleError, ValueError):
    """A config that cannot be used. Carries every mistake, not the first.

    >>> import treadle
    >>> try:
    ...     treadle.train("calculator", step=5, rollout={"n": 0})
    ... except treadle.ConfigError as error:
    ...     print(error.mistakes[0].key, "|", error.mistakes[0].fix)
    step | did you mean 'steps'?
    """

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        assert self.mistakes, "a ConfigError needs a mistake"
        super().__init__("\n".join(str(mistake) for mistake in self.mistakes))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Mistake, ...]]]:
        return ConfigError, (self.mistakes,)


class MisuseError(TreadleError, RuntimeError):
    """A call that cannot work where it was made; the message names the call that does."""


class RowFull(TreadleError):
    """Messages that leave no room for a token: `num_tokens` with what is before them, `max_tokens` fit."""

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens; a row holds {max_tokens}")
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class SandboxFailure(TreadleError):
    """A box's infrastructure broke: no exit status of a command, which is a result."""


class Boundary(StrEnum):
    """The part of the system a failure belongs to."""

    PROMPT = "prompt"
    ENGINE = "engine"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    LOOP = "loop"
    REWARD = "reward"


class Failure(TreadleError):
    """Why a trajectory has no result of its own. Never becomes a reward, never moves a baseline."""

    boundary: ClassVar[Boundary]


class PromptFailure(Failure):
    """The task could not be rendered, or its prompt is too long."""

    boundary = Boundary.PROMPT


class EngineFailure(Failure):
    """An engine did not answer, or died."""

    boundary = Boundary.ENGINE


class RequestRefused(EngineFailure):
    """The engine works and will not serve this request, now or later: no use to retry, no blame for the replica."""


class ToolFailure(Failure):
    """A tool's infrastructure broke."""

    boundary = Boundary.TOOL


class EnvironmentFailure(Failure):
    """An environment or user simulator broke."""

    boundary = Boundary.ENVIRONMENT


class LoopFailure(Failure):
    """An agent loop's own code broke."""

    boundary = Boundary.LOOP


class RewardFailure(Failure):
    """A reward function crashed, ran out of time or gave no number."""

    boundary = Boundary.REWARD


class RunError(TreadleError):
    """A run cannot go on."""


class NotFiniteError(RunError):
    """Training cannot go on because its numbers are not finite; the batch may be to blame."""


class BudgetSpent(RunError):
    """More trajectories failed than the failure budget allows."""


class EnginesLost(RunError):
    """Every engine of a rollout has died, and none can go on with what was asked of it."""


class DeadlineError(RunError):
    """A wait took longer than its deadline."""


@contextmanager
def blame(boundary: type[Failure]) -> Iterator[None]:
    """Whatever breaks inside belongs to `boundary`, unless it already belongs to another or was asked for outside."""
    try:
        yield
    except TreadleError:
        raise
    except BaseException as error:
        from treadle.aio import (  # brings asyncio, which the command does without at first
            describe_error,
            is_external_stop,
        )

        if is_external_stop(error):
            raise
        raise boundary(describe_error(error)) from error


def nearest(word: str, known: Iterable[str]) -> str | None:
    """A hint that names the known word closest to a mistyped one, if one is close."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else None
