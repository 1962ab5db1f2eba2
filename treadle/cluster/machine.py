"""This machine as a plan sees it, and what the plan gives to reward models here."""

import socket
from collections.abc import Iterator, Mapping
from functools import partial

from treadle.cluster.ray import require_ray
from treadle.config import Config, Machine, make_plan
from treadle.config.placement import reward_gpu_requests
from treadle.engine.gpus import visible_gpus
from treadle.engine.protocol import Gpu
from treadle.engine.vllm.engine import require_vllm
from treadle.errors import ConfigError, Mistake
from treadle.types import NOTHING


def this_machine() -> Machine:
    """This computer and the GPUs a process started here would see."""
    return Machine(socket.gethostname(), len(visible_gpus()))


def reward_gpus(config: Config) -> Mapping[str, tuple[Gpu, ...]]:
    """The GPUs of each reward model that uses some, where everything runs on this machine."""
    if not any(reward_gpu_requests(config)):
        return NOTHING
    here, rewards = visible_gpus(), make_plan(config, [this_machine()]).rewards
    assert rewards is not None, "a plan places every reward model that wants GPUs"
    return {model: tuple(here[gpu] for gpu in gpus) for model, gpus in rewards.gpus.items()}


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
