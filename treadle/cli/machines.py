"""Which machines there are to plan for: this one, those of a Ray cluster, or those somebody describes."""

import re
from typing import TYPE_CHECKING

from treadle.errors import ConfigError, Mistake

if TYPE_CHECKING:
    from treadle.config import ClusterConfig, Machine


def find_machines(cluster: "ClusterConfig") -> list["Machine"]:
    """Those of the cluster whose address is given, or this one."""
    if cluster.backend == "local" or cluster.address is None:
        from treadle.cluster.machine import this_machine

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
