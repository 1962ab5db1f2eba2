"""Environment agent: the agent loop that plays an environment, turn after turn, until it is done.

Owns how an environment is found, built, called and closed. Each session has an environment of its own. Plain functions
run in threads, so a slow one delays no other session; async ones run on the event loop.
Waits: every call waits for its answer, at most `rollout.multi_turn.environment_timeout_s`; then it is abandoned, and
the session fails at the environment's boundary.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event
from typing import Any

from treadle.aio import Expired, within
from treadle.config import RolloutConfig
from treadle.errors import EnvironmentFailure, blame
from treadle.rollout.agent_loop import AgentLoopBase, submitted, tool_message
from treadle.rollout.environment import Action, Messages, Opening, Step, read_openings, read_reply, read_step
from treadle.rollout.environments.schemes import EnvironmentSource, ForeignEnvironments, find_environment
from treadle.rollout.seats import Seats
from treadle.rollout.session import Session
from treadle.types import Message, ToolCall, ToolResult


class EnvironmentAgentLoop(AgentLoopBase):
    """Generate, run any tools of the config's, then ask the environment; until it is done."""

    def __init__(self, rollout: RolloutConfig) -> None:
        super().__init__(rollout)
        turns = rollout.multi_turn
        assert turns.environment is not None, "the config's rules ask for an environment"
        self._source = None if turns.environment_python is not None else find_environment(turns.environment)

    @classmethod
    async def open_worker(cls, rollout: RolloutConfig) -> ForeignEnvironments | None:
        """The other interpreter, where the environment runs in one."""
        return None if rollout.multi_turn.environment_python is None else await ForeignEnvironments.start(rollout)

    async def run(self, session: Session) -> None:
        environment = await self._open(session)
        session.add_cleanup(partial(self._close, session, environment), f"{type(environment).__name__}.close()")
        if not hasattr(environment, "reset"):
            while not session.done:
                await self._take_short_turn(session, environment)
            return
        with session.at("environment", "reset"):
            openings = read_openings(await self._call(session, environment.reset, session.task))
        if isinstance(openings, tuple):
            await self._play_seats(session, environment, openings)
            return
        if openings.messages is not None or openings.tools:
            assert not isinstance(openings.messages, str)
            session.begin(openings.messages, openings.tools)
        while not session.done:
            await self._take_turn(session, environment)

    async def _play_seats(self, session: Session, environment: Any, openings: Sequence[Opening]) -> None:
        """An episode of several agents: each has a row of its own, and they move one after the other."""
        seats = Seats(session, openings, self.rollout.multi_turn)
        at = next((at for at, opening in enumerate(openings) if opening.first), 0)
        news: Sequence[Message] = ()
        while not session.done:
            seat = await seats.open(at, news)
            if session.done:
                break
            step = await self._take_seat_turn(seat, environment, at, len(openings))
            if step is None:
                news = ()
                continue  # it called tools of the config's: it goes on
            seats.reward(at, step)
            if step.done or session.done:
                session.finish()
                break
            at, news = (at + 1) % len(openings) if step.seat is None else step.seat, _as_messages(step.messages)
        seats.show()

    async def _take_seat_turn(self, seat: Session, environment: Any, number: int, num_seats: int) -> Step | None:
        """One turn of a seat, and what comes of it; None where it called only tools of the config's."""
        completion = await seat.generate()
        calls = () if seat.done or not seat.tools else seat.parse(completion)
        own, others = seat.split_calls(calls)
        if others:
            results = await seat.call_tools(others)
            if seat.done or submitted(results):
                return Step(done=True)
            await seat.observe(*map(tool_message, others, results))
            if not own:
                return None
        action = Action(completion.text, own, seat.messages, number)
        with seat.at("environment", "step"):
            step = read_step(await self._call(seat, environment.step, action), num_seats)
        if own:
            seat.record_calls(own, _results(own, step))
        if step.info:
            seat.extra["environment"] = {**seat.extra.get("environment", {}), **step.info}
        return step

    async def _open(self, session: Session) -> Any:
        """The session's environment. A class with `reset` is told of the task there, any other when it is built."""
        kwargs = {**self.rollout.multi_turn.environment_kwargs, **session.task.environment_kwargs}
        with session.at("environment", "opening"):
            if self._source is None:
                return await self._call(session, self.worker_part.open, session.task, kwargs)
            return await self._build(session, self._source, kwargs)

    async def _build(self, session: Session, source: EnvironmentSource, kwargs: Mapping[str, Any]) -> Any:
        given_up, build = Event(), source.build
        if not inspect.iscoroutinefunction(build):
            build = partial(_build_or_close, build, given_up)
        try:
            return await self._call(session, build, *((session.task,) if source.takes_task else ()), **kwargs)
        except BaseException:
            given_up.set()
            raise

    async def _take_turn(self, session: Session, environment: Any) -> None:
        completion = await session.generate()
        calls = () if session.done or not session.tools else session.parse(completion)
        own, others = session.split_calls(calls)
        answered: list[Message] = []
        if others:
            results = await session.call_tools(others)
            if submitted(results):
                return session.finish()
            answered = [*map(tool_message, others, results)]
            if not own or session.done:
                return await session.observe(*answered) if not session.done else None
        action = Action(completion.text, own, session.messages)
        with session.at("environment", "step"):
            step = read_step(await self._call(session, environment.step, action))
        if own:
            session.record_calls(own, _results(own, step))
        if step.info:
            session.extra["environment"] = {**session.extra.get("environment", {}), **step.info}
        if step.done or session.done:
            session.score_turn(step.reward)
            return session.finish()
        return await session.observe(*answered, *step.messages, reward=step.reward)

    async def _take_short_turn(self, session: Session, environment: Any) -> None:
        completion = await session.generate()
        calls = () if session.done or not session.tools else session.parse(completion)
        if calls:
            results = await session.call_tools(calls)
            if submitted(results):
                return session.finish()
            return await session.observe(*map(tool_message, calls, results)) if not session.done else None
        with session.at("environment", "step"):
            reply = read_reply(await self._call(session, environment.step, session.messages))
        if reply.text is None or session.done:
            session.score_turn(reply.reward)
            return session.finish()
        return await session.observe(reply.text, reward=reply.reward)

    async def _close(self, session: Session, environment: Any) -> None:
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


def _as_messages(messages: Messages) -> Sequence[Message]:
    assert not isinstance(messages, str), "read_step makes messages of it"
    return messages


def _results(calls: Sequence[ToolCall], step: Step) -> list[ToolResult]:
    """What a step answers to each call, for the record: the tool message with its id, else the next without one."""
    answers = [message for message in step.messages if not isinstance(message, str) and message["role"] == "tool"]
    by_id = {message["tool_call_id"]: message for message in answers if message.get("tool_call_id")}
    nameless = iter([message for message in answers if not message.get("tool_call_id")])
    found = [by_id.get(call.id) or next(nameless, None) for call in calls]
    return [ToolResult("" if message is None else str(message["content"])) for message in found]


def _build_or_close(build: Callable[..., Any], given_up: Event, *arguments: Any, **kwargs: Any) -> Any:
    """In a thread: an environment whose caller has given up is closed by the thread that built it."""
    built = build(*arguments, **kwargs)
    close = getattr(built, "close", None)
    if given_up.is_set() and close is not None and not inspect.iscoroutinefunction(close):
        close()
    return built
