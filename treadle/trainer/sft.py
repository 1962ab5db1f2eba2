"""Supervised fine-tuning: one loop of steps, validation loss, checkpoints, resume and stop. Nothing is sampled.

A step is one optimizer update on the next `data.train_batch_size` rows, packed as every training step packs them.
Validation is the mean loss over all rows of `data.val_files`, at the same weights; the lowest one is the best
checkpoint. What waits for what: a step runs in a thread, the loop waits for it, and a stop waits for the step.
Invariant: a run that is interrupted and goes on has the weights of one that was not, on a CPU bit for bit.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from logging import getLogger
from math import exp
from typing import Any, Protocol

from treadle.checkpoint.links import VALIDATION_LOSS, CheckpointScore
from treadle.checkpoint.store import Checkpoints
from treadle.config import SFTRunConfig
from treadle.data.task_source import SourceState
from treadle.errors import NotFiniteError
from treadle.journal import Journal
from treadle.observe.step_metrics import Spans, add_up
from treadle.observe.trackers import Trackers
from treadle.policy.packed_inputs import flatten
from treadle.policy.protocol import Policy, TrainBatch
from treadle.trainer.recorder import RunView
from treadle.trainer.resume import RESUME, SAVED, RunHistory
from treadle.trainer.sft_data import SFTRows
from treadle.trainer.state import RunInterrupted, StopRequest
from treadle.types import Row

log = getLogger(__name__)

MAX_PERPLEXITY_LOSS = 700.0
"""Where e to the loss would overflow."""


class SFTView(RunView, Protocol):
    """Display of a run that has a loss in the place of rewards."""

    def on_validation_loss(self, step: int, loss: float) -> None: ...


@dataclass(frozen=True, slots=True)
class LossAfterStep:
    """Validation loss of the weights after a step."""

    step: int
    loss: float


class SFTTrainer:
    """One start of supervised fine-tuning."""

    def __init__(
        self,
        config: SFTRunConfig,
        policy: Policy,
        rows: SFTRows,
        validation: SFTRows | None,
        *,
        checkpoints: Checkpoints,
        journal: Journal,
        trackers: Trackers,
        view: SFTView,
        history: RunHistory,
    ) -> None:
        self._config = config
        self._policy = policy
        self._rows = rows
        self._validation = validation
        self._checkpoints = checkpoints
        self._journal = journal
        self._trackers = trackers
        self._view = view
        self._history = history
        self._stop = StopRequest()
        self._spans = Spans()
        self._saved: int | None = None
        self.step = 0
        """Steps that are finished."""
        self.began = 0
        """The step that this start went on from."""
        self.total_steps = config.total_steps(len(rows.source))
        self.validations: list[LossAfterStep] = []
        view.begin(self.total_steps)
        view.watch(lambda: self._spans.current)

    def request_stop(self) -> None:
        """End the run after the step under way."""
        self._stop.request()

    async def run(self) -> None:
        """Train to the end; RunInterrupted, with everything saved, where a stop is requested."""
        trainer = self._config.trainer
        resumed = await self._restore()
        if trainer.val_before_train and not resumed:
            await self._validate()
        while self.step < self.total_steps:
            await self._train()
            if trainer.test_freq > 0 and self.step % trainer.test_freq == 0 and self.step < self.total_steps:
                await self._validate()
            if self._checkpoints.is_due(self.step):
                await self._save()
            if self._stop.requested:
                await self._save()
                raise RunInterrupted
        if self.step > self.began or not resumed:
            await self._validate()
        await self._save()

    async def _train(self) -> None:
        began = time.perf_counter()
        epoch = self._rows.source.position / len(self._rows.source)
        rows = self._rows.take(self._config.data.train_batch_size)
        with self._spans("train"):
            found = await asyncio.to_thread(self._policy.train, make_batch(rows))
        self.step += 1
        measured = dict(found)
        measured["sft/loss"] = measured.pop("actor/pg_loss")
        if measured["sft/loss"] != measured["sft/loss"]:
            raise NotFiniteError(f"the loss of step {self.step} is not a number; lower actor.optim.lr")
        seconds = time.perf_counter() - began
        measured |= {
            "sft/rows": len(rows),
            "sft/epoch": epoch,
            "sft/tokens_per_s": measured["actor/tokens"] / max(seconds, 1e-9),
            **self._take_seconds(),
        }
        self._journal.add_event("step", step=self.step, version=self._policy.version, groups=[], positions=[])
        self._log(measured)
        self._view.on_step(self.step, measured)

    async def _validate(self) -> None:
        if self._validation is None:
            return
        rows = tuple(self._validation.rows.values())
        with self._spans("validation"):
            loss = await asyncio.to_thread(mean_loss, self._policy, rows)
        self.validations.append(LossAfterStep(self.step, loss))
        self._checkpoints.score(self.step, CheckpointScore(VALIDATION_LOSS, loss))
        self._log({VALIDATION_LOSS: loss, "validation/perplexity": exp(min(loss, MAX_PERPLEXITY_LOSS))})
        self._view.on_validation_loss(self.step, loss)

    def _log(self, metrics: Mapping[str, float]) -> None:
        self._journal.add_metrics(self.step, metrics)
        self._trackers.log(self.step, metrics)

    def _take_seconds(self) -> dict[str, float]:
        spans = self._spans.take()
        self._journal.add_event("spans", step=self.step, spans=[list(span) for span in spans])
        return {f"seconds/{name}": seconds for name, seconds in add_up(spans).items()}

    async def _restore(self) -> bool:
        """Go on from the newest checkpoint, if there is one; whether there was."""
        progress = await asyncio.to_thread(self._checkpoints.restore, self._policy, None)
        if progress is not None:
            state: Any = progress.state
            self.step = self.began = progress.step
            if self._config.checkpoint.resume_mode == "auto":
                self._saved = progress.step
                self._history.tell_lost_journal(progress.step)
            log.info("going on after step %d", progress.step)
            self._rows.source.restore(SourceState(**state["tasks"]))
            self._view.resume(progress.step)
        elif self._config.checkpoint.resume_mode == "auto":
            self._history.refuse_lost_checkpoints()
        self._journal.rewind(self.step)
        self._journal.add_event(RESUME, **self._describe(), settings=self._history.settings)
        return progress is not None

    async def _save(self) -> None:
        """A checkpoint of what is done, unless there is one already."""
        if self._saved == self.step:
            return
        with self._spans("checkpoint"):
            self._journal.add_event("checkpoint", **self._describe())
            await self._journal.flush()
            state = {"tasks": asdict(self._rows.source.state())}
            await asyncio.to_thread(self._checkpoints.save, self._policy, None, self.step, state)
        self._saved = self.step
        self._journal.add_event(SAVED, step=self.step)
        await self._journal.flush()
        log.info("saved a checkpoint after step %d", self.step)

    def _describe(self) -> dict[str, Any]:
        position = self._rows.source.position
        return {"step": self.step, "version": self._policy.version, "position": position, "open": []}


def make_batch(rows: Sequence[Row]) -> TrainBatch:
    """A batch in which every row is a group of its own."""
    numbers = tuple(range(len(rows)))
    return TrainBatch(tuple(rows), numbers, numbers, advantages_T=flatten("f", (row.mask for row in rows)))


def mean_loss(policy: Policy, rows: Sequence[Row]) -> float:
    """The mean negative logprob of all tokens that are learned."""
    logprobs_T = policy.logprobs(rows)
    mask_T = flatten("b", (row.mask for row in rows)).bool()
    return -float(logprobs_T[mask_T].double().mean())
