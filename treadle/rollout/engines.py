"""Starts the engines a rollout section asks for."""

import asyncio

from treadle.config import ModelConfig, RolloutConfig
from treadle.data.renderer import Renderer
from treadle.engine.openai import OpenAIEngine
from treadle.engine.protocol import Engine
from treadle.engine.scripted import ScriptedEngine
from treadle.errors import DeadlineError


async def start_engines(
    rollout: RolloutConfig, model: ModelConfig, renderer: Renderer, api_key: str | None
) -> list[Engine]:
    """Every replica, started; or an error within the launch deadline."""
    names = [f"{rollout.name}-{at}" for at in range(max(1, rollout.nnodes) * rollout.replicas_per_node)]
    limit = rollout.limits.launch_timeout_s
    try:
        async with asyncio.timeout(limit):
            return [await _start(rollout, model, renderer, api_key, name) for name in names]
    except TimeoutError as error:
        raise DeadlineError(f"{rollout.name} engines did not start within launch_timeout_s = {limit:g}") from error


async def _start(
    rollout: RolloutConfig, model: ModelConfig, renderer: Renderer, api_key: str | None, name: str
) -> Engine:
    if rollout.name == "scripted":
        return ScriptedEngine.create(
            rollout.scripted, name=name, encode=renderer.encode, decode=renderer.decode, seed=rollout.seed
        )
    if rollout.name == "openai":
        return await OpenAIEngine.create(rollout.openai, rollout, encode=renderer.encode, name=name, api_key=api_key)
    if rollout.name == "native":
        from treadle.engine.native.engine import NativeEngine  # the only one that needs torch

        device = "cuda" if rollout.n_gpus_per_node else "cpu"
        return await NativeEngine.create(rollout, model, name=name, device=device)
    from treadle.engine.vllm.engine import VLLMEngine, require_vllm

    require_vllm(rollout)
    return await VLLMEngine.create(rollout, model, name=name, device="cuda" if rollout.n_gpus_per_node else "cpu")
