"""Actor: a process that Ray started, which serves what a launcher sends it, as `python -m treadle.process` does.

Owns what a process does first (its GPUs, its threads, where it finds modules), the socket that it listens on, and the
key that the driver must show before anything it sends is read as a pickle. Knows nothing of where it was placed. It
serves until the driver's end of its socket closes, however the driver ended, and takes what it started with it where
that is asked for. torch is imported by what the actors host, after the process was set up, and never by this module.
Invariant: one connection, of the process that has the key; then nothing listens any more.
"""

import asyncio
import hmac
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray

from treadle.cluster.ray.reaper import descendants, reaping
from treadle.errors import DeadlineError
from treadle.process.channel import RAW, Channel, ChannelCodec
from treadle.process.child_main import (
    ParentConnection,
    end_when_stalled,
    receive_setup,
    serve_async,
    trace_on_signal,
)
from treadle.process.tree import MARK, adopt_orphans, kill_children, list_children

_KEY_BYTES = 32
_KEY_TIMEOUT_S = 5.0
"""Time to show the key: the driver sends it at once."""

VISIBLE, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class ActorEnvironment:
    """What a process must know before anything else is imported in it."""

    gpus: tuple[str, ...]
    path: tuple[str, ...]
    """Where the driver finds modules, so that the actor finds the same."""
    threads: str | None
    """The driver's own OMP_NUM_THREADS. Ray sets 1 for an actor that reserves no CPU of its own."""
    trace: bool = False
    """Write where every thread is into a file of its own, on SIGUSR1."""

    @classmethod
    def here(cls, gpus: tuple[str, ...] = (), *, trace: bool = False) -> "ActorEnvironment":
        return cls(gpus, tuple(sys.path), os.environ.get(THREADS), trace)

    def settle(self) -> None:
        os.environ[VISIBLE] = ",".join(self.gpus)
        if self.threads is None:
            os.environ.pop(THREADS, None)
        else:
            os.environ[THREADS] = self.threads
        sys.path += [place for place in self.path if place not in sys.path]


@dataclass(frozen=True, slots=True)
class Address:
    """Where an actor listens, the key to it, and which process it is."""

    host: str
    port: int
    key: bytes
    pid: int
    trace: int = -1
    """The descriptor of the file with its stack traces; -1: it has none."""

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"  # the key is in no log


class Listener:
    """The actor's end before the driver has connected."""

    def __init__(self, host: str, trace: int = -1) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        port, key = self._listener.getsockname()[1], secrets.token_bytes(_KEY_BYTES)
        self.address = Address(host, port, key, os.getpid(), trace)

    async def accept(self, timeout_s: float) -> socket.socket:
        """The connection that has the key, within a deadline; others are closed."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    end, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                    if await _shows(end, self.address.key):
                        return end
                    end.close()
        except TimeoutError as error:
            raise DeadlineError(f"no process connected to {self.address} within {timeout_s:g} s") from error
        finally:
            self._listener.close()


async def _shows(end: socket.socket, key: bytes) -> bool:
    end.setblocking(False)
    shown = b""
    try:
        async with asyncio.timeout(_KEY_TIMEOUT_S):
            while len(shown) < len(key):
                more = await asyncio.get_running_loop().sock_recv(end, len(key) - len(shown))
                if not more:
                    return False
                shown += more
    except (TimeoutError, OSError):
        return False
    return hmac.compare_digest(shown, key)


async def connect(address: Address) -> socket.socket:
    """The driver's end. The caller's deadline applies."""
    loop, end = asyncio.get_running_loop(), socket.socket()
    end.setblocking(False)
    try:
        await loop.sock_connect(end, (address.host, address.port))
        await loop.sock_sendall(end, address.key)
    except BaseException:
        end.close()
        raise
    return end


class _GuardedParent(ParentConnection):
    """The driver. What the served part has started by then ends with this process."""

    def __init__(self, channel: Channel, name: str, codec: ChannelCodec, guards: ExitStack | None) -> None:
        super().__init__(channel, name, codec)
        self._guards = guards

    def started(self, value: Any = None) -> None:
        if self._guards is not None:  # a replacement needs the memory that they hold
            self._guards.enter_context(reaping(descendants(os.getpid())))
        super().started(value)


@contextmanager
def _marked() -> Iterator[None]:
    """Inside, this process adopts what its descendants leave behind; at the end, or where it is killed, that is killed.

    What it forks without another program has no mark, and outlives a kill of this process.
    """
    before, mark = list_children(os.getpid()), uuid4().hex
    adopt_orphans()
    try:
        with reaping([], mark):
            os.environ[MARK] = mark
            yield
    finally:
        os.environ.pop(MARK, None)
        kill_children(spare=before)


class ProcessActor:
    """One `serve` function."""

    _parent: _GuardedParent

    def __init__(self, environment: ActorEnvironment) -> None:
        environment.settle()
        self._trace = tempfile.TemporaryFile(buffering=0) if environment.trace else None  # noqa: SIM115
        trace = -1
        if self._trace is not None:
            trace = self._trace.fileno()
            trace_on_signal(trace)
        self._listener = Listener(ray.util.get_node_ip_address(), trace)

    async def address(self) -> Address:
        """Where the driver finds this actor."""
        return self._listener.address

    async def serve(self, timeout_s: float, guard: bool, reap: bool) -> None:
        """Serve what the driver says, until it goes. The driver connects within a deadline.

        Where it should `reap`, what it started ends with it, however it ends.
        """
        channel = await Channel.open(await self._listener.accept(timeout_s), RAW, RAW)
        with ExitStack() as guards:
            if reap:
                guards.enter_context(_marked())
            head, serve, setup, codec = await receive_setup(channel)
            if head.max_stall_s:
                end_when_stalled(asyncio.get_running_loop(), head.max_stall_s)
            self._parent = _GuardedParent(channel, head.name, codec, guards if guard else None)
            await serve_async(serve, self._parent, setup)

    async def handle(self, function: Callable[..., Awaitable[Any]], *resolved: Any) -> Any:
        """A request that came by Ray, which carries large arrays better: given what handles requests here."""
        return await function(self._parent.handle, *resolved)
