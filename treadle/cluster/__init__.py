"""Cluster: where the parts of a run live, in this process or on Ray; and the packages that a place needs."""

from collections.abc import Iterator
from functools import partial

from treadle.cluster.ray import require_ray
from treadle.config import Config
from treadle.engine.vllm.engine import require_vllm
from treadle.errors import ConfigError, Mistake


def missing_packages(config: Config) -> Iterator[Mistake]:
    """Ray and vLLM, where a config asks for one that is not installed."""
    wanted = []
    if config.cluster.backend == "ray":
        wanted.append(partial(require_ray, config.cluster))
    if config.rollout.name == "vllm":
        wanted.append(partial(require_vllm, config.rollout))
    for require in wanted:
        try:
            require()
        except ConfigError as error:
            yield from error.mistakes
