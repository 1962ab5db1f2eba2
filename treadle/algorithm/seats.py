"""Seats: episodes of several agents, as one group for each seat.

Owns how an episode becomes trajectories of single agents: the rows of a seat with the rewards of that seat, compared
with the same seat in the other samples of the task. So an advantage says how well a seat was played, and not which seat
is the better one. What reward functions gave belongs to the whole episode, and to every seat alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum

from treadle.errors import MisuseError
from treadle.types import NOTHING, Group, Row, Score, Trajectory


def has_seats(groups: Sequence[Group]) -> bool:
    """Whether any trajectory is an episode of several agents."""
    return any(trajectory.seats for group in groups for trajectory in group.survivors)


def split_seats(groups: Sequence[Group], weights: Mapping[str, float] = NOTHING) -> tuple[Group, ...]:
    """The groups with each episode of several agents split by seat; groups of one agent as they are.

    `weights` are those of the parts that a session brings with it, 1 unless given. Seats that an opponent played are
    left out, and so is a seat that no survivor played.
    """
    split: list[Group] = []
    for group in groups:
        if not has_seats([group]):
            split.append(group)
            continue
        numbers = sorted({seat for item in group.survivors for seat in item.policy_seats})
        failed = tuple(item for item in group.trajectories if not item.outcome.ok)
        for number in numbers:
            own = tuple(_seat(item, number, weights) for item in group.survivors if number in item.policy_seats)
            split.append(Group(group.task, own + failed))
            failed = ()  # each is counted once
    return tuple(split)


def split_trajectory(trajectory: Trajectory, weights: Mapping[str, float] = NOTHING) -> tuple[Trajectory, ...]:
    """A trajectory of several agents by the seats that the policy played; one of a single agent as it is."""
    if not trajectory.seats:
        return (trajectory,)
    return tuple(_seat(trajectory, number, weights) for number in sorted(trajectory.policy_seats))


def row_positions(trajectory: Trajectory) -> tuple[int, ...]:
    """Where the rows of a trajectory, or of one seat of it, stand among all rows of their episode."""
    return tuple(trajectory.extra.get("row_positions", range(len(trajectory.rows))))


def _seat(trajectory: Trajectory, number: int, weights: Mapping[str, float]) -> Trajectory:
    if trajectory.reward is None:
        raise MisuseError(f"trajectory {trajectory.uid}/{trajectory.sample} has no reward: name some functions")
    positions = [at for at, seat in enumerate(trajectory.seats) if seat == number]
    rows = tuple(trajectory.rows[at] for at in positions)
    extra = {name: value for name, value in trajectory.extra.items() if name != "seats"}
    return replace(
        trajectory,
        rows=rows,
        reward=_seat_score(trajectory.reward, rows, weights),
        extra={**extra, "row_positions": positions},
    )


def _seat_score(whole: Score, rows: Sequence[Row], weights: Mapping[str, float]) -> Score:
    """The score of an episode with what this seat was given in place of the mean over all seats."""
    turns = [turn for row in rows for turn in row.turns]
    given = {
        "environment": fsum(turn.reward or 0.0 for turn in turns),
        "tools": fsum(result.reward or 0.0 for turn in turns for result in turn.results),
    }
    own = {name: value for name, value in given.items() if name in whole.parts}
    change = fsum(weights.get(name, 1.0) * (value - whole.parts[name]) for name, value in own.items())
    return replace(whole, value=whole.value + change, parts={**whole.parts, **own})
