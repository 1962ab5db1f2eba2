"""Opponents: engines with weights of their own that play seats against the policy, in episodes of several agents.

Owns one engine for each of `rollout.multi_turn.opponents`, and which requests go there. Their weights never change
while they run: a checkpoint stays the opponent that it was. They compute on processors; the policy's devices are the
policy's alone.
"""

import random
from collections.abc import Mapping
from contextlib import AsyncExitStack

from treadle.config import ModelConfig, RolloutConfig
from treadle.data.renderer import Renderer
from treadle.engine.protocol import TokenGenerator
from treadle.engine.router import Router
from treadle.errors import EngineFailure, RunError
from treadle.model.vocabulary import require_same_vocabulary
from treadle.rollout.engines import start_engines
from treadle.types import Completion, Request

KEY = "rollout.multi_turn.opponents"


class Opponents:
    """The engines of the policy and of its opponents, as one. Started by `start`; `close` ends those of opponents."""

    def __init__(self, policy: Router, routers: Mapping[str, Router], started: AsyncExitStack) -> None:
        self._policy = policy
        self._routers = routers
        self._started = started

    @classmethod
    async def start(cls, rollout: RolloutConfig, model: ModelConfig, renderer: Renderer, policy: Router) -> "Opponents":
        """An engine for each opponent; a ConfigError where one has another tokenizer than the policy."""
        section = RolloutConfig(
            **{
                **rollout.values(),
                "nnodes": 0,
                "n_gpus_per_node": 0,
                "replicas_per_node": 1,
                "free_cache_engine": False,
            }
        )
        routers: dict[str, Router] = {}
        async with AsyncExitStack() as started:
            for path in rollout.multi_turn.opponents:
                require_same_vocabulary(model, path, KEY, rollout.origin("multi_turn.opponents"))
                weights = ModelConfig(**{**model.values(), "path": path, "adapter": None})
                try:
                    found = await start_engines(section, weights, renderer, None)
                except (EngineFailure, RunError) as error:
                    raise RunError(f"the engine of the opponent {path} did not start: {error}") from error
                name, rng = f"router of the opponent {path}", random.Random(rollout.seed)
                router = routers[path] = Router(
                    found.engines, limits=rollout.limits, failures=rollout.failures, rng=rng, name=name
                )
                started.push_async_callback(router.close)
                if found.supervisor is not None:
                    found.supervisor.connect(router, None)
                    started.push_async_callback(found.supervisor.close)
            return cls(policy, routers, started.pop_all())

    async def generate(self, request: Request) -> Completion:
        """From the opponent that the request names, or from the policy."""
        engine: TokenGenerator = self._routers[request.opponent] if request.opponent else self._policy
        return await engine.generate(request)

    def forget(self, session: str) -> None:
        """A session has ended."""
        for router in (self._policy, *self._routers.values()):
            router.forget(session)

    async def close(self) -> None:
        """End the opponents' engines."""
        await self._started.aclose()
