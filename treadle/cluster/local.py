"""Local runtime: the parts of a training run on this machine, without Ray.

    policy    in this process; sharded over several devices, in a process for each (FSDP2)
    engines   native: in this process, on the policy's own module, where the rollout shares the trainer's device
              (`rollout.nnodes: 0`); in processes of their own where it does not
              vllm: always in processes of its own

Owns which device each part is on, whether weights travel (not at all, within the process, or by the transport that
`trainer.weights` asks for), and how an engine that was started again gets the policy's weights. The policy lives on
the run's loop, engines on the rollout's; calls that concern both cross over.

What waits for what: a successor's weights wait until the policy's are those that engines have, then for another push
to end; a start on the policy's own GPU waits until no step trains, and a step waits for such a start.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from treadle.aio import first_error
from treadle.cluster.machine import reward_gpus, this_machine
from treadle.cluster.runtime import Networks, Runtime, load_networks, trainer_devices
from treadle.config import ModelConfig, TrainConfig
from treadle.config.plan import make_plan, validates_beside
from treadle.config.transport import engines_are_processes
from treadle.cores import num_cores
from treadle.data.tasks import TaskSource
from treadle.engine.gpus import visible_gpus
from treadle.engine.native.engine import NativeEngine, choose_dtype
from treadle.engine.protocol import Engine, ProcessEngine, SupportsSleep, WeightUpdate
from treadle.engine.remote import start_native_remote
from treadle.engine.replica_supervisor import ReplicaSupervisor
from treadle.engine.vllm.engine import VLLMEngine
from treadle.policy.policy import SinglePolicy
from treadle.rollout import RolloutParts
from treadle.weights.sync import PolicySender, Transport, WeightReceiver, WeightSync
from treadle.weights.transports import TransportSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

StartProcessEngine = Callable[[], Coroutine[Any, Any, ProcessEngine]]
"""Starts an engine, on the rollout's loop."""


