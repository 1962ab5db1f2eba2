"""Reward results: what a function or model returned, read as a Score; or the failure that explains why there is none.

Owns the kinds of failure and the exception that carries them, the shapes that are accepted (a number, a Score, verl's
map with "score"), their JSON form, and the weighted sum. Knows nothing about processes, functions or models. JSON is
the only form in which a worker's results enter the parent.
Invariant: a Score that leaves this module holds finite numbers and JSON-like extra fields of bounded size. A failure
names its kind first, so a table can count kinds by the text before the colon.
"""

import json
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal, localcontext
from enum import StrEnum
from math import fsum
from traceback import extract_tb
from typing import Any

from treadle.errors import RewardFailure
from treadle.types import Row, Score, Trajectory

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
    NO_COLUMN = "no_column"
    """The row does not have a column that the function takes."""
    PROMPT = "prompt"
    """The trajectory could not be rendered for the model, or is too long."""
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
        """This failure, with the function or model it belongs to."""
        return ScoreFailure(self.fault, self.problem, function, kind, self.past_deadline, self.computed)


@contextmanager
def name_function(function: str, kind: str = "function") -> Iterator[None]:
    """Name this function or model in a failure inside."""
    try:
        yield
    except ScoreFailure as failure:
        raise failure.by(function, kind) from failure.__cause__


