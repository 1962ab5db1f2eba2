"""Environment that reads out a sum: one term after another, each on top of what the agent says it has so far."""

from collections.abc import Sequence

from treadle.reward.builtin.number_match import read_answer
from treadle.rollout.environment import Reply
from treadle.types import Message, Task

LARGEST = 10**6
"""Totals beyond this are no sum of a few small numbers; reading on would only make them longer."""


class Reader:
    """Reads on until the terms are used up, or the agent has no total to add to."""

    def __init__(self, task: Task, rest: Sequence[str] = ()) -> None:
        self._rest = list(rest)

    def step(self, messages: tuple[Message, ...]) -> Reply:
        total = read_answer(messages[-1]["content"], strict=True)
        if not self._rest or total is None or abs(total) > LARGEST:
            return Reply()
        return Reply(f"{total}{self._rest.pop(0)}=")
