"""A game of two players with a heap of matches: each takes one, two or three, and who takes the last one wins.

Who leaves a multiple of four cannot lose, which self-play finds out. The players are shown the heap as a number; the
last digit of what they write is their move (1 takes one, 2 two, 3 three, 4 one, and so on). An answer without a digit
loses, and so does one of more than 16 characters: else players learn to write until the game is cut off, which costs
the one who is about to lose nothing.
"""

import re
from random import Random

from treadle.rollout import Action, Opening, Step
from treadle.types import Task

LONGEST = 16


class Matches:
    """One game; `seed` decides how many matches there are."""

    def __init__(self, seed: int = 0, fewest: int = 5, most: int = 12) -> None:
        self._heap = Random(seed).randint(fewest, most)

    def reset(self, task: Task) -> list[Opening]:
        return [Opening(str(self._heap), first=True), Opening()]

    def step(self, action: Action) -> Step:
        digits = re.findall(r"[0-9]", action.text)
        taken = min(self._heap, (int(digits[-1]) - 1) % 3 + 1) if digits and len(action.text) <= LONGEST else 0
        self._heap -= taken
        if taken and self._heap:
            return Step(str(self._heap))
        winner = action.seat if taken else 1 - action.seat
        return Step(done=True, rewards=[float(winner == 0), float(winner == 1)], info={"winner": winner})
