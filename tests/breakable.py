"""A scripted engine that breaks when told to."""

import asyncio
import random
from typing import Any

from tests.letters import decode, encode
from treadle.config.rollout import FailureConfig, LimitsConfig, ScriptedConfig
from treadle.engine.protocol import ConfirmedWeights, WeightUpdate
from treadle.engine.replica_set import RoutingOptions
from treadle.engine.router import Router
from treadle.engine.scripted import ScriptedEngine
from treadle.errors import EngineFailure
from treadle.types import Completion, Request


class BreakableEngine(ScriptedEngine):
    """Set an attribute, and that call breaks."""

    dead: str | None = None
    """Why requests, health checks and pauses fail."""
    stuck = False
    """Health checks never return."""
    deaf = False
    """Aborts and pauses never return, and do nothing."""
    drops_weights = False
    damages_weights = False
    weights_take_s = 0.0
    served = 0
    probes = 0

    async def generate(self, request: Request) -> Completion:
        self.served += 1
        if self.dead:
            raise EngineFailure(self.dead)
        return await super().generate(request)

    async def health(self) -> None:
        self.probes += 1
        if self.stuck:
            await asyncio.get_running_loop().create_future()
        if self.dead:
            raise EngineFailure(self.dead)

    async def abort(self, session: str | None = None) -> None:
        if self.deaf:
            await asyncio.get_running_loop().create_future()
        await super().abort(session)

    async def pause(self) -> None:
        if self.deaf:
            await asyncio.get_running_loop().create_future()
        if self.dead:
            raise EngineFailure(self.dead)
        await super().pause()

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        if self.drops_weights:
            raise EngineFailure("out of memory")
        await asyncio.sleep(self.weights_take_s)
        confirmed = await super().update_weights(update)
        return ConfirmedWeights(f"not {confirmed.checksum}") if self.damages_weights else confirmed


def replica(name: str, *, latency_s: float = 10.0, version: int = 0, **keys: Any) -> BreakableEngine:
    scripted = ScriptedConfig(latency_s=latency_s, **keys)
    return BreakableEngine.create(scripted, name=name, encode=encode, decode=decode, version=version)


def router(
    *engines: BreakableEngine, seed: int = 0, timeout_s: float = 300.0, retries: int = 2, **numbers: Any
) -> Router:
    return Router(
        engines,
        limits=LimitsConfig(request_timeout_s=timeout_s, close_timeout_s=30.0),
        failures=FailureConfig(request_retries=retries),
        rng=random.Random(seed),
        routing=RoutingOptions(**numbers),
    )
