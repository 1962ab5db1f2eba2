"""The validations of a run: on the rollout that trains, or beside the steps where there is one for it.

Owns what is validated when, one validation at a time. What is drawn and counted is `evaluate.py`.
shared   nobody else samples: training waits until every validation task is done
beside   the step pushes its weights to the validator, and goes on; the next validation waits for this one
"""

import asyncio

from treadle.config.reward import RewardConfig
from treadle.observe.spans import Spans
from treadle.trainer.books import Books
from treadle.trainer.evaluate import Rollout, Validation, validate
from treadle.trainer.parts import Parts
from treadle.trainer.stop import Stop


class Validations:
    """See the module. `found` is in order of ending."""

    def __init__(self, parts: Parts, reward: RewardConfig, books: Books, spans: Spans, stop: Stop) -> None:
        self._parts = parts
        self._reward = reward
        self._books = books
        self._spans = spans
        self._stop = stop
        self._beside: asyncio.TaskGroup | None = None
        self._running: asyncio.Task[None] | None = None
        self.found: list[Validation] = []

    def start(self, beside: asyncio.TaskGroup) -> None:
        """From now on validations may go on as tasks of `beside`."""
        self._beside = beside

    def stop(self) -> None:
        """Begin no more of them beside the steps."""
        self._beside = None

    async def begin(self, step: int) -> None:
        """Validate without stalling the steps, where there is a rollout for it."""
        validator = self._parts.validator
        if validator is None or self._beside is None:
            return await self.finish(step)
        await self._wait()
        await self._parts.give(validator.push)
        self._running = self._beside.create_task(self._evaluate(validator.rollout, step))
        return None

    async def finish(self, step: int) -> None:
        """Validate the policy as it is, and wait for what is found."""
        await self._wait()
        validator = self._parts.validator
        if validator is not None:
            await self._parts.give(validator.push)
        rollout = self._parts.rollout if validator is None else validator.rollout
        with self._spans("validation"):
            await self._stop.unless(self._evaluate(rollout, step))

    async def _wait(self) -> None:
        """Wait for the validation that goes on beside the steps, if one does."""
        if self._running is not None and not self._running.done():
            with self._spans("validation"):
                await self._stop.unless(self._running)
        self._running = None

    async def _evaluate(self, rollout: Rollout, step: int) -> None:
        if not self._parts.validation_tasks:
            return
        with self._spans.beside("validating"):
            found = await validate(rollout, self._parts.validation_tasks, step, self._reward.success_threshold)
        self.found.append(found)
        self._books.write_validation(found)
