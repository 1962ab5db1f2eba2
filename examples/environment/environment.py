"""A safe with a hidden number: the environment asks, says higher or lower, and has a tool that works once."""

from random import Random

from treadle.rollout import Action, Opening, Step
from treadle.types import Task

SCALE = {
    "type": "function",
    "function": {
        "name": "is_even",
        "description": "Whether the number is even. It can be asked once.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Safe:
    """One game. `seed` comes from the task, `highest` from the config or the task."""

    def __init__(self, seed: int, highest: int = 9) -> None:
        self._number = Random(seed).randint(0, highest)
        self._highest = highest
        self._asked = False

    def reset(self, task: Task) -> Opening:
        return Opening(f"Guess a number from 0 to {self._highest}.", tools=[SCALE])

    def step(self, action: Action) -> Step:
        if action.calls:
            answer = "no more" if self._asked else str(self._number % 2 == 0)
            self._asked = True
            return Step([{"role": "tool", "tool_call_id": call.id, "content": answer} for call in action.calls])
        if not action.text.strip().isdecimal():
            return Step(reward=-1.0, done=True)
        guess = int(action.text)
        if guess == self._number:
            return Step(reward=1.0, done=True, info={"number": self._number})
        return Step("higher" if guess < self._number else "lower", reward=-0.1)
