"""The validations of a run: beside the steps, on engines of their own or on the rollout's; or alone on the rollout.

Owns what is validated when, one validation at a time. What is drawn and counted is `evaluate.py`.
alone    `sync`, and before and after training: training waits until every validation task is done
own      the step pushes its weights to the validator, and goes on; the next validation waits for this one
shared   it begins when the rollout's engines have the weights, and sampling and training go on; the next push waits for
         its end, so that one version is validated. An engine that was started again and waits for that push ends it:
         it begins once more after the push, with the weights of that one
Invariant: every token of a validation is sampled with the weights of the step it is recorded under.
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

    def __init__(
        self, parts: Parts, reward: RewardConfig, books: Books, spans: Spans, stop: Stop, *, overlaps: bool
    ) -> None:
        """`overlaps`: sampling and training go on side by side."""
        self._parts = parts
        self._reward = reward
        self._books = books
        self._spans = spans
        self._stop = stop
        self._beside: asyncio.TaskGroup | None = None
        self._overlaps = overlaps
        self._running: asyncio.Task[None] | None = None
        self._step = -1
        """What `_running` validates."""
        self._due = False
        """Whether the next weights that the rollout gets are to be validated."""
        self.found: list[Validation] = []

    def start(self, beside: asyncio.TaskGroup) -> None:
        """From now on validations may go on as tasks of `beside`."""
        self._beside = beside

    def stop(self) -> None:
        """Begin no more of them beside the steps."""
        self._beside = None

    async def begin(self, step: int, *, arrived: bool) -> None:
        """Validate without stalling the steps. `arrived`: the rollout's engines have the weights of this step."""
        validator = self._parts.validator
        if self._beside is None or (validator is None and not self._overlaps):
            await self.finish(step)
        elif validator is not None:
            await self._wait()
            await self._parts.give(validator.push)
            self._start(validator.rollout, step)
        elif arrived:
            await self._begin_shared(step)
        else:
            self._due = True

    async def hold(self) -> None:
        """Before a push to the rollout: wait for the validation that shares its engines, or end it (see the module)."""
        running = self._running
        if running is None or running.done() or self._parts.validator is not None:
            return
        wanted = asyncio.ensure_future(self._parts.weights_wanted())
        try:
            with self._spans("validation"):
                await self._stop.unless(asyncio.wait({running, wanted}, return_when=asyncio.FIRST_COMPLETED))
        finally:
            wanted.cancel()
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
            self._running, self._due = None, True

    async def after_push(self, step: int) -> None:
        """The rollout's engines have the weights of a step: validate them, if a validation waits for that."""
        if self._due and self._beside is not None:
            await self._begin_shared(step)

    async def _begin_shared(self, step: int) -> None:
        self._due = False
        if self._running is not None and self._step == step:
            return  # it began with the push
        await self._wait()
        self._start(self._parts.rollout, step)

    def _start(self, rollout: Rollout, step: int) -> None:
        assert self._beside is not None
        self._step = step
        self._running = self._beside.create_task(self._evaluate(rollout, step))

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
