"""Placement on a Ray cluster: from a plan to slots for actors, all reserved together or not at all.

Owns the placement groups: one for the run, with a bundle for each node of each role, and one for each slot beyond
that (a replica whose machine has left, an engine for validation). A bundle is pinned to the very node that the plan
names, with one CPU and the GPUs of that node; actors run in bundles and ask Ray for nothing more, so a colocated
engine and policy share theirs.
Invariant: a reservation is made, or says within a deadline what is missing and where; what was not given is not held.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from treadle.cluster.ray.connection import Node, find_nodes
from treadle.config import Plan
from treadle.config.placement import REWARD, Placement
from treadle.engine.protocol import Gpu
from treadle.errors import ConfigError, DeadlineError, Mistake, RunError
from treadle.types import NOTHING


@dataclass(frozen=True, slots=True)
class ActorSlot:
    """A bundle, and the GPUs of it that are one actor's, as CUDA names them."""

    group: PlacementGroup
    bundle: int
    node: Node
    gpus: tuple[str, ...] = ()
    sharers: int = 1
    """How many actors compute on this node's processors at once, this one included."""

    def options(self) -> dict[str, Any]:
        """For Ray. The bundle holds the resources; the actor takes none of its own."""
        return {**self.task_options(), "max_restarts": 0}

    def task_options(self) -> dict[str, Any]:
        """For a task of Ray beside the actor."""
        pinned = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": pinned}

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


class ExtraSlots:
    """The further places of one run."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._known = tuple(nodes)
        self._slots: list[ActorSlot] = []

    @property
    def slots(self) -> tuple[ActorSlot, ...]:
        return tuple(self._slots)

    async def add(self, num_gpus: int, node: Node | None = None) -> ActorSlot:
        """A place with this many GPUs, or with a CPU, on the node or on any that has room; waits until there is one."""
        bundle = {"GPU": float(num_gpus)} if num_gpus else {"CPU": 1.0}
        pins = None if node is None else [dict(pin(node))]
        group = placement_group([bundle], bundle_label_selector=pins)
        try:
            await group.ready()
            gpus = await ask_gpus(group, 0, num_gpus) if num_gpus else ()
            slot = ActorSlot(group, 0, self._node_of(group), gpus)
        except BaseException:
            remove_placement_group(group)
            raise
        self._slots.append(slot)
        return slot

    def drop(self, slot: ActorSlot) -> None:
        """Give a place back, if it is one of these."""
        for held in [held for held in self._slots if held.group.id == slot.group.id]:
            self._slots.remove(held)
            remove_placement_group(held.group)

    def release(self) -> None:
        """Give every place back."""
        for slot in self.slots:
            self.drop(slot)

    def _node_of(self, group: PlacementGroup) -> Node:
        self._known = find_nodes(self._known)
        id = placement_group_table(group)["bundles_to_node_id"][0]
        return next(node for node in self._known if node.id == id)


def with_sharers(slot: ActorSlot, others: Sequence[ActorSlot]) -> ActorSlot:
    """A slot that knows how many actors compute on its node's processors."""
    if slot.gpus:
        return slot
    sharers = sum(other.node.id == slot.node.id for other in others if not other.gpus)
    return replace(slot, sharers=max(1, sharers))


log = logging.getLogger(__name__)

ROLLOUT, TRAINER, SHARED = "rollout", "trainer", "trainer + rollout"
"""The roles of a plan."""

_CPUS = 1
"""What a bundle takes of its node's processors: it claims the node, and does not divide it."""


