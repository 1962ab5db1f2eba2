"""Environments: what answers the model between turns, such as a game, a simulated user or a program with a state.

Owns the protocol and how what an environment returns is read. An environment has `reset`, `step` and `close`, plain or
async; it may write the prompt, bring tools of its own, give a reward for every turn and end the episode. The short form
has no `reset`: it is built with the task, and answers the whole conversation with a `Reply`.
An episode of several agents: `reset` returns an `Opening` for each seat, actions say whose they are, and a `Step` which
seat moves next and what each seat is given.
An environment that cannot import treadle, since it lives in another interpreter, returns maps with the same names.
Invariant: what is no Opening, no Step and no Reply is an EnvironmentFailure that names the field, never a reward.
"""

import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from treadle.errors import EnvironmentFailure
from treadle.rollout.trajectory_checks import finite_reward
from treadle.types import Message, Task, ToolCall

ROLES = ("system", "user", "tool")
"""Roles of the messages that an environment may write; an opening may have turns of an assistant, too."""

Messages = Sequence[Message] | str
"""Chat messages, or the text of one message of the user."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How an episode begins: the prompt, and the tools that the environment itself runs."""

    messages: Messages | None = None
    """In place of the task's; None: the task's own."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas in OpenAI's shape. Calls of these tools come with the action; their arguments were checked."""
    first: bool = False
    """With several seats: this one moves first; where none says so, seat 0 does."""


@dataclass(frozen=True, slots=True)
class Action:
    """What the model did: its turn as text, and the calls in it of tools that are the environment's own."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    messages: tuple[Message, ...] = ()
    """The conversation so far, this turn included."""
    seat: int = 0
    """The agent whose turn it was, in an episode of several."""


@dataclass(frozen=True, slots=True)
class Step:
    """What comes of an action."""

    messages: Messages = ()
    """What the model is told next; needed unless it is done. With several seats, what the next one is told."""
    reward: float | None = None
    """For this turn: part of the trajectory's reward, and of the turn's own credit. None: there is none."""
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values, kept as `environment` in the trajectory's `extra`; later steps replace the same names."""
    seat: int | None = None
    """The seat that moves next; None for the one after this."""
    rewards: Sequence[float | None] = ()
    """What each seat is given beside `reward`, for its last turn; such as who won."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of the short form to a turn: the next user text, or None when it is over; and a score for the turn."""

    text: str | None = None
    reward: float | None = None


class Environment(Protocol):
    """Environment: what answers the model between its turns. Built as `Class(**environment_kwargs)`, once for each
    session. Methods may be plain or async.

    >>> import treadle
    >>> from treadle.rollout import Opening, Step
    >>> class Sums:
    ...     def __init__(self, sums):
    ...         self.sums = list(sums)
    ...     def reset(self, task):
    ...         return Opening(self.sums[0])
    ...     def step(self, action):
    ...         asked = self.sums.pop(0)
    ...         reward = float(action.text.endswith(str(eval(asked.removesuffix("=")))))
    ...         return Step(self.sums[0] if self.sums else (), reward, done=not self.sums)
    >>> tasks = [{"environment_kwargs": {"sums": ["1+2=", "2+4="]}}]
    >>> found = treadle.rollout(model="treadle/tiny-calculator", tasks=tasks, environment=Sums,
    ...                         rollout={"response_length": 128}, logging={"logger": []})
    >>> print(*(message["content"] for message in found.trajectories()[0].messages if message["role"] == "user"))
    1+2= 2+4=

    Plain ones run in threads: never two at once for one object, and not always in the same thread. Each call, the
    constructor and `reset` too, has `rollout.multi_turn.environment_timeout_s`; `close` may come while a call that
    outlived it still runs.
    """

    def reset(self, task: Task) -> Opening | Awaitable[Opening]:
        """Begin the episode of a task."""
        ...

    def step(self, action: Action) -> Step | Awaitable[Step]:
        """Answer a turn of the model."""
        ...

    def close(self) -> Any:
        """Called once, however the session ended. May be left out."""
        ...


class ShortEnvironment(Protocol):
    """Short form, without `reset`: built as `Class(task, **environment_kwargs)`; `close` is optional."""

    def step(self, messages: tuple[Message, ...]) -> Reply | Awaitable[Reply]:
        """Answer the conversation so far."""
        ...


