"""Seats of an episode: one row for each agent, played by the policy or by an opponent.

Owns who plays which seat, when a seat's row begins, and which turn a reward belongs to. A seat begins when it first
moves: its prompt is its opening, and all that it was told until then. Without `rollout.multi_turn.opponents` the policy
plays every seat. Against opponents it plays one: samples of a task take the seats in turn, and the task's uid decides
which opponent it meets, so that all samples of a task meet the same one.
"""

from collections.abc import Sequence
from zlib import crc32

from treadle.config.rollout import MultiTurnConfig
from treadle.errors import EnvironmentFailure
from treadle.rollout.environment import Opening, Step
from treadle.rollout.session import Session
from treadle.types import Message, Task


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
