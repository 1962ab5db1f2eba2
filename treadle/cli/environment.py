"""Environment of a command: the machines to plan for, and the API keys that a config names by variable.

Machines are this one, those of a Ray cluster, or those given as `8x4`. API keys are read from the environment here and
nowhere else.
"""

import os
import re
from typing import TYPE_CHECKING

from treadle.errors import ConfigError, Mistake

if TYPE_CHECKING:
    from treadle.config import ClusterConfig, Config, Machine


def find_machines(cluster: "ClusterConfig") -> list["Machine"]:
    """Machines of the cluster whose address is given, or this one."""
    if cluster.backend == "local" or cluster.address is None:
        from treadle.engine.gpus import this_machine

        return [this_machine()]
    from treadle.cluster.ray import require_ray

    require_ray(cluster)
    from treadle.cluster.ray import connection

    return connection.find_machines(cluster)


def described_machines(words: list[str]) -> list["Machine"]:
    """Machines from words such as `8x4`: eight of them, with four GPUs each."""
    from treadle.config import Machine

    machines: list[Machine] = []
    for word in words:
        found = re.fullmatch(r"(\d{1,5})x(\d{1,3})", word)
        if not found or int(found.group(1)) == 0:
            raise ConfigError(
                [Mistake("--machines", f"{word!r} is not COUNTxGPUS", fix="write 8x4 for 8 with 4 GPUs each")]
            )
        machines += [Machine(f"node{len(machines) + at}", int(found.group(2))) for at in range(int(found.group(1)))]
    return machines


def read_api_keys(config: "Config") -> dict[str, str]:
    """API keys that are set, by variable."""
    variables = (config.rollout.openai.api_key_env, *config.reward.api_key_variables())
    return {name: os.environ[name] for name in variables if os.environ.get(name)}
