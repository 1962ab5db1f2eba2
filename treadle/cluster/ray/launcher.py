"""Launcher on a Ray cluster: a process is an actor, in a slot, with a socket to the driver.

Owns the actor, the socket to it and the verdict on it. Two things tell of a death, and the first one counts: the socket
closes, or Ray says so (a machine that vanishes closes nothing). Also what Ray says about an actor that is gone, in a
sentence for people.
Waits: `launch` for the actor's first message, until a deadline; `gone` for its end, without one: it means to run for
ever; `end` until it has ended in order, as long as its spec gives it, and then it is killed.
"""

import asyncio
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from treadle.cluster.ray.actor import ActorEnvironment, Address, ProcessActor, connect
from treadle.cluster.ray.placement import ActorSlot
from treadle.errors import DeadlineError, RunError, TreadleError
from treadle.process.channel import RAW, Channel, ChannelClosed
from treadle.process.child_handle import ProcessSpec, describe_trace
from treadle.process.child_main import STARTED, ChildHead
from treadle.process.launcher import read_first
from treadle.process.rpc import Handler, RpcPeer

log = logging.getLogger(__name__)

_TRACE_S = 2.0
"""How long the fault handler of an actor may take to write where its threads are."""

_PROBE_S = 10.0
"""For a task of Ray, which may have to start a process first."""
_VERDICT_S = 2.0
"""How long Ray may take to say why an actor is gone, once its socket has closed."""


def _actor_class(spec: ProcessSpec) -> type[ProcessActor]:
    """The actor of a `serve` function, under the name that `ps` and Ray's tools show: EngineActor, ScorerActor."""
    kind = spec.serve.rpartition("serve_")[2].title()
    return type(f"{kind}Actor", (ProcessActor,), {})


class RayLauncher:
    """A `Launcher` for one slot of the cluster."""

    def __init__(self, slot: ActorSlot) -> None:
        self._slot = slot

    async def launch(
        self, spec: ProcessSpec, handle: Handler, expected: type[Exception] = TreadleError
    ) -> "RayProcess":
        """An actor that serves, or an error within the deadline."""
        slot = self._slot
        environment = ActorEnvironment.here(slot.gpus, trace=spec.trace)
        actor: Any = ray.remote(_actor_class(spec)).options(**slot.options()).remote(environment)
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                address: Address = await actor.address.remote()
                serving = actor.serve.remote(spec.start_timeout_s, spec.kill_with_parent, spec.reap)
                channel = await Channel.open(await connect(address), RAW, STARTED)
                started = await _handshake(spec, channel, serving)
        except BaseException as error:
            ray.kill(actor)
            if isinstance(error, TimeoutError):
                limit = f"{spec.start_timeout_key} = {spec.start_timeout_s:g}"
                raise DeadlineError(f"{spec.name} on {slot} did not start within {limit}") from error
            if isinstance(error, RayError):
                raise RunError(f"{spec.name} on {slot} died while it started: {explain(error)}") from error
            raise
        channel.use(spec.codec.to_child, spec.codec.to_parent)
        peer = RpcPeer(channel, handle, expected, name=spec.name)
        return RayProcess(spec, slot, actor, serving, channel, peer, address, started)


async def _handshake(spec: ProcessSpec, channel: Channel, serving: Any) -> Any:
    """Tell the actor what to serve; raise what is in the way."""
    try:
        channel.send(ChildHead(list(sys.path), spec.name, spec.serve, max_stall_s=spec.max_stall_s).to_json())
        channel.send(pickle.dumps((spec.setup, spec.codec), pickle.HIGHEST_PROTOCOL))
        return read_first(spec.name, await channel.receive())
    except ChannelClosed:
        channel.close()
        await serving  # raises why
        raise RunError(f"{spec.name} ended while it started") from None
    except BaseException:
        channel.close()
        raise


