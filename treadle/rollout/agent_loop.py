"""Agent loops: what happens between a task and its trajectory, written as straight code over a session.

Owns the base class, the built-in loops and how a loop is found by name or import path. A loop sees the `rollout`
section and its session, and nothing of the trainer.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from treadle.config import RolloutConfig
from treadle.config.plugin import load_object
from treadle.errors import ConfigError, LoopFailure, Mistake, nearest
from treadle.rollout.session import Session
from treadle.types import Message, StopReason, ToolCall, ToolResult


class AgentLoopBase(ABC):
    """A new instance runs each session, so a loop may keep state on itself."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self.rollout = rollout

    @abstractmethod
    async def run(self, session: Session) -> None:
        """Run the session to its end. Returning means the attempt is complete."""


class SingleTurnAgentLoop(AgentLoopBase):
    """One prompt, one answer."""

    async def run(self, session: Session) -> None:
        await session.generate()


class ToolAgentLoop(AgentLoopBase):
    """Generate, call the tools the model asked for, show it the results; until it asks for none."""

    async def run(self, session: Session) -> None:
        most = self.rollout.multi_turn.max_assistant_turns
        while not session.done:
            completion = await session.generate()
            calls = () if session.done else session.parse(completion)
            if not calls:
                return
            if most is not None and session.num_turns >= most:
                return session.end(StopReason.TURN_LIMIT)
            results = await session.call_tools(calls)
            if not session.done:
                await session.observe(*map(tool_message, calls, results))
        return None


def tool_message(call: ToolCall, result: ToolResult) -> Message:
    """A tool's result as a message."""
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result.text}


BUILT_IN: Mapping[str, str] = {
    "single_turn_agent": "treadle.rollout.agent_loop:SingleTurnAgentLoop",
    "tool_agent": "treadle.rollout.agent_loop:ToolAgentLoop",
    "environment_agent": "treadle.rollout.environment:EnvironmentAgentLoop",
}


def known_loops(rollout: RolloutConfig) -> tuple[str, ...]:
    """What a task may name: built-in loops, those that the config names, and its default."""
    agent = rollout.agent
    paths = (loop.path for loop in agent.loops.values())
    return tuple(dict.fromkeys((*BUILT_IN, *agent.loops, *paths, agent.default_agent_loop)))


class LoopFactory:
    """Builds the loop a task asks for; each name is looked up once. A name in a task imports nothing by itself."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self._rollout = rollout
        self._known: dict[str, tuple[type[AgentLoopBase], Mapping[str, Any]]] = {}
        self.find(rollout.agent.default_agent_loop)
        for name in rollout.agent.loops:
            self.find(name)

    def create(self, name: str | None) -> AgentLoopBase:
        """A fresh loop, by name or import path; None for the configured default."""
        agent = self._rollout.agent
        if name is not None and not agent.allow_imports_from_data and name not in known_loops(self._rollout):
            fix = "name it under rollout.agent.loops, or set rollout.agent.allow_imports_from_data"
            raise LoopFailure(f"the task asks for the agent loop {name!r}, which the config does not know: {fix}")
        cls, kwargs = self.find(name or agent.default_agent_loop)
        return cls(self._rollout, **kwargs)

    def find(self, name: str) -> tuple[type[AgentLoopBase], Mapping[str, Any]]:
        """The class behind a name and the arguments configured for it."""
        if name in self._known:
            return self._known[name]
        loops = self._rollout.agent.loops
        loop = loops.get(name)
        path, kwargs = (loop.path, loop.kwargs) if loop else (BUILT_IN.get(name, name), {})
        key = f"rollout.agent.loops.{name}.path" if loop else "rollout.agent.default_agent_loop"
        if ":" not in path:
            known = [*BUILT_IN, *loops]
            problem = f"no agent loop is called {name!r}; known: {', '.join(known)}"
            fix = nearest(name, known) or "or give an import path, as package.module:Class"
            raise ConfigError([Mistake(key, problem, name, fix=fix)])
        cls = load_object(path, key)
        if not (isinstance(cls, type) and issubclass(cls, AgentLoopBase)):
            raise ConfigError([Mistake(key, f"{path} is not a subclass of AgentLoopBase", path)])
        self._known[name] = cls, kwargs
        return cls, kwargs
