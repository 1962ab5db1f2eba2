"""Engine start: the replicas that a rollout section asks for."""

import asyncio
from collections.abc import Sequence
from functools import partial

from treadle.config import ModelConfig, RolloutConfig
from treadle.cores import num_cores
from treadle.data.renderer import Renderer
from treadle.engine.gpus import visible_gpus
from treadle.engine.openai import OpenAIEngine
from treadle.engine.protocol import Engine, Gpu, ProcessEngine
from treadle.engine.remote import start_native_remote
from treadle.engine.replica_supervisor import ReplicaSupervisor
from treadle.engine.scripted import ScriptedEngine
from treadle.errors import ConfigError, DeadlineError, EngineFailure, Mistake, RunError
from treadle.types import NOTHING


def _first_gpus(rollout: RolloutConfig) -> tuple[Gpu, ...]:
    wanted, here = rollout.n_gpus_per_node if rollout.uses_gpus() else 0, visible_gpus()
    if wanted > len(here):
        problem = f"{wanted}, but a process here sees {len(here)} GPUs"
        origin, fix = rollout.origin("n_gpus_per_node"), "lower it, or look at CUDA_VISIBLE_DEVICES"
        raise ConfigError([Mistake("rollout.n_gpus_per_node", problem, wanted, origin, fix, "GPU", wanted - len(here))])
    return here[:wanted]


async def start_engines(
    rollout: RolloutConfig,
    model: ModelConfig,
    renderer: Renderer,
    api_key: str | None,
    gpus: Sequence[Gpu] | None = None,
) -> list[Engine]:
    """Every replica, started; or an error within the launch deadline. On the first GPUs here, unless `gpus` is given.

    Those in processes of their own are started again when they die.
    """
    size, gpus = rollout.tensor_model_parallel_size, _first_gpus(rollout) if gpus is None else gpus
    gpu_groups = [gpus[at : at + size] for at in range(0, len(gpus), size)]
    gpu_groups = gpu_groups or [()] * (max(1, rollout.nnodes) * rollout.replicas_per_node)
    limit = rollout.limits.launch_timeout_s
    supervisor, engines = ReplicaSupervisor(len(gpu_groups)), list[Engine]()
    try:
        async with asyncio.timeout(limit):
            for at, gpu_group in enumerate(gpu_groups):
                name = f"{rollout.name}-{at}"
                if rollout.name == "vllm":
                    engines.append(await supervisor.add(name, partial(_start_vllm, rollout, model, name, gpu_group)))
                elif rollout.name == "native":
                    start = partial(_start_native, rollout, model, name, gpu_group, _share_cores(len(gpu_groups)))
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
    return engines


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
        return await NativeEngine.create(rollout, model, name=name, device=device)
    return await _start_vllm(rollout, model, name, gpus)


def _share_cores(engines: int) -> int | None:
    """Threads of each engine on a processor; None: as many as torch takes."""
    return max(1, num_cores() // engines) if engines > 1 else None


async def _start_native(
    rollout: RolloutConfig, model: ModelConfig, name: str, gpus: Sequence[Gpu], num_threads: int | None
) -> ProcessEngine:
    device = f"cuda:{gpus[0].number}" if gpus else "cpu"
    return await start_native_remote(rollout, model, name, device, None if gpus else num_threads)


async def _start_vllm(rollout: RolloutConfig, model: ModelConfig, name: str, gpus: Sequence[Gpu]) -> ProcessEngine:
    from treadle.engine.vllm.engine import VLLMEngine, require_vllm

    require_vllm(rollout)
    device = "cuda" if gpus else "cpu"
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.name for gpu in gpus)} if gpus else NOTHING
    return await VLLMEngine.create(rollout, model, name=name, device=device, environment=visible)
