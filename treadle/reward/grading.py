"""Gradings in boxes: reward functions that run what a model wrote, `code_tests` above all, in this process.

The function itself computes next to nothing here: it starts boxes, waits for them and compares text. So gradings
overlap, at most `reward.max_gradings` at once, and share the boxes that were started ahead. Each step in a box has a
deadline of its own; `reward.timeout_s` is for functions that run in workers.
Waits: a grading for its turn, first come, first served.
Invariant: after `close` no grading runs and no box of one is left.
"""

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from treadle.config.reward import RewardConfig
from treadle.cores import num_cores
from treadle.reward.function import RewardFunction
from treadle.reward.result import Fault, RewardResult, ScoreFailure, as_worker_results
from treadle.sandbox.pool import close_boxes
from treadle.sandbox.protocol import BoxSettings
from treadle.sandbox.providers import check_provider


class Gradings:
    """The gradings of one scorer. Built by `create`."""

    def __init__(self, reward: RewardConfig) -> None:
        self._places = asyncio.Semaphore(reward.max_gradings or num_cores())
        self._box = BoxSettings.of(reward.sandbox)
        self._running: set[asyncio.Task[RewardResult]] = set()
        self._closed = False

    @classmethod
    async def create(cls, reward: RewardConfig) -> "Gradings":
        """ConfigError where a function needs boxes that cannot be had here."""
        if reward.uses_sandbox():
            await asyncio.to_thread(check_provider, "reward.sandbox", reward.sandbox)
        return cls(reward)

    async def run(self, function: RewardFunction, values: Mapping[str, Any]) -> RewardResult:
        """What the function says. A cancelled caller ends its grading."""
        task = asyncio.ensure_future(self._grade(function, values))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise ScoreFailure(Fault.CLOSED, "was ended: the scorer is closed", function.name) from None
            raise

    async def _grade(self, function: RewardFunction, values: Mapping[str, Any]) -> RewardResult:
        async with self._places:
            result = function(values)
            return as_worker_results(function.read(await result if inspect.isawaitable(result) else result))

    async def close(self) -> None:
        """End what runs, and the boxes that wait."""
        self._closed = True
        ended = list(self._running)
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        await close_boxes(self._box)
