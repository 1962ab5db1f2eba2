"""A chat whose tokens follow from session and place alone: whoever goes on with it says what was to be said."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from tests import rollouts
from treadle.config import AgentLoopConfig, RolloutConfig
from treadle.engine.rng import bits_at, stream_of
from treadle.rollout import AgentLoopBase, Session
from treadle.types import Request

STOPS = rollouts.renderer().stop_token_ids


def speaking(mean_tokens: int) -> Callable[[Request, Random], tuple[int, ...]]:
    """A script that samples as an engine does whose noise is counted; a turn has about this many tokens."""

    def speak(request: Request, rng: Random) -> tuple[int, ...]:
        stream, position, ids = stream_of(request), request.position, []
        while True:
            bits = bits_at(stream, position + len(ids))
            if bits % mean_tokens == 0 and position + len(ids):
                return (*ids, STOPS[0])
            ids.append(100 + bits % 300)

    return speak


class Chatter(AgentLoopBase):
    """A few turns, each answered, after a pause, with something that follows from what was said."""

    def __init__(self, rollout: RolloutConfig, turns: int, pause_s: float = 0.0) -> None:
        super().__init__(rollout)
        self.turns = turns
        self.pause_s = pause_s

    async def run(self, session: Session) -> None:
        while not session.done and session.num_turns < self.turns:
            completion = await session.generate()
            await asyncio.sleep(self.pause_s)
            await session.observe(f"{sum(completion.ids)}, you said: {completion.text}")


def chatting(response_length: int, **kwargs: Any) -> RolloutConfig:
    """A section whose tasks are chats; `kwargs` are for the loop."""
    loops = {"chatter": AgentLoopConfig(path=f"{__name__}:Chatter", kwargs=kwargs)}
    return rollouts.rollout(default_agent_loop="chatter", loops=loops, response_length=response_length)
