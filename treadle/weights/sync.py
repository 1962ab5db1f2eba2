"""Weight sync: pushing the policy's weights to engines, and proving that they arrived.

Owns the push: the dtype on the way, the checksum, the deadline, and the lock between a training step, which changes the
weights, and everything that reads them. Knows no transport: a sender publishes a version, a receiver takes a map of
tensors, and the sender retires the version when every receiver is done. The policy in this process is one sender; ranks
elsewhere that gather their shards are another.
Invariant: a push that returns was confirmed by the engine, bit for bit; anything else is a RunError. Either way the
sender has retired the version.

What waits for what: a push waits for the one before it; a restarted engine waits until the policy's weights are those
that engines have (`WeightLock`); a training step waits until nothing reads the weights.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from treadle.config import TrainConfig
from treadle.config.rollout import OnWeightUpdate
from treadle.engine.protocol import ConfirmedWeights, WeightUpdate
from treadle.errors import DeadlineError, EnginesLost, Failure, RunError
from treadle.model.checksum import checksum
from treadle.policy.protocol import Policy
from treadle.weights.transfer import CastTensors, WeightTransfer

_GRACE_S = 10.0
"""Beyond the deadlines of replicas: a rollout leaves out the ones that are late, and confirms for the others."""


class WeightSender(Protocol):
    """The side that has the weights. Calls come one at a time."""

    async def publish(self, version: int) -> WeightUpdate:
        """Make the weights of `version` available; no step trains until they are retired."""
        ...

    async def retire(self, version: int) -> None:
        """Every receiver is done or gone: free what the version took."""
        ...


class Transport(Protocol):
    """How tensors reach other processes: `shared`, `store`, `collective` or `disk`."""

    def publish(self, version: int, tensors: CastTensors) -> Mapping[str, Tensor]:
        """A map of these tensors that can be pickled and read elsewhere."""
        ...

    def retire(self, version: int) -> None: ...

    def close(self) -> None: ...


class PolicySender:
    """The policy of this process."""

    def __init__(
        self,
        policy: Policy,
        *,
        dtype: torch.dtype | None = None,
        transport: Transport | None = None,
        shared: bool = False,
    ) -> None:
        """Send in `dtype` (None: the policy's), by `transport` (None: engines are in this process too).

        `shared` says that the engine holds the policy's very own module: then no tensor travels.
        """
        self._policy = policy
        self._dtype = None if shared else dtype
        self._transport = transport
        self._shared = shared

    async def publish(self, version: int) -> WeightUpdate:
        return await asyncio.to_thread(self._publish, version)

    def _publish(self, version: int) -> WeightUpdate:
        tensors = CastTensors(self._policy.tensors(), self._dtype)
        expected = checksum(tensors)
        if self._shared:
            return WeightUpdate(version, expected, {})
        if self._transport is None:
            return WeightUpdate(version, expected, dict(tensors))
        return WeightUpdate(version, expected, self._transport.publish(version, tensors))

    async def retire(self, version: int) -> None:
        if self._transport is not None:
            await asyncio.to_thread(self._transport.retire, version)


class WeightReceiver(Protocol):
    """The side that takes weights: an engine, or a rollout with engines of its own."""

    @property
    def name(self) -> str: ...

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights: ...


@dataclass(frozen=True, slots=True)
class PushReport:
    """What was proven to arrive, and how long that took."""

    version: int
    checksum: str
    num_bytes: int
    """Handed over; 0 where the engine holds the same module."""
    prepare_s: float
    """Casting and checksum, on the policy's side."""
    update_s: float
    """In the engine, its own checksum included."""
    pause_s: float
    """Of the engine that could sample nothing for longest."""

    @property
    def seconds(self) -> float:
        return self.prepare_s + self.update_s

    def metrics(self) -> dict[str, float]:
        return {
            "weights/push_s": self.seconds,
            "weights/prepare_s": self.prepare_s,
            "weights/update_s": self.update_s,
            "weights/pause_ms": 1000 * self.pause_s,
            "weights/bytes": float(self.num_bytes),
        }


class RolloutReceiver(Protocol):
    """A rollout: it decides what becomes of the sessions that are open while its engines take weights."""

    @property
    def name(self) -> str: ...

    async def update_weights(self, update: WeightUpdate, *, running: OnWeightUpdate) -> ConfirmedWeights: ...


class WeightSync:
    """The weight sync of a run: one sender, every receiver, one push at a time. Used on one loop."""

    def __init__(
        self, sender: WeightSender, *, timeout_s: float, on_weight_update: OnWeightUpdate = "continue"
    ) -> None:
        """Receivers confirm within `timeout_s`; `on_weight_update` says what becomes of a rollout's open sessions."""
        self._sender = sender
        self._timeout_s = timeout_s
        self._on_weight_update = on_weight_update
        self._pushing = asyncio.Lock()
        self.lock = WeightLock()

    @classmethod
    def of(cls, config: TrainConfig, sender: WeightSender) -> Self:
        """As a config says. The rollout's own deadlines come first, since they tell which replica is late."""
        limits, on_weight_update = config.rollout.limits, config.trainer.on_weight_update
        request_s, session_s = limits.request_timeout_s, limits.session_timeout_s
        around_s: dict[OnWeightUpdate, float] = {
            "continue": 0.0,
            "recompute": 2 * request_s,  # a pause before, and a resume after
            "drop": session_s,
            "wait": session_s,
        }
        timeout_s = around_s[on_weight_update] + request_s + _GRACE_S
        return cls(sender, timeout_s=timeout_s, on_weight_update=on_weight_update)

    async def push(self, rollout: RolloutReceiver, version: int) -> PushReport:
        """Bring `version` to the rollout that training samples from; from then on engines are in sync."""
        async with self._published(rollout.name, version) as push:
            push.confirm(await rollout.update_weights(push.update, running=self._on_weight_update))
        self.lock.mark_synced(version)
        return push.report()

    async def push_to(self, receiver: WeightReceiver, version: int) -> PushReport:
        """Bring `version` to one more receiver: validation's engines, or an engine that was restarted."""
        async with self._published(receiver.name, version) as push:
            push.confirm(await receiver.update_weights(push.update))
        return push.report()

    @asynccontextmanager
    async def _published(self, receiver: str, version: int) -> AsyncIterator["_Push"]:
        """The weights of a version, published while a receiver takes them within its deadline; then retired.

        A failure of the receiver is EnginesLost: it ends a run, or a validation, and fails no trajectory.
        """
        async with self._pushing:
            began = time.perf_counter()
            push = _Push(receiver, await self._publish(version), began)
            try:
                async with asyncio.timeout(self._timeout_s):
                    yield push
            except TimeoutError as error:
                late = f"{receiver} did not confirm the weights of version {version} within {self._timeout_s:g} s"
                raise DeadlineError(late) from error
            except Failure as failure:
                raise EnginesLost(str(failure)) from failure
            finally:
                await asyncio.shield(self._sender.retire(version))

    async def _publish(self, version: int) -> WeightUpdate:
        publishing = asyncio.ensure_future(self._sender.publish(version))
        try:
            return await asyncio.shield(publishing)
        except asyncio.CancelledError:
            await asyncio.wait({publishing})  # it works in a thread, which cannot be stopped
            await asyncio.shield(self._sender.retire(version))
            raise
        except Failure as failure:
            raise RunError(str(failure)) from failure


class _Push:
    """One push, from publishing to the receiver's confirmation."""

    def __init__(self, receiver: str, update: WeightUpdate, began: float) -> None:
        self.update = update
        self._receiver = receiver
        self._began = began
        self._ready = self._confirmed = time.perf_counter()
        self._pause_s = 0.0

    def confirm(self, confirmed: ConfirmedWeights) -> None:
        """The receiver's own checksum of the weights it has now; a RunError where it is not the sender's."""
        self._confirmed, self._pause_s = time.perf_counter(), confirmed.pause_s
        if confirmed.checksum != self.update.checksum:
            raise RunError(
                f"{self._receiver} holds other weights than the policy: version {self.update.version} has checksum "
                f"{self.update.checksum}, the engine confirms {confirmed.checksum}"
            )

    def report(self) -> PushReport:
        update = self.update
        prepare_s, update_s = self._ready - self._began, self._confirmed - self._ready
        return PushReport(update.version, update.checksum, _count_bytes(update), prepare_s, update_s, self._pause_s)


class WeightLock:
    """The order between training steps, which change the weights, and readers of the weights. Used on one loop.

    Starts out of sync: no engine has a version yet.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._version: int | None = None
        self._synced = asyncio.Event()
        self._waiting = 0
        self._requested = asyncio.Event()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """A training step. Until the next push, no engine has the weights that the policy has."""
        async with self._lock:
            self._version = None
            self._synced.clear()
            yield

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Between two training steps: the policy computes nothing."""
        async with self._lock:
            yield

    def mark_synced(self, version: int) -> None:
        """Engines have the policy's weights, as this version."""
        self._version = version
        self._synced.set()

    @asynccontextmanager
    async def synced(self) -> AsyncIterator[int]:
        """Wait until engines have the policy's weights, and keep it so; the version of the weights."""
        while True:
            await self._wait_synced()
            async with self._lock:
                if self._version is not None:
                    yield self._version
                    return

    async def requested(self) -> None:
        """Wait until a restarted engine waits for the next push."""
        await self._requested.wait()

    async def _wait_synced(self) -> None:
        if self._synced.is_set():
            return
        self._waiting += 1
        self._requested.set()
        try:
            await self._synced.wait()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._requested.clear()


def _count_bytes(update: WeightUpdate) -> int:
    if isinstance(update.tensors, WeightTransfer):
        return update.tensors.num_bytes
    return sum(tensor.nbytes for tensor in update.tensors.values())
