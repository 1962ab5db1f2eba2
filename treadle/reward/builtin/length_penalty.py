"""Length penalty of a group: the shortest answer of a task gets 0.5, the longest -0.5, as in Kimi k1.5.

    λ = 0.5 - (length - shortest) / (longest - shortest)

A correct answer gets λ, a wrong one λ where that is negative, else 0: brevity alone is worth nothing. Where all answers
are equally long, or there is only one, each gets 0. Lengths are sampled tokens, those of forks included.
"""

import math
from collections.abc import Mapping, Sequence

from treadle.types import Trajectory


def prepare(threshold: float = 1.0, part: str | None = None) -> None:
    """Refuse a threshold that nothing is compared with."""
    if not isinstance(threshold, int | float) or not math.isfinite(threshold):
        raise ValueError(f"threshold must be a number, got {threshold!r}")


def score(
    trajectories: Sequence[Trajectory],
    scores: Sequence[float],
    parts: Sequence[Mapping[str, float]],
    threshold: float = 1.0,
    part: str | None = None,
) -> list[float]:
    """`threshold`: the score from which an answer is correct. `part`: the part of the reward that says so; None for the
    weighted sum of all parts of scope sample."""
    lengths = [trajectory.num_sampled for trajectory in trajectories]
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    known = scores if part is None else [item[part] for item in parts]
    bonuses = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [bonus if value >= threshold else min(0.0, bonus) for bonus, value in zip(bonuses, known, strict=True)]
