"""One actor from its start to its death, as the driver sees it.

Owns the actor, the socket to it and the verdict on it. Two things tell of a death, and the first one counts: the socket
closes, or Ray says so (a machine that vanishes closes nothing).
Waits: `start` for the actor's answer, until a deadline; `gone` for its end, without one: it means to run for ever.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayError

from treadle.cluster.ray.actors import Host, Surroundings
from treadle.cluster.ray.faults import explain
from treadle.cluster.ray.link import PICKLES, Address, Link
from treadle.cluster.ray.seat import Seat
from treadle.engine.channel import ChannelClosed, Form, Peer
from treadle.errors import ConfigError, DeadlineError, RunError
from treadle.rollout.serialization import Ready

_VERDICT_S = 2.0
"""How long Ray may take to say why an actor is gone, once its socket has closed."""

Answer = Callable[[Any], Awaitable[Any]]


class Life:
    """See the module. Built by `start`, on the loop that uses it."""

    def __init__(self, actor: Any, serving: Any, link: Link, peer: Peer, address: Address, name: str) -> None:
        self.peer = peer
        self.name = name
        self.pid = address.pid
        self._actor = actor
        self._link = link
        self._verdict: asyncio.Future[None] = asyncio.wrap_future(serving.future())
        self._verdict.add_done_callback(lambda _: link.close())
        self._served = asyncio.ensure_future(peer.serve())
        self._served.add_done_callback(self._refuse)

    @classmethod
    async def start(
        cls,
        kind: type[Host],
        seat: Seat,
        setup: Any,
        *,
        name: str,
        answer: Answer,
        expected: type[Exception],
        timeout_s: float,
        form: Form = PICKLES,
    ) -> "Life":
        """An actor that is ready, or an error within the deadline. `answer` and `expected` are for a `Peer`."""
        actor: Any = ray.remote(kind).options(**seat.options()).remote(Surroundings.here(seat.gpus))
        try:
            async with asyncio.timeout(timeout_s):
                address: Address = await actor.address.remote()
                serving = actor.serve.remote(timeout_s)
                link = await Link.connect(address, form)
                await _meet(link, setup, serving, name)
        except BaseException as error:
            ray.kill(actor)
            if isinstance(error, TimeoutError):
                limit = f"launch_timeout_s = {timeout_s:g}"
                raise DeadlineError(f"{name} on {seat} did not start within {limit}") from error
            if isinstance(error, RayError):
                raise RunError(f"{name} on {seat} died while it started: {explain(error)}") from error
            raise
        return cls(actor, serving, link, Peer(link, answer, expected), address, name)

    def call(self, method: str, *args: Any) -> Any:
        """A call that goes by Ray, for what Ray carries better; awaited by the caller."""
        return getattr(self._actor, method).remote(*args)

    async def gone(self) -> None:
        """Return when the actor serves no more. An error in our own answers to it is raised."""
        await asyncio.shield(self._served)

    @property
    def over(self) -> bool:
        return self._served.done()

    def _refuse(self, _: "asyncio.Future[None]") -> None:
        """End an actor that sent something else than messages: its tools have the socket."""
        if self._link.problem is not None:
            ray.kill(self._actor)

    async def cause(self) -> str:
        """Why it is gone, as far as Ray knows."""
        if self._link.problem is not None:
            return f"killed, because it sent what is no message ({self._link.problem})"
        try:
            async with asyncio.timeout(_VERDICT_S):
                await asyncio.shield(self._verdict)
        except TimeoutError:
            return f"its socket closed, and Ray did not say why within {_VERDICT_S:g} s"
        except RayError as error:
            return explain(error)
        return "it ended by itself"

    def probe(self) -> None:
        """Nothing: where an actor is cannot be asked from here."""

    def kill(self) -> str:
        self._link.close()
        ray.kill(self._actor)
        return ""

    async def end(self) -> None:
        """End the actor, whatever it does. Ending twice is harmless."""
        self._link.close()
        ray.kill(self._actor)
        await asyncio.wait({self._served, self._verdict}, timeout=_VERDICT_S)
        if self._verdict.done() and not self._verdict.cancelled():
            self._verdict.exception()  # that it was killed is no news


async def _meet(link: Link, setup: Any, serving: Any, name: str) -> None:
    """Tell the actor what to be; raise what is in the way."""
    try:
        link.send(setup)
        ready = await link.receive()
        if not isinstance(ready, Ready):
            raise RunError(f"{name} sent what is no answer while it started")
        if isinstance(ready.problem, ConfigError):
            raise ready.problem
        if ready.problem is not None:
            raise RunError(f"{name}: {ready.problem}")
    except ChannelClosed:
        link.close()
        await serving  # raises why
        raise RunError(f"{name} ended while it started") from None
    except BaseException:
        link.close()
        raise
