"""Soft overlong punishment, as in DAPO: 0 for an answer that leaves room, less near the limit, -1 at it."""

from treadle.types import Trajectory


def prepare(max_length: int, buffer: int) -> None:
    """Refuse lengths that leave no slope."""
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must lie between 1 and max_length {max_length}, got {buffer}")


def score(trajectory: Trajectory, max_length: int, buffer: int) -> float:
    """`max_length`: sampled tokens from which the punishment is -1. `buffer`: tokens before it over which it grows."""
    over = trajectory.num_sampled - (max_length - buffer)
    return -min(max(over, 0) / buffer, 1.0)