class Reservation:
    """What a run holds of a cluster. Made by `reserve`; `release` gives it back."""

    def __init__(
        self, plan: Plan, nodes: Sequence[Node], group: PlacementGroup, gpus: Sequence[tuple[str, ...]]
    ) -> None:
        self._plan = plan
        self._nodes = {node.machine.name: node for node in nodes}
        self._group = group
        self._gpus = gpus
        """Of each bundle."""
        self._extra_slots = ExtraSlots(nodes)

    @classmethod
    async def reserve(cls, plan: Plan, nodes: Sequence[Node], *, timeout_s: float) -> Self:
        """Every bundle of the plan, or an error that says what is missing; never a wait without an end."""
        return await asyncio.to_thread(cls.reserve_blocking, plan, nodes, timeout_s=timeout_s)

    @classmethod
    def reserve_blocking(cls, plan: Plan, nodes: Sequence[Node], *, timeout_s: float) -> Self:
        """As `reserve`, for code that does not await."""
        by_name = {node.machine.name: node for node in nodes}
        bundles = [_bundle(placement) for placement in plan.held()]
        _refuse_impossible(plan, nodes)
        pins = [dict(pin(by_name[placement.machine])) for placement in plan.held()]
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=pins)
        try:
            if not group.wait(timeout_s):
                missing = "; ".join(_missing(plan, nodes))
                raise DeadlineError(f"the cluster gave no place within {timeout_s:g} s: {missing}")
            return cls(plan, nodes, group, _gpu_names(group, plan, timeout_s))
        except BaseException:
            remove_placement_group(group)
            raise

    def rank_slots(self) -> tuple[ActorSlot, ...]:
        """One for each rank of the policy: a GPU, or a node where there are none."""
        return self._with_sharers(self._rank_slots(), self._replica_slots())

    def replica_slots(self) -> tuple[ActorSlot, ...]:
        """One for each engine; on CPU several may share a node."""
        return self._with_sharers(self._replica_slots(), (*self._rank_slots(), *self._beside()))

    async def validation_slot(self, *, timeout_s: float) -> ActorSlot | None:
        """For the engine that validates beside training, if the plan has one. Its GPUs are a wish, not a condition."""
        placement = self._plan.validation
        if placement is None:
            return None
        if not placement.gpus:
            (slot,) = self._with_sharers(self._beside(), (*self._rank_slots(), *self._replica_slots()))
            return slot
        try:
            async with asyncio.timeout(timeout_s):
                return await self._extra_slots.add(len(placement.gpus), self._nodes[placement.machine])
        except TimeoutError:
            problem = f"{placement.place()} was not free within {timeout_s:g} s"
            log.warning("validation shares the engines, and the next push of weights waits for it: %s", problem)
            return None

    def _beside(self) -> tuple[ActorSlot, ...]:
        """A slot for validation on processors, in the bundle of the engines there."""
        placement = self._plan.validation
        if placement is None or placement.gpus:
            return ()
        found = [at for at, item in self._bundles(ROLLOUT) if item.machine == placement.machine]
        return (self._slot(found[-1], placement),)

    def _rank_slots(self) -> tuple[ActorSlot, ...]:
        return tuple(
            self._slot(at, placement, gpus)
            for at, placement in self._bundles(TRAINER, SHARED)
            for gpus in _split(self._gpus[at], 1)
        )

    def _replica_slots(self) -> tuple[ActorSlot, ...]:
        plan, bundles = self._plan, list(self._bundles(ROLLOUT, SHARED))
        if plan.gpus_per_replica:
            return tuple(
                self._slot(at, placement, gpus)
                for at, placement in bundles
                for gpus in _split(self._gpus[at], plan.gpus_per_replica)
            )
        each = plan.replicas // len(bundles)
        return tuple(self._slot(at, placement) for at, placement in bundles for _ in range(each))

    def worker_slot(self, number: int) -> ActorSlot:
        """For a process without a GPU: on the rollout's nodes in turn; where those have left, on any of the run's."""
        own = [self._slot(at, placement) for at, placement in self._bundles(ROLLOUT, SHARED)]
        start = number % len(own)
        others = [self._slot(at, placement) for at, placement in self._bundles(TRAINER)]
        further = [replace(slot, gpus=()) for slot in self._extra_slots.slots]
        for slot in (*own[start:], *own[:start], *further, *others):
            if slot.there():
                return slot
        raise RunError("every machine of the run has left the cluster")

    def scorer_slot(self, number: int) -> ActorSlot:
        """For the scorer: with the GPUs of its reward models, or like a worker where these use none."""
        rewards = self._plan.rewards
        if rewards is None:
            return self.worker_slot(number)
        place = rewards.placement
        for at, held in self._bundles(rewards.shared_with or REWARD):
            if held.machine == place.machine and set(place.gpus) <= set(held.gpus):
                slot = self._slot(at, held, tuple(self._gpus[at][held.gpus.index(gpu)] for gpu in place.gpus))
                if slot.there():
                    return slot
        raise RunError(f"{place.machine}, which had the reward models, has left the cluster")

    def reward_gpus(self) -> Mapping[str, tuple[Gpu, ...]]:
        """The GPUs of each reward model, as the scorer counts them."""
        rewards = self._plan.rewards
        if rewards is None:
            return NOTHING
        names, numbers = self.scorer_slot(0).gpus, rewards.placement.gpus
        at = {gpu: Gpu(index, names[index]) for index, gpu in enumerate(numbers)}
        return {model: tuple(at[gpu] for gpu in gpus) for model, gpus in rewards.gpus.items()}

    async def move(self, slot: ActorSlot) -> ActorSlot:
        """Another place such as `slot`, whose machine has left. Waits until some node has room."""
        self._extra_slots.drop(slot)
        found = await self._extra_slots.add(len(slot.gpus))
        return with_sharers(found, (*self._replica_slots(), *self._rank_slots(), *self._extra_slots.slots))

    @property
    def can_move(self) -> bool:
        """Whether replicas may sit elsewhere: those that share the policy's devices go where it goes."""
        return not self._plan.shares_devices

    def release(self) -> None:
        """Give everything back. What still runs in a bundle ends."""
        self._extra_slots.release()
        remove_placement_group(self._group)

    def _with_sharers(self, slots: tuple[ActorSlot, ...], others: tuple[ActorSlot, ...]) -> tuple[ActorSlot, ...]:
        """Slots that know how many share their processors. Engines and ranks that share devices take turns."""
        rivals = () if self._plan.shares_devices else others
        sharers_of = Counter(slot.node.id for slot in (*slots, *rivals) if not slot.gpus)
        return tuple(replace(slot, sharers=max(1, sharers_of[slot.node.id])) for slot in slots)

    def _slot(self, bundle: int, placement: Placement, gpus: tuple[str, ...] = ()) -> ActorSlot:
        return ActorSlot(self._group, bundle, self._nodes[placement.machine], gpus)

    def _bundles(self, *roles: str) -> Iterator[tuple[int, Placement]]:
        return ((at, placement) for at, placement in enumerate(self._plan.held()) if placement.role in roles)


