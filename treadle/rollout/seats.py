"""Seats of an episode: one row for each agent, played by the policy or by an opponent (an engine of its own)

Owns who plays which seat, when a seat's row begins, and which turn a reward belongs to. A seat begins when it first
moves: its prompt is its opening, and all that it was told until then. Without `rollout.multi_turn.opponents` the policy
plays every seat. Against opponents it plays one: samples of a task take the seats in turn, and the task's uid decides
which opponent it meets, so that all samples of a task meet the same one.
An opponent is an engine with weights of its own, one for each of `rollout.multi_turn.opponents`. Its weights never
change while it runs: a checkpoint stays the opponent that it was. It computes on processors; the policy's devices are
the policy's alone.
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from zlib import crc32

from treadle.config import ModelConfig, RolloutConfig
from treadle.config.rollout import MultiTurnConfig
from treadle.data.renderer import Renderer
from treadle.engine.protocol import TokenGenerator
from treadle.engine.router import Router
from treadle.errors import EngineFailure, EnvironmentFailure, RunError
from treadle.model.tokenizer import require_same_vocabulary
from treadle.rollout.engines import start_engines
from treadle.rollout.environment import Opening, Step
from treadle.rollout.session import Session
from treadle.types import Completion, Message, Request, Task


def choose_opponent(task: Task, multi_turn: MultiTurnConfig) -> str:
    """The opponent that all samples of a task meet; empty for self-play."""
    opponents = multi_turn.opponents
    if not opponents:
        return ""
    number = crc32(task.uid.encode("utf-8", "backslashreplace"))
    if number % 1000 >= 1000 * multi_turn.opponent_share:
        return ""
    return opponents[number // 1000 % len(opponents)]


class Seats:
    """The rows of the agents of one episode."""

    def __init__(self, session: Session, openings: Sequence[Opening], multi_turn: MultiTurnConfig) -> None:
        self._session = session
        self._openings = openings
        self._rows: dict[int, Session] = {}
        self._owed: dict[int, float] = {}
        """Rewards of seats that have had no turn."""
        opponent = choose_opponent(session.task, multi_turn)
        self.own = session.sample % len(openings) if opponent else None
        """The seat that the policy plays; None for all."""
        self._opponents = {at: opponent for at in range(len(openings)) if self.own is not None and at != self.own}
        if self._opponents:
            session.extra["opponent"] = opponent
        if tools := next((opening.tools for opening in openings if opening.tools), ()):
            session.add_tools(tools)

    async def open(self, number: int, news: Sequence[Message]) -> Session:
        """The seat that is to move, told what is new; the session may be over then, because that does not fit."""
        row = self._rows.get(number)
        if row is not None:
            if news:
                await row.observe(*news)
            return row
        opening = self._openings[number].messages
        assert not isinstance(opening, str), "read_opening makes messages of it"
        messages = _merge_users([*(self._session.task.messages if opening is None else opening), *news])
        if not messages:
            raise EnvironmentFailure(f"seat {number} moves, and nothing was said to it: give it an opening or messages")
        row = self._rows[number] = self._session.seat(number, messages, opponent=self._opponents.get(number, ""))
        return row

    def reward(self, number: int, step: Step) -> None:
        """Note what a step gave to the seat that moved, and to each seat for its last turn.

        What a seat was given before it had a turn is for its first one; a seat that never moves has nothing to train.
        """
        for at, given in enumerate(step.rewards or [None] * len(self._openings)):
            parts = [part for part in (step.reward if at == number else None, given) if part is not None]
            if parts:
                self._owed[at] = self._owed.get(at, 0.0) + sum(parts)
        for at in [at for at in self._owed if at in self._rows]:
            self._rows[at].add_turn_reward(self._owed.pop(at))

    def show(self) -> None:
        """The conversation that readers and reward functions see: that of the policy's seat, or of the first."""
        seat = self._rows.get(self.own or 0) or next(iter(self._rows.values()), None)
        if seat is not None:
            seat.show()


def _merge_users(messages: Sequence[Message]) -> list[Message]:
    """Messages in which no user speaks twice in a row: many chat templates refuse that."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last is not None and last["role"] == message["role"] == "user":
            merged[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


OPPONENTS_KEY = "rollout.multi_turn.opponents"


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
                require_same_vocabulary(model, path, OPPONENTS_KEY, rollout.origin("multi_turn.opponents"))
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
