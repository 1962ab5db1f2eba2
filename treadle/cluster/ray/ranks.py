"""The policy's ranks as actors: started together, called together, ended together.

Owns the actors and how a call reaches them: it is written to Ray's store once, and every rank reads it there. What a
rank is, and what is made of its errors, is `policy`'s.
Waits: `start` for every rank, until a deadline; calls return futures, and `RankGroup` has the deadline. One thread for
each rank waits for its end, so that a death is known also between two calls.
"""

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from treadle.cluster.ray.actor import ActorEnvironment, Address
from treadle.cluster.ray.launcher import explain
from treadle.cluster.ray.placement import ActorSlot as Place
from treadle.cluster.ray.rank_actor import RankActor
from treadle.cluster.ray.single_rank import SingleRank, SingleRankSpec
from treadle.cores import num_cores
from treadle.errors import DeadlineError, RunError
from treadle.policy.local_ranks import RankAnswer, answer_ready
from treadle.policy.rank import FSDPRank, NetworksSpec, RankSpec, RendezvousStore
from treadle.policy.rank_group import LAUNCH_KEY, RankDied, RankGroup

_VERDICT_S = 5.0
"""How long Ray may take to say why a rank is gone."""


class RemoteRanks:
    """`RankHandles` to ranks on the cluster. Built whole by `start`."""

    def __init__(self, actors: Sequence[Any], names: Sequence[str], store: RendezvousStore) -> None:
        self.names = names
        self._actors = actors
        self._store = store  # ranks meet through it, so it lives as long as they do
        self._closed = False
        self.pids: Sequence[int] = ()
        self.gone: Future[RankDied] = Future()
        """Done when a rank is gone that should not be, with its death."""

    @classmethod
    def start(
        cls, spec: NetworksSpec | SingleRankSpec, places: Sequence[Place], *, launch_timeout_s: float, timeout_s: float
    ) -> "RemoteRanks":
        """A rank for each place, all of which have loaded their part; or an error within the deadline. Blocks."""
        store = RendezvousStore(ray.util.get_node_ip_address())
        actors: list[Any] = [
            ray.remote(RankActor).options(**place.options()).remote(ActorEnvironment.here(place.gpus))
            for place in places
        ]
        try:
            addresses = _addresses(actors, places, launch_timeout_s)
            names = [
                _name(at, place, address) for at, (place, address) in enumerate(zip(places, addresses, strict=True))
            ]
            ranks = cls(actors, names, store)
            ranks.pids = [address.pid for address in addresses]
            for at, rank_spec in enumerate(_rank_specs(places, store, timeout_s)):
                actors[at].load.remote(_starter(rank_spec, spec), names[at], launch_timeout_s)
                ranks._watch(at, addresses[at])
            RankGroup(ranks, launch_timeout_s, LAUNCH_KEY).run("its start", answer_ready)
            return ranks
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            raise

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Sequence[Future[Any]]:
        call = ray.put((function, args))
        return [_follow(actor.run.remote(call), name) for actor, name in zip(self._actors, self.names, strict=True)]

    def close(self) -> None:
        self._closed = True
        for actor in self._actors:
            ray.kill(actor)

    def _watch(self, at: int, address: Address) -> None:
        end = socket.create_connection((address.host, address.port))
        end.sendall(address.key)
        Thread(target=self._wait, args=(at, end), name=self.names[at], daemon=True).start()

    def _wait(self, at: int, end: socket.socket) -> None:
        with end, suppress(OSError):  # gone, one way or the other
            end.recv(1)
        if not self._closed and not self.gone.done():
            self.gone.set_result(RankDied(f"{self.names[at]} died: {_cause(self._actors[at])}"))


def _cause(actor: Any) -> str:
    """Why an actor is gone, as far as Ray knows."""
    try:
        ray.get(actor.address.remote(), timeout=_VERDICT_S)
    except RayError as error:
        return explain(error)
    return "its socket closed, though Ray says that it lives"


def _name(at: int, place: Place, address: Address) -> str:
    return f"policy rank {at} on {place} (pid {address.pid})"


def _starter(rank_spec: RankSpec, spec: NetworksSpec | SingleRankSpec) -> Callable[[], object]:
    """What makes the rank in its process."""
    return (
        partial(SingleRank, rank_spec, spec)
        if isinstance(spec, SingleRankSpec)
        else partial(FSDPRank.create, rank_spec, spec)
    )


def _addresses(actors: Sequence[Any], places: Sequence[Place], timeout_s: float) -> list[Address]:
    try:
        found: list[Address] = ray.get([actor.address.remote() for actor in actors], timeout=timeout_s)
        return found
    except GetTimeoutError as error:
        where = "; ".join(str(place) for place in places)
        raise DeadlineError(
            f"the policy's ranks did not start within launch_timeout_s = {timeout_s:g}: {where}"
        ) from error
    except RayError as error:
        raise RunError(f"a rank of the policy died while it started: {explain(error)}") from error


def _rank_specs(places: Sequence[Place], store: RendezvousStore, timeout_s: float) -> list[RankSpec]:
    """Each process sees its own GPU only, under the number 0. Cores are shared out, unless OMP_NUM_THREADS is set."""
    cores = num_cores()
    free = "OMP_NUM_THREADS" not in os.environ
    return [
        RankSpec(
            rank,
            len(places),
            store.host,
            store.port,
            store.key,
            "cuda:0" if place.gpus else "cpu",
            timeout_s,
            max(1, cores // place.sharers) if free and not place.gpus else None,
        )
        for rank, place in enumerate(places)
    ]


def _follow(reference: Any, name: str) -> Future[Any]:
    """What a rank answers, or RankDied."""
    future: Future[Any] = Future()

    def settle(done: Future[RankAnswer]) -> None:
        error = done.exception()
        if isinstance(error, RayActorError):
            future.set_exception(RankDied(f"{name} died: {explain(error)}"))
        elif error is not None:
            future.set_exception(RunError(f"{name}: {explain(error)}"))
        elif (answer := done.result()).error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.value)

    reference.future().add_done_callback(settle)
    return future
