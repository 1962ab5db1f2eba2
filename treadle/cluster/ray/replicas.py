"""Replicas on a Ray cluster: engines in actors, started side by side, and started again elsewhere if need be.

Owns which replica sits where, and the last weights that were pushed. What happens when a replica dies is the same as on
one machine (`engine.replica_supervisor`): its tokens are kept, another is started in its slot. What a cluster adds:

    slot       a replica whose node has left looks for another (`RestartPolicy.place_s`); then the others go on, and it
               waits for a node that joins, as long as the run lasts
    weights    plain tensors lie in Ray's store, written once for all replicas; a replacement gets the last ones that
               were pushed, once no push is under way

All calls come from the rollout's loop.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from treadle.aio import first_error
from treadle.cluster.ray.actor import THREADS, VISIBLE
from treadle.cluster.ray.launcher import RayLauncher, RayProcess, explain, own_error
from treadle.cluster.ray.object_store import InStore, Packed, StoredTensors, pack
from treadle.cluster.ray.placement import ActorSlot
from treadle.config import ModelConfig, RolloutConfig
from treadle.cores import num_cores
from treadle.data.renderer import Renderer
from treadle.engine.gpus import visible_gpus
from treadle.engine.protocol import ConfirmedWeights, Engine, EngineGone, WeightUpdate
from treadle.engine.remote import EngineCall, RemoteEngine, load_decoder
from treadle.engine.replica_supervisor import ReplicaSupervisor
from treadle.engine.requests import SAVE_S
from treadle.errors import EngineFailure, TreadleError
from treadle.process.rpc import Handler
from treadle.process.supervisor import DEFAULT_POLICY, Recovery, RestartFailed, RestartPolicy, print_recovery
from treadle.rollout.engines import start_engine


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """What a replica's actor is told first."""

    rollout: RolloutConfig
    model: ModelConfig
    name: str
    sharers: int = 1
    """How many actors compute on the processors there at once."""
    api_key: str | None = None
    start: "StartReplica | None" = None
    """What starts the engine in the actor, importable by name; None for the one that `rollout.name` says."""


StartReplica = Callable[[ReplicaSetup], Awaitable[Engine]]

Move = Callable[[ActorSlot], Awaitable[ActorSlot]]
"""Finds another place such as one whose machine has left; waits until there is one."""


