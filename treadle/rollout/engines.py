"""Rollout backend: starts the engines, agent workers and scorer of a rollout, on this machine or as a subclass does.

Owns the replicas of a rollout where nothing trains, on the GPUs of its plan. Invariant: every start is whole, or an
error that leaves nothing behind.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial

from treadle.config import Config, ModelConfig, Plan, RewardConfig, RolloutConfig
from treadle.cores import num_cores
from treadle.data.renderer import Renderer
from treadle.engine.gpus import plan_here, replica_gpus, reward_gpus
from treadle.engine.openai_client import OpenAIEngine
from treadle.engine.protocol import Engine, Gpu, ProcessEngine, TokenGenerator
from treadle.engine.remote import load_decoder, start_native_remote
from treadle.engine.replica_supervisor import ReplicaSupervisor, StartedEngines
from treadle.engine.scripted import ScriptedEngine
from treadle.errors import DeadlineError, EngineFailure, RunError
from treadle.reward.context import RewardContext
from treadle.reward.scorer import Scorer
from treadle.rollout.protocol import ManagedScorer, ManagedWorker
from treadle.rollout.remote_worker import RemoteAgentWorker, num_processes
from treadle.rollout.worker import AgentLoopWorker
from treadle.types import NOTHING

PROCESS_ENGINES = ("native", "vllm")
"""Engines that run in processes of their own where nothing trains, and are started again when these die."""


class RolloutBackend:
    """Where the parts of a rollout run: here, and in processes of this machine, as its section says."""

    def __init__(self, plan: Plan | None = None) -> None:
        """`plan` places engines and reward models; None: the engines are placed by a plan of their section alone."""
        self.reward_gpus: Mapping[str, Sequence[Gpu]] = NOTHING if plan is None else reward_gpus(plan)
        self._plan = plan

    async def start_engines(
        self, rollout: RolloutConfig, model: ModelConfig, renderer: Renderer, api_key: str | None
    ) -> StartedEngines:
        """Every replica; called on the rollout's own loop, as all of these are."""
        plan = self._plan or plan_here(Config(model=model, rollout=rollout))
        return await _start_replicas(rollout, model, renderer, api_key, replica_gpus(plan))

    async def start_workers(
        self, rollout: RolloutConfig, model: ModelConfig, renderer: Renderer, engine: TokenGenerator
    ) -> Sequence[ManagedWorker]:
        """Agent workers that generate through `engine`: one here, or some in processes of their own."""
        wanted = num_processes(rollout)
        if not wanted:
            return [await AgentLoopWorker.create(rollout=rollout, model=model, engine=engine, renderer=renderer)]
        async with AsyncExitStack() as started:
            workers = []
            for number in range(wanted):
                name = f"agent worker {number}"
                workers.append(await RemoteAgentWorker.create(rollout=rollout, model=model, engine=engine, name=name))
                started.push_async_callback(workers[-1].close)
            started.pop_all()
            return workers

    async def start_scorer(self, reward: RewardConfig, context: RewardContext) -> ManagedScorer:
        """The scorer; `context` is what it may use of this rollout."""
        return await Scorer.create(reward, context)


async def start_engines(
    rollout: RolloutConfig,
    model: ModelConfig,
    renderer: Renderer,
    api_key: str | None,
    gpus: Sequence[Gpu] | None = None,
) -> StartedEngines:
    """Every replica, started; or an error within the launch deadline. `gpus` are those that a plan gave to them all.

    Without `gpus`, a plan of this section alone places them. Those in processes of their own are started again when
    they die; the caller connects and watches their supervisor.
    """
    if gpus:
        size = rollout.tensor_model_parallel_size
        gpu_groups = [gpus[at : at + size] for at in range(0, len(gpus), size)]
        return await _start_replicas(rollout, model, renderer, api_key, gpu_groups)
    return await RolloutBackend().start_engines(rollout, model, renderer, api_key)


async def _start_replicas(
    rollout: RolloutConfig,
    model: ModelConfig,
    renderer: Renderer,
    api_key: str | None,
    gpu_groups: Sequence[Sequence[Gpu]],
) -> StartedEngines:
    """A replica on each group of GPUs; on the processor where a group is empty."""
    limit, num_threads = rollout.limits.launch_timeout_s, _share_cores(len(gpu_groups))
    supervisor, engines = ReplicaSupervisor(len(gpu_groups)), list[Engine]()
    try:
        async with asyncio.timeout(limit):
            for at, gpu_group in enumerate(gpu_groups):
                name = f"{rollout.name}-{at}"
                if rollout.name in PROCESS_ENGINES:
                    start = partial(start_process_engine, rollout, model, name, gpu_group, num_threads)
                    engines.append(await supervisor.add(name, start))
                else:
                    engines.append(await start_engine(rollout, model, renderer, api_key, name, gpu_group))
    except BaseException as error:
        for engine in engines:
            await engine.close()
        if isinstance(error, TimeoutError):
            late = f"{rollout.name} engines did not start within launch_timeout_s = {limit:g}"
            raise DeadlineError(late) from error
        if isinstance(error, EngineFailure):
            where = f" (rollout.openai.base_url = {rollout.openai.base_url})" if rollout.name == "openai" else ""
            raise RunError(f"the {rollout.name} engine{where} cannot be used: {error}") from error
        raise
    return StartedEngines(engines, supervisor if rollout.name in PROCESS_ENGINES else None)


async def start_engine(
    rollout: RolloutConfig,
    model: ModelConfig,
    renderer: Renderer,
    api_key: str | None,
    name: str,
    gpus: Sequence[Gpu] = (),
) -> Engine:
    """One replica, for a process that it has to itself; on the processor where there are no GPUs."""
    if rollout.name == "scripted":
        return ScriptedEngine.create(
            rollout.scripted, name=name, encode=renderer.encode, decode=renderer.decode, seed=rollout.seed
        )
    if rollout.name == "openai":
        return await OpenAIEngine.create(rollout.openai, rollout, encode=renderer.encode, name=name, api_key=api_key)
    if rollout.name == "native":
        from treadle.engine.native.engine import NativeEngine  # in this process, which is the engine's own

        device = f"cuda:{gpus[0].number}" if gpus else "cpu"
        load_decode = partial(load_decoder, model)
        return await NativeEngine.create(rollout, model, name=name, device=device, load_decode=load_decode)
    return await start_process_engine(rollout, model, name, gpus)


def _share_cores(engines: int) -> int | None:
    """Threads of each engine on a processor; None: as many as torch takes."""
    return max(1, num_cores() // engines) if engines > 1 else None


async def start_process_engine(
    rollout: RolloutConfig, model: ModelConfig, name: str, gpus: Sequence[Gpu], num_threads: int | None = None
) -> ProcessEngine:
    """A native or vLLM engine in processes of its own, on these GPUs; on so many threads of the processor without."""
    if rollout.name == "native":
        device = f"cuda:{gpus[0].number}" if gpus else "cpu"
        return await start_native_remote(rollout, model, name, device, None if gpus else num_threads)
    from treadle.engine.vllm.engine import VLLMEngine, require_vllm

    require_vllm(rollout)
    environment: Mapping[str, str] = NOTHING
    if gpus:
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.name for gpu in gpus)}
    elif num_threads is not None:
        environment = {"OMP_NUM_THREADS": str(num_threads)}
    return await VLLMEngine.create(
        rollout,
        model,
        name=name,
        device="cuda" if gpus else "cpu",
        environment=environment,
        load_decode=partial(load_decoder, model),
    )
