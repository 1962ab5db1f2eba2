"""Starts the engines a rollout section asks for."""

import asyncio
from collections.abc import Sequence

from treadle.config import ModelConfig, RolloutConfig
from treadle.data.renderer import Renderer
from treadle.engine.openai import OpenAIEngine
from treadle.engine.protocol import Engine, Gpu
from treadle.engine.scripted import ScriptedEngine
from treadle.errors import DeadlineError
from treadle.types import NOTHING


async def start_engines(
    rollout: RolloutConfig, model: ModelConfig, renderer: Renderer, api_key: str | None, gpus: Sequence[Gpu] = ()
) -> list[Engine]:
    """Every replica, started; or an error within the launch deadline. With `gpus`, as many as these hold."""
    size = rollout.tensor_model_parallel_size
    seats = [gpus[at : at + size] for at in range(0, len(gpus), size)]
    seats = seats or [()] * (max(1, rollout.nnodes) * rollout.replicas_per_node)
    limit = rollout.limits.launch_timeout_s
    try:
        async with asyncio.timeout(limit):
            return [
                await start_engine(rollout, model, renderer, api_key, f"{rollout.name}-{at}", seat)
                for at, seat in enumerate(seats)
            ]
    except TimeoutError as error:
        raise DeadlineError(f"{rollout.name} engines did not start within launch_timeout_s = {limit:g}") from error


async def start_engine(
    rollout: RolloutConfig,
    model: ModelConfig,
    renderer: Renderer,
    api_key: str | None,
    name: str,
    gpus: Sequence[Gpu] = (),
) -> Engine:
    """One replica; on these GPUs, where somebody chose."""
    if rollout.name == "scripted":
        return ScriptedEngine.create(
            rollout.scripted, name=name, encode=renderer.encode, decode=renderer.decode, seed=rollout.seed
        )
    if rollout.name == "openai":
        return await OpenAIEngine.create(rollout.openai, rollout, encode=renderer.encode, name=name, api_key=api_key)
    if rollout.name == "native":
        from treadle.engine.native.engine import NativeEngine  # the only one that needs torch

        device = f"cuda:{gpus[0].number}" if gpus else "cuda" if rollout.n_gpus_per_node else "cpu"
        return await NativeEngine.create(rollout, model, name=name, device=device)
    from treadle.engine.vllm.engine import VLLMEngine, require_vllm

    require_vllm(rollout)
    device = "cuda" if rollout.n_gpus_per_node else "cpu"
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.name for gpu in gpus)} if gpus else NOTHING
    return await VLLMEngine.create(rollout, model, name=name, device=device, environment=visible)