class RayProcess:
    """A `RemoteProcess` in an actor."""

    probe_s = _PROBE_S

    def __init__(
        self,
        spec: ProcessSpec,
        slot: ActorSlot,
        actor: Any,
        serving: Any,
        channel: Channel,
        peer: RpcPeer,
        address: Address,
        started: Any,
    ) -> None:
        self.name, self.pid = spec.name, address.pid
        self.started = started
        self.peer = peer
        self._end_timeout_s = spec.end_timeout_s
        self._slot, self._trace = slot, address.trace
        self._tracing: asyncio.Future[bytes] | None = None
        self._actor = actor
        self._channel = channel
        self._verdict: asyncio.Future[None] = asyncio.wrap_future(serving.future())
        self._verdict.add_done_callback(lambda _: channel.close())
        self._served = asyncio.ensure_future(peer.serve())
        self._served.add_done_callback(self._kill_refused)

    def request(self, function: Callable[..., Awaitable[Any]], *stored: Any) -> Any:
        """A request that goes by Ray: over there `function` is given what handles requests, and the values of the
        references `stored`. Awaited by the caller."""
        return self._actor.handle.remote(function, *stored)

    @property
    def over(self) -> bool:
        return self._served.done()

    async def gone(self) -> str:
        await asyncio.shield(self._served)
        return await self.cause()

    def _kill_refused(self, _: "asyncio.Future[None]") -> None:
        """Kill an actor that sent something else than messages: code that is not ours has the socket."""
        if self._channel.problem is not None:
            ray.kill(self._actor)

    async def cause(self) -> str:
        """Why it is gone, as far as Ray knows."""
        if self._channel.problem is not None:
            return f"killed, because it sent what is no message ({self._channel.problem})"
        try:
            async with asyncio.timeout(_VERDICT_S):
                await asyncio.shield(self._verdict)
        except TimeoutError:
            return f"its socket closed, and Ray did not say why within {_VERDICT_S:g} s"
        except RayError as error:
            return explain(error)
        return "it ended by itself"

    def probe(self) -> None:
        """By a task of Ray on its node, which needs a moment; Python's fault handler answers, whatever holds it."""
        if self._trace >= 0 and not self._verdict.done():
            task = ray.remote(_read_trace).options(**self._slot.task_options(), max_retries=0)
            self._tracing = asyncio.wrap_future(task.remote(self.pid, self._trace).future())
            self._tracing.add_done_callback(_note_untraced)

    async def traced(self) -> str:
        """Where it was when it was probed, as soon as that is known."""
        if self._tracing is not None:
            await asyncio.wait({self._tracing})
        return self._where()

    def _where(self) -> str:
        tracing = self._tracing
        if tracing is None or not tracing.done() or tracing.cancelled() or tracing.exception() is not None:
            return ""
        return describe_trace(tracing.result())

    def kill(self) -> str:
        self._channel.close()
        ray.kill(self._actor)
        return self._where()

    async def end(self, timeout_s: float | None = None) -> None:
        self._channel.close()
        await asyncio.wait({self._verdict}, timeout=self._end_timeout_s if timeout_s is None else timeout_s)
        ray.kill(self._actor)
        await asyncio.wait({self._served, self._verdict}, timeout=_VERDICT_S)
        if self._verdict.done() and not self._verdict.cancelled():
            self._verdict.exception()  # that it was killed is no news


def _read_trace(pid: int, trace: int) -> bytes:
    """On the node of an actor: where its threads are, as its fault handler writes it on SIGUSR1."""
    path = Path(f"/proc/{pid}/fd/{trace}")
    before, deadline = len(path.read_bytes()), time.monotonic() + _TRACE_S
    os.kill(pid, signal.SIGUSR1)
    seen = b""
    while time.monotonic() < deadline:
        time.sleep(0.02)
        last, seen = seen, path.read_bytes()[before:]
        if seen and seen == last:
            break
    return seen


def _note_untraced(tracing: "asyncio.Future[bytes]") -> None:
    """The kill says no place then; why is in the log."""
    if not tracing.cancelled() and (error := tracing.exception()) is not None:
        log.debug("no stack trace of an actor: %s", error)


def explain(error: BaseException) -> str:
    """The cause in one line; for code that broke, the line that broke."""
    if isinstance(error, RayTaskError) or "creation task" in str(error):
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        return lines[-1].strip() if lines else type(error).__name__
    text = " ".join(str(error).split())
    if isinstance(error, RayActorError):
        text = text.partition("The actor is dead because ")[2] or text
        text = text.partition(" Some common causes")[0]
        text = text.partition("Worker exit detail: ")[2] or text
    return text or type(error).__name__


def own_error(error: RayError) -> TreadleError | None:
    """The error that our code raised in an actor on purpose, if it was one."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, TreadleError) else None
