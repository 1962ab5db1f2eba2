"""Trainer state: what a checkpoint holds beside the networks, and how a later start restores it.

Owns the step that was reached, the KL coefficient, and what is reused of the tasks that were open. The networks save
themselves, through `Checkpoints`.
Invariant: what a checkpoint follows from is in the journal, on disk, before it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, replace
from logging import getLogger
from typing import Any

from treadle.algorithm.kl import KLControl
from treadle.checkpoint.store import Progress
from treadle.config import TrainConfig
from treadle.data.tasks import SourceState
from treadle.rollout.completion_log import RecoveredTask
from treadle.trainer.buffer import RolloutBuffer
from treadle.trainer.parts import TrainerParts
from treadle.trainer.resume import RESUME, SAVED, UNKNOWN_PROVENANCE
from treadle.trainer.terms import settings_digest
from treadle.types import Task

log = getLogger(__name__)


class TrainerState:
    """Trainer state (see the module). `step` counts finished steps; `control` is the weight of KL for the next one."""

    def __init__(self, config: TrainConfig, parts: TrainerParts, buffer: RolloutBuffer) -> None:
        self._config = config
        self._parts = parts
        self._buffer = buffer
        self._restored = 0
        """The version that this start began with."""
        self._saved: int | None = None
        """The step of the newest checkpoint in the run directory, as far as this start knows."""
        self.step = 0
        self.began = 0
        """The step that this start went on from."""
        self.control: KLControl | None = None

    async def restore(self) -> bool:
        """Go on from the newest checkpoint, if there is one; whether there was."""
        parts = self._parts
        step = parts.step
        progress = await asyncio.to_thread(parts.checkpoints.restore, step.policy, step.critic, step.reference)
        state: Mapping[str, Any] = {} if progress is None else progress.state
        if progress is not None:
            self._resume(progress)
        elif self._config.checkpoint.resume_mode == "auto":
            parts.lineage.refuse_lost_checkpoints()
        parts.journal.rewind(self.step)
        self._restored = parts.version
        self._buffer.restore(self.step, tuple(state.get("open", ())), self._past)
        if aside := parts.lineage.newly_set_aside:
            log.warning(
                "the last start ended by numbers that were not finite: the samples of that batch, %d tasks such as %s, "
                "are set aside and drawn again",
                len(aside),
                aside[0],
            )
        parts.journal.add_event(RESUME, **self.describe(), settings=settings_digest(self._config, parts.inputs))
        return progress is not None

    async def save(self) -> None:
        """A checkpoint of what is done, unless there is one already."""
        if self._saved == self.step:
            return
        parts, where = self._parts, self.describe()
        coefficient = None if self.control is None else self.control.coefficient
        state = {"tasks": asdict(self._buffer.frontier()), "open": where["open"], "kl_coefficient": coefficient}
        parts.journal.add_event("checkpoint", **where)
        await parts.journal.flush()
        step = parts.step
        await asyncio.to_thread(
            parts.checkpoints.save, step.policy, step.critic, self.step, state, reference=step.reference
        )
        self._saved = self.step
        parts.journal.add_event(SAVED, step=self.step)
        log.info("saved a checkpoint after step %d", self.step)

    def describe(self) -> dict[str, Any]:
        """The step, the policy, the next new task, and the tasks that are under way."""
        open_, position = list(self._buffer.open_positions), self._parts.tasks.position
        return {"step": self.step, "version": self._parts.version, "position": position, "open": open_}

    def _resume(self, progress: Progress) -> None:
        state: Any = progress.state
        self.step = self.began = progress.step
        if self._config.checkpoint.resume_mode == "auto":
            self._saved = progress.step
        log.info("going on after step %d", progress.step)
        self._parts.tasks.restore(SourceState(**state["tasks"]))
        if state["kl_coefficient"] is not None:
            start = KLControl.start(self._config.algorithm.kl_ctrl)
            self.control = replace(start, coefficient=state["kl_coefficient"])
        self._parts.view.resume(progress.step)

    def _past(self, task: Task, oldest: int) -> RecoveredTask:
        """What earlier starts left of a task, as far as this run still has the weights, and tokens are young enough."""
        n = task.n or self._config.rollout.n
        inputs = self._parts.inputs
        made_from = UNKNOWN_PROVENANCE if inputs is None else inputs.stamp(task, validation=False)
        return self._parts.lineage.past(task.uid, n, version=self._restored, oldest=oldest, made_from=made_from)
