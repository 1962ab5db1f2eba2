"""The Ray cluster of a run: one that is there already, or one started here and ended with the run.

Owns `ray.init` and its end, and the list of machines. Knows no roles.
Ray must be started from a thread that lives as long as it: the system ends the processes of a cluster that was started
here when the thread that started them is gone, which is what takes them down after a crash.
"""

import itertools
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ray

from treadle.cluster.ray.reaper import descendants, reaping
from treadle.config import ClusterConfig, Machine
from treadle.errors import ConfigError, Mistake

_KNOCK_TIMEOUT_S = 10.0
"""How long an address may take to accept a connection. Ray itself would try for minutes and say nothing."""

_HERE = "local"
"""Without it Ray joins whatever cluster it finds on this machine, another run's for instance."""

_QUIET: Mapping[str, Any] = MappingProxyType({"include_dashboard": False})
"""What a cluster that is started here does without, unless `cluster.ray_init` says otherwise."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster, as Ray knows it."""

    id: str
    machine: Machine
    num_cpus: float


@contextmanager
def connected(cluster: ClusterConfig) -> Iterator[tuple[Node, ...]]:
    """The nodes of the cluster, while there is a connection to it. Call it from a thread that outlives the block.

    A process that is connected already keeps its connection; a cluster that was started here ends with the block.
    """
    if ray.is_initialized():
        yield find_nodes()
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if cluster.address is not None:
        _knock(cluster)
    before = frozenset(descendants(os.getpid()))
    quiet = {} if cluster.address is not None else _QUIET
    try:
        ray.init(address=cluster.address or _HERE, **{**quiet, **cluster.ray_init})
    except (ConnectionError, RuntimeError, ValueError, TypeError) as error:
        key, missing = ("cluster.ray_init", "") if cluster.address is None else ("cluster.address", "Ray cluster")
        raise ConfigError([Mistake(key, f"Ray did not start: {error}", cluster.address, missing=missing)]) from error
    started = [pid for pid in descendants(os.getpid()) if pid not in before]
    with reaping(started if cluster.address is None else []):
        try:
            yield find_nodes()
        finally:
            ray.shutdown()


def find_machines(cluster: ClusterConfig) -> list[Machine]:
    """What there is to plan for. Connects, and lets go again."""
    with connected(cluster) as nodes:
        return machines_of(nodes)


def machines_of(nodes: Sequence[Node]) -> list[Machine]:
    """The machines that take work: a head is often told to take none."""
    return [node.machine for node in nodes if node.num_cpus >= 1]


def find_nodes(known: Sequence[Node] = ()) -> tuple[Node, ...]:
    """The nodes that are alive, the head first; machines that share a name are told apart by a number.

    Those that are known keep the name they have.
    """
    names = {node.id: node.machine.name for node in known}
    taken = set(names.values())
    nodes = []
    for node in sorted((node for node in ray.nodes() if node["Alive"]), key=_head_first):
        id, host, resources = node["NodeID"], node["NodeManagerHostname"], node["Resources"]
        name = names.get(id) or next(name for name in _names_of(host) if name not in taken)
        taken.add(name)
        nodes.append(Node(id, Machine(name, int(resources.get("GPU", 0))), resources.get("CPU", 0.0)))
    return tuple(nodes)


def _names_of(host: str) -> Iterator[str]:
    yield host
    yield from (f"{host}#{number}" for number in itertools.count(2))


def _head_first(node: Mapping[str, Any]) -> tuple[bool, str]:
    return "node:__internal_head__" not in node["Resources"], node["NodeID"]


def _knock(cluster: ClusterConfig) -> None:
    """Refuse an address where nothing listens, soon and by name. Words such as `auto` are left to Ray."""
    address, origin = cluster.address or "", cluster.origin("address")
    if address.startswith("ray://"):
        problem, fix = "Ray's client cannot place actors for us", "run this command on a node of the cluster, with auto"
        raise ConfigError([Mistake("cluster.address", problem, address, origin, fix)])
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=_KNOCK_TIMEOUT_S).close()
    except OSError as error:
        problem = f"no Ray cluster answers at {address}: {error}"
        fix = "start one with `ray start --head`, or leave the address out to start one here"
        raise ConfigError([Mistake("cluster.address", problem, address, origin, fix, "Ray cluster")]) from error
