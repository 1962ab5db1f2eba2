"""Ranks as processes of this machine: started together, called together, ended together.

Owns the processes; their channels are `process`'s. Each is told its place and its spec first; after that, calls and
answers as pickles: both ends run our own code as the same user. A call is pickled once for all ranks.
Waits: `start` waits until every rank is ready, or one is not; calls return futures, and `RankGroup` has the deadline.
"""

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

from treadle.cores import num_cores
from treadle.policy.rank import FSDPRank, NetworksSpec, RankSpec, RendezvousStore
from treadle.policy.rank_group import LAUNCH_KEY, RankDied, RankGroup, portable_error
from treadle.process.channel import ChannelClosed
from treadle.process.child_handle import ProcessSpec
from treadle.process.child_main import BlockingParent
from treadle.process.launcher import BlockingLaunch, BlockingProcess
from treadle.process.rpc import RpcReply, RpcRequest

CLOSE_S = 10.0
"""How long a rank may take to end by itself."""

LOOPBACK: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
"""Where gloo listens for the other ranks, unless the user's environment says: it takes the host's name else, which may
be an address that other machines reach."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank is told first."""

    rank_spec: RankSpec
    spec: NetworksSpec


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What a call came to: a value, or an error to be raised."""

    value: Any = None
    error: BaseException | None = None


class LocalRanks:
    """Handles to the ranks of this machine. Built whole by `start`."""

    def __init__(self, processes: Sequence[BlockingProcess], store: RendezvousStore) -> None:
        self._processes = processes
        self._store = store  # ranks meet through it, so it lives as long as they do
        self.gone: Future[RankDied] = Future()
        """Done when a rank is gone that should not be, with its death; also while there is no call."""
        self._closed = False
        self._lock = Lock()
        for process in processes:
            process.child.exited.add_done_callback(partial(self._report, process))

    @classmethod
    def start(
        cls,
        spec: NetworksSpec,
        devices: Sequence[str],
        *,
        launch_timeout_s: float,
        timeout_s: float,
    ) -> "LocalRanks":
        """A rank for each of `devices` (`cpu`, `cuda:0`), all of which have loaded their part; or an error."""
        store = RendezvousStore()
        threads = max(1, num_cores() // len(devices)) if "cpu" in devices else None
        rank_specs = [
            RankSpec(rank, len(devices), store.host, store.port, store.key, device, timeout_s, threads)
            for rank, device in enumerate(devices)
        ]
        ranks = cls(_launch([_spec(rank_spec, spec, launch_timeout_s) for rank_spec in rank_specs]), store)
        try:
            RankGroup(ranks, launch_timeout_s, LAUNCH_KEY).run("its start", answer_ready)
        except BaseException:
            ranks.close()
            raise
        return ranks

    @property
    def names(self) -> Sequence[str]:
        return [_name(process) for process in self._processes]

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Sequence[Future[Any]]:
        message = pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)
        return [_submit(process, message) for process in self._processes]

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for process in self._processes:
            process.close_sending()
        for process in self._processes:
            process.end(CLOSE_S)

    def _report(self, process: BlockingProcess, _: Future[int]) -> None:
        with self._lock:
            if not self._closed and not self.gone.done():
                self.gone.set_result(_death(process))


def answer_ready(rank: object) -> None:
    """The first call: answered when a rank is whole."""


def _spec(rank_spec: RankSpec, spec: NetworksSpec, launch_timeout_s: float) -> ProcessSpec:
    return ProcessSpec(
        f"policy rank {rank_spec.rank}",
        f"{__name__}:{serve_rank.__name__}",
        RankSetup(rank_spec, spec),
        launch_timeout_s,
        LAUNCH_KEY,
        environment={**LOOPBACK, **os.environ},
    )


def _launch(specs: Sequence[ProcessSpec]) -> list[BlockingProcess]:
    """A process for each, started side by side; none where one does not start."""
    launches = [BlockingLaunch.begin(spec) for spec in specs]
    processes: list[BlockingProcess] = []
    try:
        for launch in launches:
            processes.append(launch.ready())
    except BaseException:
        for launch in launches[len(processes) :]:
            launch.cancel()
        for process in processes:
            process.end()
        raise
    return processes


def _name(process: BlockingProcess) -> str:
    return f"{process.name} (pid {process.pid})"


def _death(process: BlockingProcess) -> RankDied:
    return RankDied(f"{_name(process)} died: {process.cause()}")


def _submit(process: BlockingProcess, message: bytes) -> Future[Any]:
    """What a rank answers, or RankDied."""
    future: Future[Any] = Future()

    def settle(reply: Future[RankAnswer]) -> None:
        if reply.exception() is not None:
            future.set_exception(_death(process))
        elif (answer := reply.result()).error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.value)

    process.peer.submit(message).add_done_callback(settle)
    return future


def serve_rank(parent: BlockingParent, setup: RankSetup) -> None:
    """The rank's process: load the networks with the other ranks, then run calls until the channel closes.

    A rank that could not load answers every call with its trouble. One in the middle of a collective that the others
    have left sees nothing any more: it is killed with its parent, or by it.
    """
    name = f"policy rank {setup.rank_spec.rank} (pid {os.getpid()})"
    parent.started()
    rank: FSDPRank | None = None
    trouble: Exception | None = None
    try:
        rank = FSDPRank.create(setup.rank_spec, setup.spec)
    except Exception as error:  # noqa: BLE001  (whatever it is, the driving process must hear it)
        trouble = error
    with suppress(ChannelClosed):
        while True:
            request: RpcRequest = parent.channel.receive()
            answer = _run(rank, request.body, name) if rank is not None else _failed(trouble or RuntimeError(), name)
            parent.channel.send(RpcReply(request.number, answer))
    if rank is not None:
        rank.close()


def _run(rank: FSDPRank, message: bytes, name: str) -> RankAnswer:
    """The answer to one call."""
    try:
        function: Callable[..., Any]
        function, args = pickle.loads(message)
        return RankAnswer(rank.run(function, *args))
    except Exception as error:  # noqa: BLE001  (whatever it is, the driving process must hear it)
        return _failed(error, name)


def _failed(error: Exception, name: str) -> RankAnswer:
    """An error that the other end can surely read."""
    answer = RankAnswer(error=portable_error(error, name))
    try:
        pickle.loads(pickle.dumps(answer))
    except (pickle.PickleError, TypeError, AttributeError):
        return RankAnswer(error=portable_error(RuntimeError(f"{type(error).__name__}: {error}"), name))
    return answer