def _bundle(placement: Placement) -> dict[str, float]:
    gpus = {"GPU": float(len(placement.gpus))} if placement.gpus else {}
    return {"CPU": float(_CPUS), **gpus}


def _split(gpus: tuple[str, ...], size: int) -> Iterator[tuple[str, ...]]:
    """GPUs in groups of `size`; one empty group where there are none."""
    yield from (gpus[at : at + size] for at in range(0, len(gpus), size)) if gpus else [()]


def _refuse_impossible(plan: Plan, nodes: Sequence[Node]) -> None:
    """What no waiting can bring: more roles on a machine than it has processors for."""
    wanted = Counter(placement.machine for placement in plan.held())
    cpus = {node.machine.name: node.num_cpus for node in nodes}
    mistakes = [
        Mistake(
            "cluster",
            f"{count} roles want one CPU each on {machine}, Ray has {cpus[machine]:g} there",
            fix="give the Ray node more with --num-cpus, or cluster.ray_init={num_cpus: …} for one started here",
        )
        for machine, count in wanted.items()
        if count * _CPUS > cpus[machine]
    ]
    if mistakes:
        raise ConfigError(mistakes)


def _missing(plan: Plan, nodes: Sequence[Node]) -> Iterator[str]:
    """Each placement whose machine has less to give than it needs, with both numbers."""
    free: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()
    ids = {node.machine.name: node.id for node in nodes}
    for placement in plan.held():
        resources = free.get(ids[placement.machine])
        if resources is None:
            yield f"{placement.role} node {placement.node}: {placement.machine} has left the cluster"
            continue
        for name, wanted in _bundle(placement).items():
            if resources.get(name, 0.0) < wanted:
                has = f"{resources.get(name, 0.0):g} free"
                yield f"{placement.role} node {placement.node} wants {wanted:g} {name} on {placement.machine}, {has}"


def _gpu_names(group: PlacementGroup, plan: Plan, timeout_s: float) -> tuple[tuple[str, ...], ...]:
    """The GPUs that Ray gave to each bundle."""
    asked = {at: ask_gpus(group, at, len(placement.gpus)) for at, placement in enumerate(plan.held()) if placement.gpus}
    try:
        found = ray.get(list(asked.values()), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineError(f"Ray did not say within {timeout_s:g} s which GPUs it gave") from error
    names = dict(zip(asked, found, strict=True))
    return tuple(names.get(at, ()) for at in range(len(plan.held())))
