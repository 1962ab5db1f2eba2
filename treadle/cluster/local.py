"""Local runtime: the parts of a training run on this machine, without Ray.

    policy    in this process; sharded over several devices, in a process for each (FSDP2)
    engines   native: in this process, on the policy's own module, where the rollout shares the trainer's device
              (`rollout.nnodes: 0`); in processes of their own where it does not
              vllm: always in processes of its own

The plan says which device each part is on. Owns whether weights travel (not at all, within the process, or by the
transport that `trainer.weights` asks for), and how an engine that was started again gets the policy's weights. The
policy lives on the run's loop, engines on the rollout's; calls that concern both cross over.

What waits for what: a replacement's weights wait until the policy's are those that engines have (those of validation's
engine: until no step trains), then for another push to end; a start on the policy's own GPU waits until no step trains,
and a step waits for such a start.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from treadle.aio import first_error
from treadle.cluster.runtime import Networks, load_networks, name_devices
from treadle.config import ModelConfig, Plan, RolloutConfig, TrainConfig
from treadle.config.transport import engines_are_processes
from treadle.cores import num_cores
from treadle.data.renderer import Renderer
from treadle.engine.gpus import replica_gpus, visible_gpus
from treadle.engine.native.engine import NativeEngine, choose_dtype
from treadle.engine.protocol import ConfirmedWeights, Engine, ProcessEngine, SupportsSleep, WeightUpdate
from treadle.engine.remote import load_decoder
from treadle.engine.replica_supervisor import ReplicaSupervisor, StartedEngines
from treadle.errors import DeadlineError
from treadle.policy.policy import SinglePolicy
from treadle.policy.protocol import Policy
from treadle.rollout.engines import RolloutBackend, start_process_engine
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

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        return await across(self.loop, self.engine.update_weights(update))


class LocalReplicas:
    """Made on the run's loop; `start_all` is called on the rollout's."""

    def __init__(self, starts: Mapping[str, StartProcessEngine], weights: WeightSync):
        """`starts` starts each engine, by its name."""
        self._starts = starts
        self._weights = weights
        self._home = asyncio.get_running_loop()
        self.supervisor = ReplicaSupervisor(len(starts), restore=self._restore)

    async def start_all(self, *, shares_gpu: bool, sleeps: bool, timeout_s: float) -> Sequence[Engine]:
        """Every engine. One that `shares_gpu` with the policy starts again between two steps, and then `sleeps`, within
        `timeout_s`."""
        first = True

        async def start(once: StartProcessEngine) -> ProcessEngine:
            if first or not shares_gpu:
                return await once()
            sleep_s = timeout_s if sleeps else None
            return await across(self._home, self._start_idle(asyncio.get_running_loop(), once, sleep_s))

        try:
            with first_error():
                async with asyncio.TaskGroup() as starting:
                    added = [
                        starting.create_task(self.supervisor.add(name, partial(start, once)))
                        for name, once in self._starts.items()
                    ]
        except BaseException:
            await self.supervisor.close_engines()
            raise
        first = False
        return [task.result() for task in added]

    async def _start_idle(
        self, there: asyncio.AbstractEventLoop, once: StartProcessEngine, sleep_s: float | None
    ) -> ProcessEngine:
        async def start() -> ProcessEngine:
            engine = await once()
            if sleep_s is not None and isinstance(engine, SupportsSleep):
                await _put_to_sleep(engine, sleep_s)  # the next step may begin before it has weights, which wake it
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


async def _put_to_sleep(engine: ProcessEngine, timeout_s: float) -> None:
    """An engine that does not sleep in time is closed: it would have the memory that a training step needs."""
    assert isinstance(engine, SupportsSleep)
    try:
        async with asyncio.timeout(timeout_s):
            await engine.sleep(1)
    except BaseException as error:
        await asyncio.shield(engine.close())
        if isinstance(error, TimeoutError):
            limit = f"rollout.limits.request_timeout_s = {timeout_s:g}"
            raise DeadlineError(f"{engine.name} did not sleep within {limit}, after it was started again") from None
        raise


class LocalRuntime:
    """The parts of a training run on this machine, where its plan places them. Made by `start`."""

    def __init__(self, config: TrainConfig, plan: Plan, networks: Networks, transport: Transport | None) -> None:
        """`transport` carries weights to engines in other processes; None: the engine is in this one."""
        policy = networks.step.policy
        own = None
        if isinstance(policy, SinglePolicy) and transport is None and _same_dtype(config.rollout, plan, policy):
            own = policy.module
        dtype = choose_dtype(config.rollout, _engine_device(plan))
        self.networks = networks.step
        self.weights = WeightSync.of(
            config, PolicySender(policy, dtype=dtype, transport=transport, shared=own is not None)
        )
        self.rollout: RolloutBackend
        if transport is None:
            self.rollout = EngineHere(
                config.model if own is None else own, plan, parity_check=config.model.parity_check
            )
        else:
            self.rollout = EngineProcesses(config.rollout, config.model, plan, self.weights)
        self.validation = None if plan.validation is None else ValidationEngine(plan, self.weights, policy)
        self._networks = networks

    @classmethod
    @asynccontextmanager
    async def start(cls, config: TrainConfig, plan: Plan, total_steps: int) -> AsyncIterator["LocalRuntime"]:
        """The networks, loaded; closed again."""
        with _cores_shared(plan):
            networks = await asyncio.to_thread(load_networks, config, total_steps, plan.trainer_gpus())
            transport = None
            if engines_are_processes(config):
                transport = _transport_spec(config, plan, networks).open()
            try:
                yield cls(config, plan, networks, transport)
            finally:
                if transport is not None:
                    await asyncio.to_thread(transport.close)
                networks.close()

    async def watch(self) -> None:
        """Raise when a rank dies between two calls to it."""
        await self._networks.watch()


class EngineHere(RolloutBackend):
    """A native engine in this process: on the policy's own module, or with one that it loads."""

    def __init__(self, source: "ModelConfig | PreTrainedModel", plan: Plan, *, parity_check: bool) -> None:
        super().__init__(plan)
        self._source = source
        self._device = _engine_device(plan)
        self._parity_check = parity_check

    async def start_engines(
        self, rollout: RolloutConfig, model: ModelConfig, renderer: Renderer, api_key: str | None
    ) -> StartedEngines:
        engine = await NativeEngine.create(
            rollout,
            self._source,
            device=self._device,
            parity_check=self._parity_check,
            load_decode=partial(load_decoder, model),
        )
        return StartedEngines([engine])