async def across(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` on another loop. Cancelling this cancels it there."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


@dataclass(frozen=True, slots=True)
class _EngineOnLoop:
    """An engine on another loop, as a push sees it."""

    engine: Engine
    loop: asyncio.AbstractEventLoop

    @property
    def name(self) -> str:
        return self.engine.name

    async def update_weights(self, update: WeightUpdate) -> str:
        return await across(self.loop, self.engine.update_weights(update))


class LocalReplicas:
    """Made on the run's loop; `start_all` is called on the rollout's."""

    def __init__(self, starts: Mapping[str, StartProcessEngine], weights: WeightSync):
        """`starts` starts each engine, by its name."""
        self._starts = starts
        self._weights = weights
        self._home = asyncio.get_running_loop()
        self.supervisor = ReplicaSupervisor(len(starts), restore=self._restore)

    async def start_all(self, *, shares_gpu: bool, sleeps: bool) -> Sequence[Engine]:
        """Every engine. One that `shares_gpu` with the policy starts again between two steps, and then `sleeps`."""
        first = True

        async def start(once: StartProcessEngine) -> ProcessEngine:
            if first or not shares_gpu:
                return await once()
            return await across(self._home, self._start_idle(asyncio.get_running_loop(), once, sleeps))

        try:
            with first_error():
                async with asyncio.TaskGroup() as starting:
                    added = [
                        starting.create_task(self.supervisor.add(name, partial(start, once)))
                        for name, once in self._starts.items()
                    ]
        except BaseException:
            await self.supervisor.dismiss()
            raise
        first = False
        return [task.result() for task in added]

    async def _start_idle(
        self, there: asyncio.AbstractEventLoop, once: StartProcessEngine, sleeps: bool
    ) -> ProcessEngine:
        async def start() -> ProcessEngine:
            engine = await once()
            if sleeps and isinstance(engine, SupportsSleep):
                await engine.sleep(1)  # the next step may begin before it has weights, which wake it
            return engine

        async with self._weights.lock.idle():
            return await across(there, start())

    async def _restore(self, engine: Engine, wanted: Callable[[], bool]) -> int | None:
        distant = _EngineOnLoop(engine, asyncio.get_running_loop())
        return await across(self._home, self._restore_still(distant, wanted))

    async def _restore_still(self, engine: WeightReceiver, wanted: Callable[[], bool]) -> int | None:
        async with self._weights.lock.synced() as version:
            if not wanted():
                return None
            await self._weights.push_to(engine, version)
            return version


@asynccontextmanager
async def started(config: TrainConfig, tasks: TaskSource) -> AsyncIterator[Runtime]:
    """The networks, loaded; closed again."""
    with _cores_shared(config):
        networks = await asyncio.to_thread(load_networks, config, tasks)
        transport = _route(config, networks).open() if engines_are_processes(config) else None
        try:
            yield _runtime(config, networks, transport)
        finally:
            if transport is not None:
                await asyncio.to_thread(transport.close)
            networks.close()


@contextmanager
def _cores_shared(config: TrainConfig) -> Iterator[None]:
    """Leave the engines their cores, where they compute beside the trainer: two that spin for one core both crawl."""
    before = torch.get_num_threads()
    if config.rollout.nnodes and not config.trainer.n_gpus_per_node:
        torch.set_num_threads(min(before, _threads(config)))  # counts for threads that have not computed yet
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _route(config: TrainConfig, networks: Networks) -> TransportSpec:
    """Through a GPU only where both ends are on one: the same, or for a collective the policy's own."""
    device = "cpu"
    if config.trainer.weights.transport == "collective" and isinstance(networks.step.policy, SinglePolicy):
        device = trainer_devices(config)[0]
    elif config.rollout.nnodes == 0:
        device = str(_engine_device(config))
    return TransportSpec.of(config, replicas=len(_replica_gpus(config)), device=device)


def _runtime(config: TrainConfig, networks: Networks, transport: Transport | None) -> Runtime:
    policy, apart = networks.step.policy, transport is not None
    dtype = choose_dtype(config.rollout, _engine_device(config))
    own = policy.module if isinstance(policy, SinglePolicy) and not apart and _same_dtype(config, policy) else None
    sender = PolicySender(policy, dtype=dtype, transport=transport, shared=own is not None)
    weights = WeightSync.of(config, sender)
    gpus = reward_gpus(config)
    if apart:
        engines = LocalReplicas(_starts(config), weights)
        shares_gpu = config.rollout.nnodes == 0 and bool(config.trainer.n_gpus_per_node)
        start = partial(engines.start_all, shares_gpu=shares_gpu, sleeps=config.rollout.free_cache_engine)
        rollout = RolloutParts(engines=start, attend=engines.supervisor.attend, gpus=gpus)
    else:
        rollout = RolloutParts(engines=partial(_start_here, config, config.model if own is None else own), gpus=gpus)
    return Runtime(networks.step, rollout, weights, _validation(config), networks.watch)


def _same_dtype(config: TrainConfig, policy: SinglePolicy) -> bool:
    """Whether the engine may compute with the policy's own module: it computes in the dtype that was asked for."""
    if config.rollout.dtype == "auto":
        return True
    return policy.module.dtype == choose_dtype(config.rollout, _engine_device(config))


def _validation(config: TrainConfig) -> RolloutParts | None:
    """A further engine, where the plan has a place for it."""
    placement = make_plan(config, [this_machine()]).validation if validates_beside(config) else None
    if placement is None:
        return None
    return RolloutParts(engines=partial(_start_validation, config, placement.gpus), gpus=reward_gpus(config))


async def _start_here(config: TrainConfig, source: "ModelConfig | PreTrainedModel") -> list[NativeEngine]:
    prove = config.model.prove
    return [await NativeEngine.create(config.rollout, source, device=_engine_device(config), prove=prove)]


def _starts(config: TrainConfig) -> dict[str, StartProcessEngine]:
    """What starts each engine, by its name."""
    named = {f"{config.rollout.name}-{at}": gpus for at, gpus in enumerate(_replica_gpus(config))}
    return {name: partial(_start_one, config, name, gpus) for name, gpus in named.items()}


async def _start_one(config: TrainConfig, name: str, gpus: Sequence[int]) -> ProcessEngine:
    start = _start_vllm if config.rollout.name == "vllm" else _start_native
    return await start(config, name, gpus, None if gpus else _threads(config))


async def _start_validation(config: TrainConfig, gpus: Sequence[int]) -> Sequence[Engine]:
    return [await _start_one(config, "validation-0", gpus)]


async def _start_vllm(config: TrainConfig, name: str, gpus: Sequence[int], num_threads: int | None) -> ProcessEngine:
    here, device = visible_gpus(), "cuda" if gpus else "cpu"
    environment = {"OMP_NUM_THREADS": str(num_threads)}
    if gpus:
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(here[gpu].name for gpu in gpus)}
    return await VLLMEngine.create(config.rollout, config.model, name=name, device=device, environment=environment)


async def _start_native(config: TrainConfig, name: str, gpus: Sequence[int], num_threads: int | None) -> ProcessEngine:
    device = f"cuda:{gpus[0]}" if gpus else "cpu"
    return await start_native_remote(config.rollout, config.model, name, device, num_threads)


def _threads(config: TrainConfig) -> int:
    """Of each engine, and of the trainer: on a CPU they share the cores while all of them compute at once."""
    return max(1, num_cores() // (len(_replica_gpus(config)) + 1))


def _engine_device(config: TrainConfig) -> torch.device:
    """Where the first engine is."""
    gpus = _replica_gpus(config)[0]
    return torch.device(f"cuda:{gpus[0]}" if gpus else "cpu")


def _replica_gpus(config: TrainConfig) -> list[tuple[int, ...]]:
    """The GPUs of each engine: the trainer's, or those after them; none on a CPU."""
    trainer, rollout = config.trainer, config.rollout
    shares = rollout.nnodes == 0
    first, count = (0, trainer.n_gpus_per_node) if shares else (trainer.n_gpus_per_node, rollout.n_gpus_per_node)
    if not count:
        return [()] * (1 if shares else rollout.replicas_per_node)
    size = rollout.tensor_model_parallel_size
    return [tuple(range(at, at + size)) for at in range(first, first + count, size)]
