"""Places beyond those that a run reserved at its start, one by one: for a replica whose machine has left, for example.

Owns a placement group for each. Whoever asks has the deadline, or waits until a node joins: Ray keeps the question, and
an autoscaler sees it.
Invariant: a place that nobody got is not held; `release` gives back the others.
"""

from collections.abc import Sequence
from dataclasses import replace

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from treadle.cluster.ray.connection import Node, find_nodes
from treadle.cluster.ray.seat import Seat, ask_gpus, pin


class Annexes:
    """The further places of one run."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._known = tuple(nodes)
        self._seats: list[Seat] = []

    @property
    def seats(self) -> tuple[Seat, ...]:
        return tuple(self._seats)

    async def add(self, num_gpus: int, node: Node | None = None) -> Seat:
        """A place with this many GPUs, or with a CPU, on the node or on any that has room; waits until there is one."""
        bundle = {"GPU": float(num_gpus)} if num_gpus else {"CPU": 1.0}
        pins = None if node is None else [dict(pin(node))]
        group = placement_group([bundle], bundle_label_selector=pins)
        try:
            await group.ready()
            gpus = await ask_gpus(group, 0, num_gpus) if num_gpus else ()
            seat = Seat(group, 0, self._node_of(group), gpus)
        except BaseException:
            remove_placement_group(group)
            raise
        self._seats.append(seat)
        return seat

    def drop(self, seat: Seat) -> None:
        """Give a place back, if it is one of these."""
        for held in [held for held in self._seats if held.group.id == seat.group.id]:
            self._seats.remove(held)
            remove_placement_group(held.group)

    def release(self) -> None:
        """Give every place back."""
        for seat in self.seats:
            self.drop(seat)

    def _node_of(self, group: PlacementGroup) -> Node:
        self._known = find_nodes(self._known)
        id = placement_group_table(group)["bundles_to_node_id"][0]
        return next(node for node in self._known if node.id == id)


def crowded(seat: Seat, others: Sequence[Seat]) -> Seat:
    """A seat that knows who else computes on its node's processors."""
    if seat.gpus:
        return seat
    crowd = sum(other.node.id == seat.node.id for other in others if not other.gpus)
    return replace(seat, crowd=max(1, crowd))