class EngineProcesses(RolloutBackend):
    """Engines in processes of their own, which are started again when they die. Made on the run's loop."""

    def __init__(self, rollout: RolloutConfig, model: ModelConfig, plan: Plan, weights: WeightSync) -> None:
        super().__init__(plan)
        named = {f"{rollout.name}-{at}": gpus for at, gpus in enumerate(replica_gpus(plan))}
        threads = _threads(plan)
        starts = {
            name: partial(start_process_engine, rollout, model, name, gpus, threads) for name, gpus in named.items()
        }
        self._replicas = LocalReplicas(starts, weights)
        self._shares_gpu = plan.shares_devices and bool(plan.trainer_gpus())

    async def start_engines(
        self, rollout: RolloutConfig, model: ModelConfig, renderer: Renderer, api_key: str | None
    ) -> StartedEngines:
        engines = await self._replicas.start_all(
            shares_gpu=self._shares_gpu,
            sleeps=rollout.free_cache_engine,
            timeout_s=rollout.limits.request_timeout_s,
        )
        return StartedEngines(engines, self._replicas.supervisor)


class ValidationEngine(RolloutBackend):
    """One further engine in a process of its own, where the plan has a place for it. Made on the run's loop.

    When it dies it is started again with the weights it had, while the policy still has them, and the validation goes
    on; once a step has changed them, that validation is lost, and the next one brings its weights.
    """

    def __init__(self, plan: Plan, weights: WeightSync, policy: Policy) -> None:
        super().__init__(plan)
        assert plan.validation is not None
        self._gpus, self._threads = plan.validation.gpus, _threads(plan)
        self._weights = weights
        self._policy = policy
        self._home = asyncio.get_running_loop()
        self._engine: Engine | None = None
        self.supervisor = ReplicaSupervisor(1, restore=self._restore)

    async def start_engines(
        self, rollout: RolloutConfig, model: ModelConfig, renderer: Renderer, api_key: str | None
    ) -> StartedEngines:
        name, here = "validation-0", visible_gpus()
        gpus = [here[gpu] for gpu in self._gpus]
        start = partial(start_process_engine, rollout, model, name, gpus, self._threads)
        self._engine = await self.supervisor.add(name, start)
        return StartedEngines([self._engine], self.supervisor)

    async def _restore(self, engine: Engine, wanted: Callable[[], bool]) -> int | None:
        assert self._engine is not None, "it has died, so it was started"
        distant, lost = _EngineOnLoop(engine, asyncio.get_running_loop()), self._engine.version
        restored = await across(self._home, self._push_again(distant, lost, wanted))
        if restored is None and wanted():
            self.supervisor.interrupt(
                f"{engine.name} died while it sampled with version {lost}, and the policy has newer weights by now"
            )
        return restored

    async def _push_again(self, engine: WeightReceiver, version: int, wanted: Callable[[], bool]) -> int | None:
        async with self._weights.lock.idle():
            if not wanted() or self._policy.version != version:
                return None
            await self._weights.push_to(engine, version)
            return version


@contextmanager
def _cores_shared(plan: Plan) -> Iterator[None]:
    """Leave the engines their cores, where they compute beside the trainer: two that spin for one core both crawl."""
    before = torch.get_num_threads()
    if not plan.shares_devices and not plan.trainer_gpus():
        torch.set_num_threads(min(before, _threads(plan)))  # counts for threads that have not computed yet
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _transport_spec(config: TrainConfig, plan: Plan, networks: Networks) -> TransportSpec:
    """Through a GPU only where both ends are on one: the same, or for a collective the policy's own."""
    device = "cpu"
    if config.trainer.weights.transport == "collective" and isinstance(networks.step.policy, SinglePolicy):
        device = name_devices(config.trainer, plan.trainer_gpus())[0]
    elif plan.shares_devices:
        device = str(_engine_device(plan))
    return TransportSpec.of(config, replicas=plan.replicas, device=device)


def _same_dtype(rollout: RolloutConfig, plan: Plan, policy: SinglePolicy) -> bool:
    """Whether the engine may compute with the policy's own module: it computes in the dtype that was asked for."""
    return rollout.dtype == "auto" or policy.module.dtype == choose_dtype(rollout, _engine_device(plan))


def _threads(plan: Plan) -> int:
    """Threads of each engine, and of the trainer: on a CPU they share the cores, as all of them compute at once."""
    return max(1, num_cores() // (plan.replicas + 1))


def _engine_device(plan: Plan) -> torch.device:
    """Where the first engine is."""
    gpus = plan.replica_gpus()[0]
    return torch.device(f"cuda:{gpus[0]}" if gpus else "cpu")
