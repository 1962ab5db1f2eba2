"""Ranks as processes of this machine: started together, called over pipes, ended together.

Owns the processes. Each gets its seat and its spec as the first message; after that, calls and answers in turn, as
pickles: both ends run our own code as the same user. A call is pickled once for all ranks.
Waits: `start` waits until every rank is ready, or one is not; a reader thread per rank waits for its answers, and for
its end. A process ends when its pipe closes, however this one ended.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from threading import Lock, Thread
from typing import Any

from treadle.exit_status import describe_exit
from treadle.policy.rank import NetworksSpec, RankSpec, RendezvousStore
from treadle.policy.rank_group import LAUNCH_KEY, RankDied, RankGroup

CLOSE_S = 10.0
"""How long a rank may take to end by itself."""

LOOPBACK: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
"""Where gloo listens for the other ranks, unless the user's environment says: it takes the host's name else, which may
be an address that other machines reach."""

FAREWELL = b""
"""The last message."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a rank is told first."""

    seat: RankSpec
    spec: NetworksSpec
    path: tuple[str, ...]
    """Where this process finds modules, so that the rank finds the same."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call came to: a value, or an error to be raised."""

    value: Any = None
    error: BaseException | None = None


class LocalRanks:
    """Handles to the ranks of this machine. Built whole by `start`."""

    def __init__(self, processes: Sequence["_Process"], store: RendezvousStore) -> None:
        self._processes = processes
        self._store = store  # ranks meet through it, so it lives as long as they do
        self.gone: Future[RankDied] = Future()
        """Done when a rank is gone that should not be, with its death; also while nobody calls."""
        self._closed = False
        self._lock = Lock()
        for process in processes:
            process.ended.add_done_callback(self._report)

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
        threads = max(1, (os.cpu_count() or 1) // len(devices)) if "cpu" in devices else None
        seats = [
            RankSpec(rank, len(devices), store.host, store.port, store.key, device, timeout_s, threads)
            for rank, device in enumerate(devices)
        ]
        ranks = cls([_Process(Setup(seat, spec, tuple(sys.path))) for seat in seats], store)
        try:
            RankGroup(ranks, launch_timeout_s, LAUNCH_KEY).run("its start", answer_ready)
        except BaseException:
            ranks.close()
            raise
        return ranks

    @property
    def names(self) -> Sequence[str]:
        return [process.name for process in self._processes]

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Sequence[Future[Any]]:
        message = pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)
        return [process.send(message) for process in self._processes]

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for process in self._processes:
            process.dismiss()
        for process in self._processes:
            process.end()

    def _report(self, ended: Future[RankDied]) -> None:
        with self._lock:
            if not self._closed and not self.gone.done():
                self.gone.set_result(ended.result())


def answer_ready(rank: object) -> None:
    """The first call: answered when a rank is whole."""


class _Process:
    """One rank, from start to death. Answers come in the order of calls."""

    def __init__(self, setup: Setup) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            command = (sys.executable, "-m", "treadle.policy.rank_main", str(theirs.fileno()))
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={**LOOPBACK, **os.environ}
            )
        self.name = f"policy rank {setup.seat.rank} (pid {self._process.pid})"
        self._open: list[Future[Any]] = []
        self._lock = Lock()
        self.ended: Future[RankDied] = Future()
        with suppress(OSError):  # as in `send`
            self._pipe.send_bytes(pickle.dumps(setup))
        self._reader = Thread(target=self._read, name=self.name, daemon=True)
        self._reader.start()

    def send(self, message: bytes) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self.ended.done():
                future.set_exception(self.ended.result())
                return future
            self._open.append(future)
        with suppress(OSError):  # the reader sees the same end, and fails the future with the cause
            self._pipe.send_bytes(message)
        return future

    def _read(self) -> None:
        try:
            while True:
                answer: Answer = pickle.loads(self._pipe.recv_bytes())
                with self._lock:
                    future = self._open.pop(0)
                if answer.error is None:
                    future.set_result(answer.value)
                else:
                    future.set_exception(answer.error)
        except (EOFError, OSError):
            self._process.wait()
        with self._lock:
            self.ended.set_result(self._death())
        for future in self._open:
            future.set_exception(self.ended.result())

    def _death(self) -> RankDied:
        return RankDied(f"{self.name} died: {describe_exit(self._process.returncode)}")

    def dismiss(self) -> None:
        """Ask it to end."""
        with suppress(OSError):  # then it has ended
            self._pipe.send_bytes(FAREWELL)

    def end(self) -> None:
        """Wait for its end; kill it where it does not come."""
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()
        self._pipe.close()