def read_openings(value: object) -> Opening | tuple[Opening, ...]:
    """What `reset` returned, checked; several, where it has a list of them: one for each seat."""
    if not isinstance(value, list | tuple):
        return read_opening(value)
    if len(value) < 2:
        raise EnvironmentFailure(f"reset returned a list of {len(value)}; an episode of several agents has two or more")
    openings = tuple(map(read_opening, value))
    first = [at for at, opening in enumerate(openings) if opening.first]
    if len(first) > 1:
        raise EnvironmentFailure(f"reset: seats {first} all move first")
    shown = [opening.tools for opening in openings if opening.tools]
    if any(tools != shown[0] for tools in shown):
        raise EnvironmentFailure("reset: seats have different tools; show the same ones to each")
    return openings


def read_opening(value: object) -> Opening:
    """One opening, checked."""
    if value is None:
        return Opening()
    given = _read_record(value, Opening, "reset")
    messages = given.get("messages")
    tools = given.get("tools") or ()
    if isinstance(tools, Mapping | str) or not all(_is_schema(tool) for tool in tools):
        raise EnvironmentFailure(f'reset: tools must be schemas as {{"type": "function", …}}, got {tools!r:.200}')
    checked = None if messages is None else _read_messages(messages, "reset", (*ROLES, "assistant"))
    if checked == ():
        raise EnvironmentFailure("reset: messages is empty; leave it out to begin with the task's own")
    first = given.get("first", False)
    if not isinstance(first, bool):
        raise EnvironmentFailure(f"reset: first must be true or false, got {first!r:.80}")
    return Opening(checked, tuple(dict(tool) for tool in tools), first)


def read_step(value: object, num_seats: int = 1) -> Step:
    """What `step` returned, checked."""
    given = _read_record(value, Step, "step")
    messages = _read_messages(given.get("messages") or (), "step", ROLES)
    done = given.get("done", False)
    if not isinstance(done, bool):
        raise EnvironmentFailure(f"step: done must be true or false, got {done!r:.80}")
    if not done and not messages:
        raise EnvironmentFailure("step: there are no messages for the model, and it is not done")
    seat, rewards = given.get("seat"), given.get("rewards") or ()
    if seat is not None and (type(seat) is not int or not 0 <= seat < num_seats):
        raise EnvironmentFailure(f"step: seat must be a number from 0 to {num_seats - 1}, got {seat!r:.80}")
    if isinstance(rewards, Mapping | str) or len(rewards) not in (0, num_seats) or (rewards and num_seats == 1):
        wanted = f"one number for each of {num_seats} seats" if num_seats > 1 else "left out: there is one agent"
        raise EnvironmentFailure(f"step: rewards must be {wanted}, got {rewards!r:.80}")
    given_each = tuple(map(read_reward, rewards))
    return Step(messages, read_reward(given.get("reward")), done, _read_info(given.get("info")), seat, given_each)


def read_reply(value: object) -> Reply:
    """What `step` of the short form returned, checked."""
    given = _read_record(value, Reply, "step")
    text = given.get("text")
    if text is not None and not isinstance(text, str):
        raise EnvironmentFailure(f"step: text must be a text or None, got {type(text).__name__}")
    return Reply(text, read_reward(given.get("reward")))


def read_reward(reward: object) -> float | None:
    """A reward as a number; a failure for what is none, and for NaN and infinity."""
    if reward is None:
        return None
    return finite_reward(reward, EnvironmentFailure, "step: reward")


def _read_record(value: object, cls: type[Opening] | type[Step] | type[Reply], call: str) -> Mapping[str, Any]:
    """The fields of a record, or of a map with the same names."""
    names = [item.name for item in fields(cls)]
    if isinstance(value, cls):
        return {name: getattr(value, name) for name in names}
    if not isinstance(value, Mapping):
        raise EnvironmentFailure(f"{call} returned {type(value).__name__}; it must return {cls.__name__}")
    for name in value:
        if name not in names:
            raise EnvironmentFailure(f"{call} returned {name!r}, which is no field of {cls.__name__}: {names}")
    return value


def _read_messages(value: Any, call: str, roles: Sequence[str]) -> tuple[Message, ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        raise EnvironmentFailure(f"{call}: messages must be a text or a list of messages, got {type(value).__name__}")
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") not in roles or "content" not in message:
            wanted = f"a role ({', '.join(roles)}) and a content"
            raise EnvironmentFailure(f"{call}: a message needs {wanted}, got {message!r:.120}")
    return tuple(dict(message) for message in value)


def _read_info(value: Any) -> Mapping[str, Any]:
    if not value:
        return {}
    if not isinstance(value, Mapping):
        raise EnvironmentFailure(f"step: info must be a map, got {type(value).__name__}")
    for name, item in value.items():
        try:
            json.dumps(item, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise EnvironmentFailure(f"step: info[{name!r}] is no JSON value: {error}") from None
    return dict(value)


def _is_schema(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)
