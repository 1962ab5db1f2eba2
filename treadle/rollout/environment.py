"""Multi-turn tasks against an environment: a user simulator, a game, anything that answers the model.

Owns the environment's protocol and the loop that runs one. A new environment instance serves each session.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

from treadle.config import RolloutConfig
from treadle.config.plugin import load_object
from treadle.errors import EnvironmentFailure, blame
from treadle.rollout.agent_loop import AgentLoopBase, tool_message
from treadle.rollout.session import Session
from treadle.types import Message, Task


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment says to a turn: the next user words, or None when it is over; and a score for the turn."""

    text: str | None = None
    reward: float | None = None


class Environment(Protocol):
    """Built as `Class(task, **environment_kwargs)`; methods may be plain or async; `close` is optional."""

    def step(self, messages: tuple[Message, ...]) -> Any:
        """Answer the conversation so far with a Reply."""
        ...


class EnvironmentAgentLoop(AgentLoopBase):
    """Generate, run any tools, then let the environment answer; until it has nothing more to say."""

    def __init__(self, rollout: RolloutConfig) -> None:
        super().__init__(rollout)
        path = rollout.multi_turn.environment
        assert path is not None, "the config's rules ask for an environment"
        self._build = load_object(path, "rollout.multi_turn.environment")

    async def run(self, session: Session) -> None:
        environment = await self._open(session.task)
        try:
            while not session.done:
                await self._take_turn(session, environment)
        finally:
            await self._close(environment)

    async def _open(self, task: Task) -> Environment:
        kwargs = {**self.rollout.multi_turn.environment_kwargs, **task.environment_kwargs}
        with blame(EnvironmentFailure):
            built: Environment = await _settled(self._build(task, **kwargs))
            return built

    async def _take_turn(self, session: Session, environment: Environment) -> None:
        completion = await session.generate()
        calls = () if session.done or not session.tools else session.parse(completion)
        if calls:
            results = await session.call_tools(calls)
            return await session.observe(*map(tool_message, calls, results)) if not session.done else None
        with blame(EnvironmentFailure):
            reply = await _settled(environment.step(session.messages))
            if not isinstance(reply, Reply):
                raise TypeError(f"step returned {type(reply).__name__}, not a Reply")
        if reply.text is None or session.done:
            session.score_turn(reply.reward)
            return session.finish()
        return await session.observe(reply.text, reward=reply.reward)

    async def _close(self, environment: Environment) -> None:
        close = getattr(environment, "close", None)
        if close is not None:
            with blame(EnvironmentFailure):
                await _settled(close())


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
