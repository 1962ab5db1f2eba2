"""Why a trajectory has no score: one kind for each way a reward function or a reward model can fail.

Owns the kinds and the one exception that carries them. Knows nothing about processes, functions or models.
Invariant: a failure names its kind first, so a table can count kinds by the text before the colon.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from traceback import extract_tb

from treadle.errors import RewardFailure

MAX_DETAIL = 500


class Fault(StrEnum):
    """The ways a reward function can fail; the last three are those of models only."""

    TIMEOUT = "timeout"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    CRASH = "crash"
    EXCEPTION = "exception"
    NO_RESULT = "no_result"
    NOT_A_NUMBER = "not_a_number"
    OUT_OF_BOUNDS = "out_of_bounds"
    TOO_LARGE = "too_large"
    CLOSED = "closed"
    PROMPT = "prompt"
    """The trajectory could not be put into words for the model, or is too long."""
    ENGINE = "engine"
    """The judge's engine, or the classifier's server, did not answer."""
    UNREADABLE = "unreadable"
    """The judge answered, and its answer holds no score."""

    @property
    def may_pass(self) -> bool:
        """Another attempt may do better. Wrong results come back the same; engines and judges retry by themselves."""
        return self in (Fault.TIMEOUT, Fault.MEMORY, Fault.CRASH, Fault.EXCEPTION)


class ScoreFailure(RewardFailure):
    """One failed attempt at a score. `problem` completes the sentence "reward function X …", or "reward model X …".

    `past_deadline`: one of ours ended it, not an error of its own. `computed`: it spent that time computing.
    """

    def __init__(
        self,
        fault: Fault,
        problem: str,
        function: str = "",
        kind: str = "function",
        past_deadline: bool = False,
        computed: bool = False,
    ) -> None:
        super().__init__(fault, problem, function, kind, past_deadline, computed)
        self.fault, self.problem, self.function, self.kind = fault, problem, function, kind
        self.past_deadline, self.computed = past_deadline, computed

    @property
    def may_pass(self) -> bool:
        """Another attempt may do better: the same computation takes as long again, a wait need not."""
        return self.fault.may_pass and not self.computed

    def __str__(self) -> str:
        return f"{self.fault}: reward {self.kind} {self.function!r} {self.problem}"

    def by(self, function: str, kind: str = "function") -> "ScoreFailure":
        """The same failure with the function or model it belongs to."""
        return ScoreFailure(self.fault, self.problem, function, kind, self.past_deadline, self.computed)


@contextmanager
def name_function(function: str, kind: str = "function") -> Iterator[None]:
    """A failure inside belongs to this function or model."""
    try:
        yield
    except ScoreFailure as failure:
        raise failure.by(function, kind) from failure.__cause__


@contextmanager
def blame_function(function: str) -> Iterator[None]:
    """Whatever breaks inside is this function's."""
    try:
        yield
    except ScoreFailure as failure:
        raise failure.by(function) from failure.__cause__
    except SystemExit as error:
        raise ScoreFailure(Fault.CRASH, f"called sys.exit({str(error.code)[:80]})", function) from error
    except TimeoutError as error:
        raise ScoreFailure(Fault.TIMEOUT, f"raised {describe(error)}", function) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise ScoreFailure(Fault.MEMORY, "ran out of memory (reward.memory_mb)", function) from error
        raise ScoreFailure(Fault.EXCEPTION, f"raised {describe(error)}", function) from error
    except BaseException as error:
        from treadle.aio import is_from_outside  # brings asyncio, which a worker process does without

        if is_from_outside(error):
            raise
        raise ScoreFailure(Fault.CRASH, f"raised {describe(error)}", function) from error


def is_out_of_memory(error: BaseException) -> bool:
    """A full GPU has an error of its own, a full CPU has words; C code that lost its MemoryError has only these."""
    if isinstance(error, SystemError):
        return "without" in str(error) and "exception" in str(error)
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)
    )


def describe(error: BaseException) -> str:
    """An exception in one bounded line, with the place it was raised at."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_DETAIL]
    frames = extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text
