"""Which machines there are to plan for: this one, those of a Ray cluster, or those somebody describes."""

import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.errors import ConfigError, Mistake

if TYPE_CHECKING:
    from treadle.config import ClusterConfig, Machine


def this_machine() -> "Machine":
    """This computer and the GPUs a process started here would see. Looks without importing torch."""
    from treadle.config import Machine

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    else:
        count = len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    return Machine(socket.gethostname(), count)


def find_machines(cluster: "ClusterConfig") -> list["Machine"]:
    """Those of the cluster whose address is given, or this one."""
    if cluster.backend == "local" or cluster.address is None:
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
