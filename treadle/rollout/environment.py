"""Environments: multi-turn tasks against a user simulator, a game, or anything else that answers the model.

Owns the environment's protocol and the agent loop that runs one. Each session has an environment instance of its own.
Plain functions run in threads, one at a time, so a slow one delays no other session; async ones run on the event loop.
Waits: every call waits for its answer, at most `rollout.multi_turn.environment_timeout_s`; then it is abandoned.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, Protocol

from treadle.aio import Expired, within
from treadle.config import RolloutConfig
from treadle.config.plugin import load_object
from treadle.errors import EnvironmentFailure, blame
from treadle.rollout.agent_loop import AgentLoopBase, tool_message
from treadle.rollout.session import Session
from treadle.types import Message


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of an environment to a turn: the next user text, or None when it is over; and a score for the turn."""

    text: str | None = None
    reward: float | None = None


class Environment(Protocol):
    """Built as `Class(task, **environment_kwargs)`; methods may be plain or async; `close` is optional."""

    def step(self, messages: tuple[Message, ...]) -> Any:
        """Answer the conversation so far with a Reply."""
        ...


class EnvironmentAgentLoop(AgentLoopBase):
    """Generate, run any tools, then ask the environment; until its reply has no text."""

    def __init__(self, rollout: RolloutConfig) -> None:
        super().__init__(rollout)
        path = rollout.multi_turn.environment
        assert path is not None, "the config's rules ask for an environment"
        self._build = load_object(path, "rollout.multi_turn.environment")

    async def run(self, session: Session) -> None:
        environment = await self._open(session)
        session.add_cleanup(partial(self._close, session, environment), f"{type(environment).__name__}.close()")
        while not session.done:
            await self._take_turn(session, environment)

    async def _open(self, session: Session) -> Environment:
        kwargs = {**self.rollout.multi_turn.environment_kwargs, **session.task.environment_kwargs}
        given_up = Event()
        build: Callable[..., Any] = self._build
        if not inspect.iscoroutinefunction(build):
            build = partial(_build_or_close, build, given_up)
        with session.at("environment", "opening"):
            try:
                built: Environment = await self._call(session, build, session.task, **kwargs)
            except BaseException:
                given_up.set()
                raise
        return built

    async def _take_turn(self, session: Session, environment: Environment) -> None:
        completion = await session.generate()
        calls = () if session.done or not session.tools else session.parse(completion)
        if calls:
            results = await session.call_tools(calls)
            return await session.observe(*map(tool_message, calls, results)) if not session.done else None
        with session.at("environment", "step"):
            reply = await self._call(session, environment.step, session.messages)
            if not isinstance(reply, Reply):
                raise EnvironmentFailure(f"step returned {type(reply).__name__}, not a Reply")
        if reply.text is None or session.done:
            session.score_turn(reply.reward)
            return session.finish()
        return await session.observe(reply.text, reward=reply.reward)

    async def _close(self, session: Session, environment: Environment) -> None:
        close = getattr(environment, "close", None)
        if close is not None:
            await self._call(session, close)

    async def _call(self, session: Session, function: Callable[..., Any], *arguments: Any, **kwargs: Any) -> Any:
        """What a function of the environment returns: awaited if it is async, else from a thread."""
        limit = self.rollout.multi_turn.environment_timeout_s
        name = getattr(function, "__name__", "the constructor")
        with blame(EnvironmentFailure):
            try:
                if inspect.iscoroutinefunction(function):
                    return await within(limit, function(*arguments, **kwargs))
                value = await session.in_thread(partial(function, *arguments, **kwargs), limit)
                return await within(limit, value) if inspect.isawaitable(value) else value
            except Expired:
                key = f"rollout.multi_turn.environment_timeout_s = {limit:g}"
                raise EnvironmentFailure(f"{name} gave no answer within {key}") from None


def _build_or_close(build: Callable[..., Any], given_up: Event, *arguments: Any, **kwargs: Any) -> Any:
    """In a thread: an environment whose caller has given up is closed by the thread that built it."""
    built = build(*arguments, **kwargs)
    close = getattr(built, "close", None)
    if given_up.is_set() and close is not None and not inspect.iscoroutinefunction(close):
        close()
    return built


def may_block(path: str) -> bool:
    """Whether an environment has plain functions, which can hold the interpreter up; an error where there is none."""
    build = load_object(path, "rollout.multi_turn.environment")
    return not inspect.iscoroutinefunction(getattr(build, "step", None))
