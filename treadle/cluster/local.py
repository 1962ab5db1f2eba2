"""Local runtime: the parts of a training run on this machine, without Ray.

    policy    in this process; sharded over several devices, in a process for each (FSDP2)
    engines   native: in this process, on the policy's own module, where the rollout shares the trainer's device
              (`rollout.nnodes: 0`); in processes of their own where it does not
              vllm: always in processes of its own

Owns which device each part is on, and whether weights travel: not at all, within the process, or by the transport that
`trainer.weights` asks for.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from treadle.cluster.apart import Apart, Start
from treadle.cluster.machine import reward_gpus, this_machine
from treadle.cluster.runtime import Networks, Runtime, load_networks, push_timeout_s, trainer_devices
from treadle.config import ModelConfig, TrainConfig
from treadle.config.plan import make_plan, validates_beside
from treadle.config.transport import engines_are_processes
from treadle.cores import num_cores
from treadle.data.tasks import TaskSource
from treadle.engine.gpus import visible_gpus
from treadle.engine.native.engine import NativeEngine, choose_dtype
from treadle.engine.protocol import Engine, ProcessEngine
from treadle.engine.remote import start_native_remote
from treadle.engine.vllm.engine import VLLMEngine
from treadle.policy.policy import SinglePolicy
from treadle.rollout import RolloutParts
from treadle.weights.sync import PolicySender, PushReport, Transport, WeightLock, WeightReceiver, push_weights
from treadle.weights.transports import TransportSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    weight_lock, sending = WeightLock(), asyncio.Lock()

    async def give(engine: WeightReceiver, version: int) -> PushReport:
        async with sending:  # the rollout's engines, validation's, and those that were started again: one at a time
            return await push_weights(sender, engine, version, timeout_s=push_timeout_s(config))

    gpus = reward_gpus(config)
    if apart:
        engines = Apart(_starts(config), weight_lock, give)
        shares_gpu = config.rollout.nnodes == 0 and bool(config.trainer.n_gpus_per_node)
        start = partial(engines.start_all, shares_gpu=shares_gpu, sleeps=config.rollout.free_cache_engine)
        rollout = RolloutParts(engines=start, attend=engines.supervisor.attend, gpus=gpus)
    else:
        rollout = RolloutParts(engines=partial(_start_here, config, config.model if own is None else own), gpus=gpus)
    return Runtime(networks.step, rollout, give, _validation(config), networks.watch, weight_lock)


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


def _starts(config: TrainConfig) -> dict[str, Start]:
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