@contextmanager
def blame_function(function: str) -> Iterator[None]:
    """Report any exception inside as a failure of this function."""
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
        from treadle.aio import is_external_stop  # brings asyncio, which a worker process does without

        if is_external_stop(error):
            raise
        raise ScoreFailure(Fault.CRASH, f"raised {describe(error)}", function) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: by class, or by its text on a CPU and in C code that lost its MemoryError."""
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


MAX_RESULT_BYTES = 1 << 20

UNBOUNDED = (-math.inf, math.inf)

RewardResult = Score | tuple[Score, ...]
"""What a function of scope sample gives, or one of scope group: a score for each sample it was shown."""


def read_score(result: Any) -> Score:
    """The score in what a function returned."""
    if isinstance(result, Score):
        parts = {str(name): read_number(part) for name, part in result.parts.items()}
        return Score(read_number(result.value), parts, result.extra)
    if isinstance(result, Mapping):
        if "score" not in result:
            keys = ", ".join(map(str, list(result)[:5])) or "nothing"
            raise ScoreFailure(Fault.NO_RESULT, f'returned a map without "score"; it has {keys}')
        extra = {name: value for name, value in result.items() if name != "score"}
        return Score(read_number(result["score"]), extra=extra)
    return Score(read_number(result))


def read_scores(result: Any) -> tuple[Score, ...]:
    """The scores in what a function of scope group returned: anything that holds one result after the other."""
    if isinstance(result, str | bytes | Mapping | Score) or not isinstance(result, Iterable):
        shown = f"{type(result).__name__} {result!r:.80}"
        raise ScoreFailure(Fault.NO_RESULT, f"has scope group and returned {shown} instead of a list of scores")
    scores = tuple(read_score(item) for item in result)
    if not scores:
        raise ScoreFailure(Fault.NO_RESULT, "returned no scores at all")
    return scores


def check_count(answer: RewardResult, count: int) -> tuple[Score, ...]:
    """The scores of a group of `count` samples."""
    scores = answer if isinstance(answer, tuple) else (answer,)
    if len(scores) != count:
        raise ScoreFailure(Fault.NO_RESULT, f"returned {len(scores)} scores for {count} samples")
    return scores


def read_number(value: Any) -> float:
    """A finite float. Scalars of array libraries count; text does not."""
    if not isinstance(value, int | float) and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, int | float):
        raise ScoreFailure(Fault.NO_RESULT, f"returned {type(value).__name__} {value!r:.80} instead of a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ScoreFailure(Fault.NOT_A_NUMBER, f"returned {number}")
    return number


def encode(answer: RewardResult) -> bytes:
    """An answer as JSON. Array scalars and arrays become numbers and lists; what JSON cannot say becomes its repr."""
    fields = [_to_fields(score) for score in answer] if isinstance(answer, tuple) else _to_fields(answer)
    try:
        data = json.dumps(fields, default=_simplify, ensure_ascii=False).encode(errors="replace")
    except (TypeError, ValueError, RecursionError) as error:
        raise ScoreFailure(Fault.NO_RESULT, f"reported fields that are not JSON: {error}") from error
    if len(data) > MAX_RESULT_BYTES:
        raise ScoreFailure(Fault.TOO_LARGE, f"reported {len(data)} bytes of fields; {MAX_RESULT_BYTES} are allowed")
    return data


def _to_fields(score: Score) -> dict[str, Any]:
    return {"score": score.value, "parts": dict(score.parts), "extra": dict(score.extra)}


def _simplify(value: Any) -> Any:
    if callable(to_list := getattr(value, "tolist", None)):
        return to_list()
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, set | frozenset) else repr(value)


def as_worker_results(answer: RewardResult) -> RewardResult:
    """A result as it would come back from a worker."""
    return tuple(as_worker_result(score) for score in answer) if isinstance(answer, tuple) else as_worker_result(answer)


def as_worker_result(score: Score) -> Score:
    """A score as it would come back from a worker."""
    if not score.extra and not score.parts:
        return score
    settled = decode(encode(score))
    assert isinstance(settled, Score), "a score reads back as a score"
    return settled


def decode(data: bytes) -> RewardResult | ScoreFailure:
    """The score or scores of a worker's answer, or the failure it reports. `data` is not trusted: nonsense raises."""
    try:
        fields = json.loads(data)
        if isinstance(fields, list) and fields:
            return tuple(_from_fields(item) for item in fields)
        if "fault" in fields:
            return ScoreFailure(Fault(fields["fault"]), str(fields["problem"]))
        return _from_fields(fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ScoreFailure(Fault.CRASH, "garbled its worker's answer") from error


def _from_fields(fields: Mapping[str, Any]) -> Score:
    parts = {str(name): read_number(part) for name, part in fields["parts"].items()}
    return Score(read_number(fields["score"]), parts, dict(fields["extra"]))


def encode_failure(failure: ScoreFailure) -> bytes:
    """A failure as `decode` reads it."""
    return json.dumps({"fault": failure.fault, "problem": failure.problem}).encode()


def read_session(trajectory: Trajectory, always: Container[str] = ()) -> dict[str, Score]:
    """Rewards of the session itself: of its turns, and of its tool calls, each summed.

    A part is there where anything was given, or where it is one of `always`. In an episode of several agents it is the
    mean over the seats that the policy played.
    """
    if trajectory.seats:
        return _read_seats(trajectory, always)
    return _read_rows(trajectory.rows, always)


def _read_seats(trajectory: Trajectory, always: Container[str]) -> dict[str, Score]:
    seats = [_read_rows(rows, always) for rows in trajectory.policy_seats.values()]
    given: dict[str, list[float]] = {}
    for found in seats:
        for name, score in found.items():
            given.setdefault(name, []).append(score.value)
    return {name: Score(fsum(values) / len(seats)) for name, values in given.items()}


def _read_rows(rows: Sequence[Row], always: Container[str]) -> dict[str, Score]:
    turns = [turn for row in rows for turn in row.turns]
    given = {
        "environment": [turn.reward for turn in turns if turn.reward is not None],
        "tools": [result.reward for turn in turns for result in turn.results if result.reward is not None],
    }
    found: dict[str, Score] = {}
    for name, rewards in given.items():
        if rewards or name in always:
            with name_function(name, "part"):
                found[name] = Score(add_up({str(at): read_number(reward) for at, reward in enumerate(rewards)}))
    return found


def add_up(values: Mapping[str, float], weights: Mapping[str, float] | None = None) -> float:
    """Weighted sum in decimal arithmetic: 0.7 + 0.2 + 0.1 is 1, and not a little less."""
    with localcontext(prec=60):
        factors = weights or {}
        terms = (Decimal(repr(value)) * Decimal(repr(float(factors.get(name, 1.0)))) for name, value in values.items())
        return read_number(float(sum(terms, Decimal(0))))


def combine(
    scores: Mapping[str, Score],
    weights: Mapping[str, float],
    bounds: tuple[float, float] = UNBOUNDED,
    *,
    whole: bool = True,
) -> Score:
    """The weighted sum, each function's own score by name, and what they reported; a failure outside `bounds`.

    Not `whole`: more parts will follow, so the sum may be anything yet.
    """
    for name, score in scores.items():
        _check_bounds(score.value, bounds, name)
    value = add_up({name: score.value for name, score in scores.items()}, weights)
    if whole:
        _check_bounds(value, bounds, ", ".join(scores))
    parts: dict[str, float] = {}
    for name, score in scores.items():
        parts[name] = score.value
        for part, number in score.parts.items():
            parts[f"{name}/{part}"] = number
    return Score(value, parts, _merge({name: score.extra for name, score in scores.items()}))


def extend(
    before: Score | None,
    scores: Mapping[str, Score],
    weights: Mapping[str, float],
    bounds: tuple[float, float] = UNBOUNDED,
) -> Score:
    """A score with the parts of its group: the sum over all, in the order of `weights`; a failure outside `bounds`."""
    known = Score(0.0) if before is None else before
    added = combine(scores, weights, bounds, whole=False)
    parts = {**known.parts, **added.parts}
    ordered = {name: parts[name] for name in weights if name in parts}
    value = add_up(ordered, weights)
    _check_bounds(value, bounds, ", ".join(ordered))
    extra = _merge({name: score.extra for name, score in scores.items()})
    fields = {f"group/{name}" if name in known.extra else name: field for name, field in extra.items()}
    return Score(value, {**ordered, **parts}, {**known.extra, **fields})


def _check_bounds(value: float, bounds: tuple[float, float], name: str) -> None:
    low, high = bounds
    if not low <= value <= high:
        problem = f"gave {value:g}, outside reward.bounds = [{low:g}, {high:g}]"
        raise ScoreFailure(Fault.OUT_OF_BOUNDS, problem, name, "part")


def _merge(extras: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All fields in one map; a field that two functions report carries the function's name before it."""
    if not any(extras.values()):
        return {}
    times = Counter(field for extra in extras.values() for field in extra)
    return {
        field if times[field] == 1 else f"{name}/{field}": value
        for name, extra in extras.items()
        for field, value in extra.items()
    }
