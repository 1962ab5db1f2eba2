"""Dynamic sampling: which groups teach something."""

from collections.abc import Sequence

from treadle.config.reward import SESSION_PARTS
from treadle.errors import ConfigError, Mistake, nearest
from treadle.types import Score

REWARD = "reward"


def has_signal(scores: Sequence[Score], metric: str) -> bool:
    """Whether the survivors of a group differ in `metric`: the reward, or the part of it from the named function."""
    values = [_value(score, metric) for score in scores]
    return len(values) > 1 and min(values) < max(values)


def _value(score: Score, metric: str) -> float:
    if metric == REWARD:
        return score.value
    if metric not in score.parts and metric in SESSION_PARTS:
        return 0.0  # a session that was given nothing
    if metric not in score.parts:
        known = [REWARD, *score.parts]
        problem = f"no reward function is called {metric!r}; known: {', '.join(known)}"
        raise ConfigError([Mistake("algorithm.filter_groups.metric", problem, metric, fix=nearest(metric, known))])
    return score.parts[metric]
