"""Where an actor sits: a bundle of a placement group, and the GPUs of it that are the actor's own.

Owns what Ray is told about one actor, and the question which GPUs it gave to a bundle. Knows no plan and no role.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from treadle.cluster.ray.connection import Node


@dataclass(frozen=True, slots=True)
class Seat:
    """A bundle, and the GPUs of it that are one actor's, as CUDA names them."""

    group: PlacementGroup
    bundle: int
    node: Node
    gpus: tuple[str, ...] = ()
    crowd: int = 1
    """How many actors compute on this node's processors at once, this one included."""

    def options(self) -> dict[str, Any]:
        """For Ray. The bundle holds the resources; the actor takes none of its own."""
        pinned = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": pinned, "max_restarts": 0}

    def there(self) -> bool:
        """Whether its machine is still part of the cluster."""
        return any(node["Alive"] and node["NodeID"] == self.node.id for node in ray.nodes())

    def __str__(self) -> str:
        name = self.node.machine.name
        return f"{name}, GPU {','.join(self.gpus)}" if self.gpus else f"{name}, CPU"


def pin(node: Node) -> Mapping[str, str]:
    """The label by which Ray keeps a bundle on one node."""
    return {"ray.io/node-id": node.id}


def ask_gpus(group: PlacementGroup, bundle: int, count: int) -> Any:
    """A reference to the names of the GPUs that Ray gave to a bundle."""
    inside = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(_own_gpus).options(num_cpus=0, num_gpus=count, scheduling_strategy=inside).remote()


def _own_gpus() -> tuple[str, ...]:
    return tuple(str(name) for name in ray.get_gpu_ids())