async def start_replica(setup: ReplicaSetup) -> Engine:
    """In the actor: the engine that the setup asks for."""
    rollout, model = setup.rollout, setup.model
    if setup.start is not None:
        return await setup.start(setup)
    if rollout.name == "native":
        import torch

        from treadle.engine.native.engine import NativeEngine

        device = "cuda" if os.environ[VISIBLE] else "cpu"
        if device == "cpu" and THREADS not in os.environ:
            torch.set_num_threads(max(1, num_cores() // setup.sharers))
        load_decode = partial(load_decoder, model)
        return await NativeEngine.create(rollout, model, name=setup.name, device=device, load_decode=load_decode)
    renderer = await asyncio.to_thread(Renderer.create, model)
    return await start_engine(rollout, model, renderer, setup.api_key, setup.name, visible_gpus())


class PushedWeights:
    """The last weights that were pushed, so that a replica which is started again can have them."""

    def __init__(self) -> None:
        self.current: WeightUpdate | None = None
        self._stored: tuple[WeightUpdate, Any] | None = None
        self._storing = asyncio.Lock()
        self._pushes = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._awake = asyncio.Event()
        self._awake.set()

    def sleep(self) -> None:
        """Replicas give their devices' memory to the policy, until the next push."""
        self._awake.clear()

    async def awake(self) -> None:
        """Return when replicas may have their devices' memory. The policy's own deadlines bound this."""
        await self._awake.wait()

    @contextmanager
    def pushing(self, update: WeightUpdate) -> Iterator[None]:
        """Note what is on its way; a push of many replicas is over when the last one has it or has failed."""
        self.current = update
        self._awake.set()
        self._pushes += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._pushes -= 1
            if not self._pushes:
                self._quiet.set()

    async def settled(self) -> None:
        """Return when nothing is being pushed."""
        await self._quiet.wait()

    async def stored(self, update: WeightUpdate) -> Any:
        """Where plain tensors lie in Ray's store, written once for all replicas; None for any other map."""
        if isinstance(update.tensors, InStore):
            return update.tensors.reference
        if not isinstance(update.tensors, dict) or not update.tensors:
            return None
        async with self._storing:
            if self._stored is None or self._stored[0] is not update:
                self._stored = None  # the old ones make room first
                self._stored = update, await asyncio.to_thread(_put, update.tensors)
            return self._stored[1]


def _put(tensors: dict[str, Any]) -> Any:
    return ray.put(pack(tensors))


async def _take_stored(
    version: int, checksum: str, elsewhere: bool, handle: Handler, packed: Mapping[str, Packed]
) -> ConfirmedWeights:
    """In the actor: take weights that Ray brought; the arrays are its own memory, read in place."""
    tensors = StoredTensors(packed)

    async def update(given: Mapping[str, Any]) -> ConfirmedWeights:
        call = EngineCall("update_weights", (WeightUpdate(version, checksum, given),))
        confirmed: ConfirmedWeights = await handle(call)
        return confirmed

    if not elsewhere:
        return await update(tensors)
    from treadle.weights.shared_memory import SharedMemoryTransport
    from treadle.weights.transfer import CastTensors

    transport = SharedMemoryTransport()
    try:
        return await update(transport.publish(version, CastTensors(tensors, None)))
    finally:
        await asyncio.to_thread(transport.close)


class RayReplica(RemoteEngine):
    """An engine in an actor."""

    process: RayProcess
    place = ""
    pushed: PushedWeights
    computes_elsewhere = False
    """Whether the engine over there has processes of its own, which do not see Ray's memory."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.updating = asyncio.Lock()

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        """Take new weights. Plain tensors lie in Ray's store; others say themselves where they are."""
        with self.pushed.pushing(update):
            async with self.updating:
                return await self.push(update)

    async def push(self, update: WeightUpdate) -> ConfirmedWeights:
        """Give it new weights, as `update_weights` does; for the holder of the lock."""
        stored = await self.pushed.stored(update)
        if stored is None:
            return await super().update_weights(update)
        take = partial(_take_stored, update.version, update.checksum, self.computes_elsewhere)
        try:
            confirmed: ConfirmedWeights = await self.process.request(take, stored)
        except RayActorError as error:
            raise EngineGone(f"{self.name} is gone: {explain(error)}") from error
        except RayError as error:
            raise own_error(error) or EngineFailure(f"{self.name}: {explain(error)}") from error
        self.version = update.version
        return confirmed

    async def sleep(self, level: int = 1) -> None:
        """Give the device's memory back, where the engine can. The next weights wake it."""
        self.pushed.sleep()
        await super().sleep(level)


class RayReplicas:
    """The replicas of a rollout. `start` is what a rollout calls for its engines."""

    def __init__(
        self,
        rollout: RolloutConfig,
        model: ModelConfig,
        slots: Sequence[ActorSlot],
        *,
        name: str | None = None,
        save_s: float | None = SAVE_S,
        api_key: str | None = None,
        start: StartReplica | None = None,
        move: Move | None = None,
        report: Callable[[Recovery], None] = print_recovery,
        policy: RestartPolicy = DEFAULT_POLICY,
    ) -> None:
        if rollout.name == "openai":
            save_s = None  # an endpoint keeps no tokens of what is interrupted
        self.slots = {f"{name or rollout.name}-{at}": slot for at, slot in enumerate(slots)}
        """Where each replica is, by its name."""
        self.pushed = PushedWeights()
        self.supervisor = ReplicaSupervisor(
            len(slots), restore=self._restore, policy=policy, report=report, save_s=save_s
        )
        self._setup = ReplicaSetup(rollout, model, "", 1, api_key, start)
        self._move = move
        """None: a replica is given up with its machine."""

    async def start(self) -> Sequence[Engine]:
        """Every replica, or none and an error."""
        try:
            with first_error():
                async with asyncio.TaskGroup() as group:
                    added = [
                        group.create_task(self.supervisor.add(name, partial(self._start, name))) for name in self.slots
                    ]
        except BaseException:
            await self.supervisor.close_engines()
            raise
        return [task.result() for task in added]

    async def _launch(self, name: str) -> RayReplica:
        """A replica in its slot, or an error within `rollout.limits.launch_timeout_s`."""
        slot, rollout = self.slots[name], self._setup.rollout
        setup = replace(self._setup, name=name, sharers=slot.sharers)
        replica = await RayReplica.create(
            partial(start_replica, setup),
            name=name,
            limits=rollout.limits,
            launcher=RayLauncher(slot),
            sends_text=not rollout.uses_gpus(),
        )
        replica.place, replica.pushed = str(slot), self.pushed
        replica.computes_elsewhere = rollout.name == "vllm"
        return replica

    async def _start(self, name: str) -> RayReplica:
        """A replica, elsewhere if its node has left. A start that fails because its node leaves does not count."""
        while True:
            if not self.slots[name].there():
                await self._find_slot(name)
            if self.slots[name].gpus:
                await self.pushed.awake()  # else the policy has the device to itself
            try:
                return await self._launch(name)
            except TreadleError:
                if self.slots[name].there():
                    raise

    async def _find_slot(self, name: str) -> None:
        """Another slot for a replica; RestartFailed where it is bound to the machine that has left."""
        slot, place_s = self.slots[name], self.supervisor.policy.place_s
        left = f"{slot.node.machine.name} has left the cluster"
        if self._move is None:
            raise RestartFailed(left)
        try:
            async with asyncio.timeout(place_s):
                self.slots[name] = await self._move(slot)
        except TimeoutError:
            wanted = f"{len(slot.gpus)} GPU" if slot.gpus else "1 CPU"
            self.supervisor.go_on_without(name, f"{left}, and no other node has {wanted} to spare")
            self.slots[name] = await self._move(slot)

    async def _restore(self, engine: Engine, wanted: Callable[[], bool]) -> int | None:
        """Give a replacement the weights of the others; the version it has then. A push that is first does it too."""
        assert isinstance(engine, RayReplica)
        timeout_s = self._setup.rollout.limits.request_timeout_s
        while True:
            await self.pushed.settled()
            update = self.pushed.current
            if not wanted():
                return None
            if update is None:
                return engine.version
            async with engine.updating:
                if self.pushed.current is update and wanted():
                    await _give(engine, update, timeout_s)
                    return update.version


async def _give(replica: RayReplica, update: WeightUpdate, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            confirmed = await replica.push(update)
    except TimeoutError:
        late = f"{replica.name} did not take the weights of version {update.version} within {timeout_s:g} s"
        raise EngineFailure(late) from None
    if confirmed.checksum != update.checksum:
        raise EngineFailure(
            f"{replica.name} got damaged weights of version {update.version}: {confirmed.checksum}, not "
            f"{update.checksum}"
        )
