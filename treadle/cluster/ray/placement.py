"""From a plan to seats on a Ray cluster: one bundle for each node of each role, all reserved together or not at all.

Owns the placement group. A bundle is pinned to the very node that the plan names, with one CPU and the GPUs of that
node; actors sit in bundles and ask Ray for nothing more, so a colocated engine and policy share theirs.
Invariant: whoever waits for a place gets it, or hears within a deadline what is missing and where.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from treadle.cluster.ray.annex import Annexes, crowded
from treadle.cluster.ray.connection import Node
from treadle.cluster.ray.seat import Seat, ask_gpus, pin
from treadle.config import Plan
from treadle.config.placement import REWARD, Placement
from treadle.engine.protocol import Gpu
from treadle.errors import ConfigError, DeadlineError, Mistake, RunError
from treadle.types import NOTHING

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
        self._annexes = Annexes(nodes)

    @classmethod
    async def reserve(cls, plan: Plan, nodes: Sequence[Node], *, timeout_s: float) -> Self:
        """Every bundle of the plan, or an error that says what is missing; never a wait without an end."""
        return await asyncio.to_thread(cls.reserve_blocking, plan, nodes, timeout_s=timeout_s)

    @classmethod
    def reserve_blocking(cls, plan: Plan, nodes: Sequence[Node], *, timeout_s: float) -> Self:
        """The same, for code that does not await."""
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

    def rank_seats(self) -> tuple[Seat, ...]:
        """One for each rank of the policy: a GPU, or a node where there are none."""
        return self._with_crowds(self._rank_seats(), self._replica_seats())

    def replica_seats(self) -> tuple[Seat, ...]:
        """One for each engine; on CPU several may share a node."""
        return self._with_crowds(self._replica_seats(), (*self._rank_seats(), *self._beside()))

    async def validation_seat(self, *, timeout_s: float) -> Seat | None:
        """For the engine that validates beside training, if the plan has one. Its GPUs are a wish, not a condition."""
        placement = self._plan.validation
        if placement is None:
            return None
        if not placement.gpus:
            (seat,) = self._with_crowds(self._beside(), (*self._rank_seats(), *self._replica_seats()))
            return seat
        try:
            async with asyncio.timeout(timeout_s):
                return await self._annexes.add(len(placement.gpus), self._nodes[placement.machine])
        except TimeoutError:
            problem = f"{placement.place()} was not free within {timeout_s:g} s"
            log.warning("validation shares the engines, and the next push of weights waits for it: %s", problem)
            return None

    def _beside(self) -> tuple[Seat, ...]:
        """A seat for validation on processors, in the bundle of the engines there."""
        placement = self._plan.validation
        if placement is None or placement.gpus:
            return ()
        found = [at for at, item in self._bundles(ROLLOUT) if item.machine == placement.machine]
        return (self._seat(found[-1], placement),)

    def _rank_seats(self) -> tuple[Seat, ...]:
        return tuple(
            self._seat(at, placement, gpus)
            for at, placement in self._bundles(TRAINER, SHARED)
            for gpus in _split(self._gpus[at], 1)
        )

    def _replica_seats(self) -> tuple[Seat, ...]:
        plan, bundles = self._plan, list(self._bundles(ROLLOUT, SHARED))
        if plan.gpus_per_replica:
            return tuple(
                self._seat(at, placement, gpus)
                for at, placement in bundles
                for gpus in _split(self._gpus[at], plan.gpus_per_replica)
            )
        each = plan.replicas // len(bundles)
        return tuple(self._seat(at, placement) for at, placement in bundles for _ in range(each))

    def worker_seat(self, number: int) -> Seat:
        """For a process without a GPU: on the rollout's nodes in turn; where those have left, on any of the run's."""
        own = [self._seat(at, placement) for at, placement in self._bundles(ROLLOUT, SHARED)]
        start = number % len(own)
        others = [self._seat(at, placement) for at, placement in self._bundles(TRAINER)]
        further = [replace(seat, gpus=()) for seat in self._annexes.seats]
        for seat in (*own[start:], *own[:start], *further, *others):
            if seat.there():
                return seat
        raise RunError("every machine of the run has left the cluster")

    def scorer_seat(self, number: int) -> Seat:
        """For the scorer: with the GPUs of its reward models, or like a worker where these use none."""
        rewards = self._plan.rewards
        if rewards is None:
            return self.worker_seat(number)
        place = rewards.placement
        for at, held in self._bundles(rewards.shared_with or REWARD):
            if held.machine == place.machine and set(place.gpus) <= set(held.gpus):
                seat = self._seat(at, held, tuple(self._gpus[at][held.gpus.index(gpu)] for gpu in place.gpus))
                if seat.there():
                    return seat
        raise RunError(f"{place.machine}, which had the reward models, has left the cluster")

    def reward_gpus(self) -> Mapping[str, tuple[Gpu, ...]]:
        """Those of each reward model, as the scorer counts them."""
        rewards = self._plan.rewards
        if rewards is None:
            return NOTHING
        names, numbers = self.scorer_seat(0).gpus, rewards.placement.gpus
        at = {gpu: Gpu(index, names[index]) for index, gpu in enumerate(numbers)}
        return {model: tuple(at[gpu] for gpu in gpus) for model, gpus in rewards.gpus.items()}

    async def move(self, seat: Seat) -> Seat:
        """Another place such as `seat`, whose machine has left. Waits until some node has room."""
        self._annexes.drop(seat)
        found = await self._annexes.add(len(seat.gpus))
        return crowded(found, (*self._replica_seats(), *self._rank_seats(), *self._annexes.seats))

    @property
    def can_move(self) -> bool:
        """Whether replicas may sit elsewhere: those that share the policy's devices go where it goes."""
        return not self._plan.shares_devices

    def release(self) -> None:
        """Give everything back. What still runs in a bundle ends."""
        self._annexes.release()
        remove_placement_group(self._group)

    def _with_crowds(self, seats: tuple[Seat, ...], others: tuple[Seat, ...]) -> tuple[Seat, ...]:
        """Seats that know their crowd. Engines and ranks that share devices take turns."""
        rivals = () if self._plan.shares_devices else others
        crowds = Counter(seat.node.id for seat in (*seats, *rivals) if not seat.gpus)
        return tuple(replace(seat, crowd=max(1, crowds[seat.node.id])) for seat in seats)

    def _seat(self, bundle: int, placement: Placement, gpus: tuple[str, ...] = ()) -> Seat:
        return Seat(self._group, bundle, self._nodes[placement.machine], gpus)

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
