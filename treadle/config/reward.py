"""The `reward` section: which functions score a trajectory, and the limits they run under."""

from collections.abc import Mapping

from treadle.config.section import REQUIRED, Options, Section, key

REWARD_FUNCTIONS = ("exact_match", "number_match", "math", "format", "reasoning_gym")
"""The reward functions that come with treadle."""


class RewardFunctionConfig(Section):
    """One reward function and its share of the sum."""

    path: str = key(REQUIRED, "the function", names=REWARD_FUNCTIONS)
    weight: float = key(1.0, "factor of its score in the sum")
    kwargs: Options = key({}, "keyword arguments for the function")


class RewardConfig(Section):
    """Scores are the weighted sum of the functions; a function that fails gives no score at all."""

    functions: Mapping[str, RewardFunctionConfig] = key({}, "reward functions by name")
    num_workers: int = key(1, "processes that run untrusted or blocking functions; 0 runs them in this process", ge=0)
    timeout_s: float = key(10.0, "deadline of one score", gt=0)
    cpu_time_s: float = key(60.0, "CPU time of one score", gt=0)
    memory_mb: int = key(2048, "memory of one worker process", ge=64)
    retries: int = key(1, "further attempts after a timeout or a crash", ge=0)
    rate_limit_per_s: float | None = key(None, "scores started per second, over all workers; null for no limit", gt=0)
