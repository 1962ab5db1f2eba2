"""Agent loops: what happens between a task and its trajectory, written as straight code over a session.

Owns the base class, the built-in loops and how a loop is found by name or import path. A loop sees the `rollout`
section and its session, and nothing of the trainer.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.config import RolloutConfig
from treadle.config.plugin import load_object
from treadle.errors import ConfigError, LoopFailure, Mistake, nearest
from treadle.rollout.session import Session
from treadle.types import Message, StopReason, ToolCall, ToolResult


class AgentLoopBase(ABC):
    """Agent loop: what happens between a prompt and the end of a trajectory. Each session has an instance of its own,
    so a loop may keep state on itself.

    >>> import treadle
    >>> from treadle.rollout import AgentLoopBase
    >>> class SecondThoughts(AgentLoopBase):
    ...     async def run(self, session):
    ...         await session.generate()
    ...         if not session.done:
    ...             await session.observe("Are you sure?")
    ...         if not session.done:
    ...             await session.generate()
    >>> found = treadle.rollout(model="treadle/tiny-calculator", tasks=[{"prompt": "1+2="}], agent=SecondThoughts,
    ...                         rollout={"response_length": 128}, logging={"logger": []})
    >>> print(*(message["role"] for message in found.trajectories()[0].messages))
    user assistant user assistant
    """

    worker_part: Any = None
    """What `open_worker` returned."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self.rollout = rollout

    @classmethod
    async def open_worker(cls, rollout: RolloutConfig) -> Any:
        """What all sessions of a worker share, such as a server; its `close` is awaited with the worker's."""
        return None

    def missing(self) -> Sequence[Mistake]:
        """What this machine lacks, so that no session could run here."""
        return ()

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
            if submitted(results):
                return None
            if not session.done:
                await session.observe(*map(tool_message, calls, results))
        return None


def submitted(results: Sequence[ToolResult]) -> bool:
    """Whether a call of this turn handed in the result, which ends the task."""
    return any(result.extra.get("submitted") for result in results)


def tool_message(call: ToolCall, result: ToolResult) -> Message:
    """A tool's result as a message."""
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result.text}


BUILT_IN: Mapping[str, str] = {
    "single_turn_agent": "treadle.rollout.agent_loop:SingleTurnAgentLoop",
    "tool_agent": "treadle.rollout.agent_loop:ToolAgentLoop",
    "environment_agent": "treadle.rollout.environment_loop:EnvironmentAgentLoop",
    "program_agent": "treadle.gateway.agents:ProgramAgentLoop",
    "function_agent": "treadle.gateway.agents:FunctionAgentLoop",
    "verifiers_agent": "treadle.gateway.verifiers_agent:VerifiersAgentLoop",
}


def known_loops(rollout: RolloutConfig) -> tuple[str, ...]:
    """What a task may name: built-in loops, those that the config names, and its default."""
    agent = rollout.agent
    paths = (loop.path for loop in agent.loops.values() if loop.path is not None)
    return tuple(dict.fromkeys((*BUILT_IN, *agent.loops, *paths, agent.default_agent_loop)))


class LoopFactory:
    """Builds the loop a task asks for; each name is looked up once. A name in a task imports nothing by itself."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self._rollout = rollout
        self._known: dict[str, tuple[type[AgentLoopBase], Mapping[str, Any]]] = {}
        self._parts: dict[object, Any] = {}
        """What `open_worker` returned, by that function: classes that inherit it share."""
        self.find(rollout.agent.default_agent_loop)
        for name in rollout.agent.loops:
            self.find(name)

    async def open(self) -> None:
        """Start what the loops of a worker share; a ConfigError, with nothing left running, where that fails."""
        if self._rollout.multi_turn.environment is not None:
            self.find("environment_agent")  # tasks may name it
        try:
            for name in list(self._known):
                await self._open_part(name)
        except BaseException:
            await self.close()
            raise

    def check(self) -> list[Mistake]:
        """What is wrong with the loops of the config, and what this machine lacks for them; starts nothing."""
        mistakes: list[Mistake] = []
        for name, (cls, kwargs) in self._known.items():
            try:
                mistakes += cls(self._rollout, **kwargs).missing()
            except ConfigError as error:
                mistakes += error.mistakes
            except Exception as error:  # noqa: BLE001  of whatever kind: the class may be the user's
                problem = f"{cls.__name__} cannot be built: {type(error).__name__}: {error}"
                mistakes.append(Mistake(f"rollout.agent.loops.{name}.kwargs", problem, dict(kwargs)))
        return mistakes

    async def close(self) -> None:
        """Close it again."""
        for part in self._parts.values():
            if part is not None:
                await part.close()
        self._parts.clear()

    async def _open_part(self, name: str) -> None:
        cls, kwargs = self.find(name)
        key = cls.open_worker.__func__  # type: ignore[attr-defined]
        if key is AgentLoopBase.open_worker.__func__:  # type: ignore[attr-defined]
            return
        cls(self._rollout, **kwargs)  # arguments that such a loop refuses are refused here
        if key not in self._parts:
            self._parts[key] = await cls.open_worker(self._rollout)

    def create(self, name: str | None) -> AgentLoopBase:
        """A fresh loop, by name or import path; None for the configured default."""
        agent = self._rollout.agent
        if name is not None and not agent.allow_imports_from_data and name not in known_loops(self._rollout):
            fix = "name it under rollout.agent.loops, or set rollout.agent.allow_imports_from_data"
            raise LoopFailure(f"the task asks for the agent loop {name!r}, which the config does not know: {fix}")
        cls, kwargs = self.find(name or agent.default_agent_loop)
        loop = cls(self._rollout, **kwargs)
        loop.worker_part = self._parts.get(cls.open_worker.__func__)  # type: ignore[attr-defined]
        return loop

    def find(self, name: str) -> tuple[type[AgentLoopBase], Mapping[str, Any]]:
        """The class behind a name and the arguments configured for it."""
        if name in self._known:
            return self._known[name]
        loops = self._rollout.agent.loops
        loop = loops.get(name)
        given = name if loop is None or loop.path is None else loop.path
        path, kwargs = BUILT_IN.get(given, given), loop.kwargs if loop else {}
        key = f"rollout.agent.loops.{name}.path" if loop else "rollout.agent.default_agent_loop"
        if ":" not in path:
            known = [*BUILT_IN, *loops]
            problem = f"no agent loop is called {name!r}; known: {', '.join(known)}"
            fix = nearest(name, known) or "or give an import path, as package.module:Class"
            raise ConfigError([Mistake(key, problem, name, fix=fix)])
        cls = load_object(path, key)
        if not (isinstance(cls, type) and issubclass(cls, AgentLoopBase)):
            raise ConfigError([Mistake(key, f"{path} is not a subclass of AgentLoopBase", path)])
        try:
            inspect.signature(cls).bind(self._rollout, **kwargs)
        except TypeError as error:
            raise ConfigError(
                [Mistake(f"rollout.agent.loops.{name}.kwargs", f"{path}: {error}", dict(kwargs))]
            ) from None
        self._known[name] = cls, kwargs
        return cls, kwargs
