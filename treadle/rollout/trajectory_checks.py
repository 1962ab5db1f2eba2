"""Trajectory checks: what a session of ours makes, told from what foreign code made up.

Owns which records a worker process may send beyond their types, and the names of extra values that are the session's
own: training and metrics rely on them. Raises ValueError for a record that no session makes (its worker is ended), and
tells the problem of a trajectory that does not fit its model or its rows (that trajectory has failed).
Invariant: whatever passes can be scored, counted and trained on without an error; whether it is true is not known here.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, isnan, nan
from typing import Any

from treadle.engine.requests import MAX_LOGPROB
from treadle.errors import Failure, LoopFailure
from treadle.observe import Wait
from treadle.types import Row, Timing, ToolResult, Trajectory, Turn

MAX_COUNT = 1 << 53
"""Of what is counted in a session: floats hold every whole number up to here."""


def check_timing(timing: Timing) -> None:
    seconds = (timing.started_at, timing.total_s, timing.generate_s, timing.tool_s, timing.score_s, timing.queue_s)
    _check_finite("a trajectory's times", *seconds)


def check_wait(wait: Wait) -> None:
    _check_finite("a wait's time", wait.since)


def check_tool_result(result: ToolResult) -> None:
    _check_finite("a tool's reward and time", result.reward or 0.0, result.seconds)


def check_turn(turn: Turn) -> None:
    if not 0 <= turn.start <= turn.sampled_end <= turn.end:
        raise ValueError(f"a turn from {turn.start} to {turn.sampled_end} and {turn.end}")
    seconds = (turn.generate_s, turn.tool_s, turn.started_s or 0.0)
    _check_finite("a turn's reward and times", turn.reward or 0.0, *seconds)


def check_row(row: Row) -> None:
    lengths = {len(row.ids), len(row.mask), len(row.logprobs), len(row.versions)}
    if len(lengths) != 1 or len(row.processed_logprobs) not in (0, len(row.ids)):
        raise ValueError("a row whose ids, mask, logprobs and versions differ in length")
    if min(row.prompt_ids, default=0) < 0 or min(row.ids, default=0) < 0 or not {0, 1}.issuperset(row.mask):
        raise ValueError("a row with negative ids, or a mask of other numbers than 0 and 1")
    if min(row.versions, default=0) < -1:
        raise ValueError("a row with a version below -1")
    if max((turn.end for turn in row.turns), default=0) > len(row.ids):
        raise ValueError("a row with a turn beyond its end")
    if not _are_logprobs(row.logprobs):
        _check_unmeasured(row)
    if not _are_logprobs([value for value in row.processed_logprobs if not isnan(value)]):
        raise ValueError("a row with processed logprobs that are endless or above 0")


def _check_unmeasured(row: Row) -> None:
    """Engines that measure no logprobs give NaN for all that they sampled in a turn, one that broke off included: its
    tokens stand behind the last whole turn.
    """
    spans = [span for turn in row.turns for span in ((turn.start, turn.sampled_end), (turn.sampled_end, turn.end))]
    spans = spans or [(0, len(row.ids))]
    logprobs = list(row.logprobs)
    for start, end in spans:
        sampled = [at for at in range(start, end) if row.mask[at]]
        if all(isnan(logprobs[at]) for at in sampled):
            for at in sampled:
                logprobs[at] = 0.0
    if not _are_logprobs(logprobs):
        raise ValueError("a row with logprobs that are endless, above 0, or unknown for a part of a turn")


def _are_logprobs(values: Sequence[float]) -> bool:
    return not values or (isfinite(sum(values)) and max(values) <= MAX_LOGPROB)


def _check_finite(what: str, *values: float) -> None:
    if not all(map(isfinite, values)):
        raise ValueError(f"{what} must be finite, got {', '.join(map(str, values))}")


def find_problem(trajectory: Trajectory, vocabulary_size: int | None) -> str:
    """What is wrong with a trajectory of this model; empty where nothing is. `vocabulary_size`: None, not known."""
    largest = max((max(ids) for row in trajectory.rows for ids in (row.prompt_ids, row.ids) if ids), default=0)
    if vocabulary_size is not None and largest >= vocabulary_size:
        return f"token ids up to {largest}; the model knows 0 to {vocabulary_size - 1}"
    for name, is_valid in OWN_NAMES.items():
        if name in trajectory.extra and not is_valid(trajectory.extra[name], trajectory):
            return f"extra[{name!r}] = {trajectory.extra[name]!r:.80}, which no session gives"
    return ""


def _are_seats(value: Any, trajectory: Trajectory) -> bool:
    """One seat for each row; a row of which nothing was sampled may have none."""
    if not isinstance(value, list | tuple) or len(value) != len(trajectory.rows):
        return False
    rows = zip(value, trajectory.rows, strict=True)
    return all(_is_count(seat) or (seat is None and not row.num_sampled) for seat, row in rows)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and abs(value) <= sys.float_info.max


OWN_NAMES: Mapping[str, Callable[[Any, Trajectory], bool]] = {
    "seats": _are_seats,
    "row_positions": lambda value, trajectory: False,  # made of seats, by training
    "drift": lambda value, trajectory: _is_number(value),
    "engine_preemptions": lambda value, trajectory: _is_count(value),
    "prompt_tokens_cut": lambda value, trajectory: _is_count(value),
    "turn_rewards": lambda value, trajectory: isinstance(value, list | tuple) and all(map(_is_number, value)),
}
"""Extra values that only the session itself gives, and whether one is such a value."""


def finite_reward(reward: Any, failure: type[Failure], what: str) -> float:
    """A reward as a number; that failure for what is none, and for NaN and infinity. Text is none."""
    try:
        number = nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = nan
    if not isfinite(number):
        raise failure(f"{what} must be a finite number, got {reward!r:.80}")
    return number


def refuse_own_names(extra: Mapping[str, Any]) -> None:
    """Raise LoopFailure where a loop gave an extra value by a name of the session's own."""
    for name in OWN_NAMES:
        if name in extra:
            names = ", ".join(OWN_NAMES)
            raise LoopFailure(f"session.extra[{name!r}]: the session keeps {names} itself; use another name")
