"""Trainer state: what a checkpoint holds beside the networks, how a later start restores it; and the request to stop.

Owns the step that was reached, the KL coefficient, and what is reused of the tasks that were open. The networks save
themselves, through `Checkpoints`.
Invariant: what a checkpoint follows from is in the journal, on disk, before it.
Stop: a long wait ends where a stop is requested first (`unless`); work that may not be interrupted looks at `requested`
afterwards. A stop is never taken back.
"""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from logging import getLogger
from typing import Any, TypeVar

from treadle.algorithm.kl import KLControl
from treadle.checkpoint.store import Checkpoints, Progress
from treadle.config import TrainConfig
from treadle.data.task_feed import TaskFeed
from treadle.journal import Journal
from treadle.rollout.completion_log import RecoveredTask
from treadle.terminal import warn
from treadle.trainer.buffer import RolloutBuffer
from treadle.trainer.recorder import RunView
from treadle.trainer.resume import RESUME, SAVED, RunHistory
from treadle.trainer.step import Learner
from treadle.types import Task

log = getLogger(__name__)

T = TypeVar("T")


class RunInterrupted(Exception):
    """The run was requested to stop; all finished steps are saved."""


class StopRequest:
    """A request to stop the run; never withdrawn."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._requests = 0

    def request(self) -> None:
        """Stop when nothing is lost by it. After a second request, one more Ctrl-C ends the process at once."""
        self._event.set()
        self._requests += 1
        if self._requests == 2 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            warn("asked to stop again: the run saves what it has; once more ends it at once")

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    async def unless(self, work: Awaitable[T]) -> T:
        """The result of `work`; RunInterrupted, and `work` cancelled to its end, where a stop is requested first."""
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise RunInterrupted
        finally:
            stopping.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working})


class TrainerState:
    """Trainer state (see the module). `step` counts finished steps; `control` is the weight of KL for the next one."""

    def __init__(
        self,
        config: TrainConfig,
        learner: Learner,
        tasks: TaskFeed,
        buffer: RolloutBuffer,
        *,
        checkpoints: Checkpoints,
        journal: Journal,
        history: RunHistory,
        view: RunView,
    ) -> None:
        self._config = config
        self._learner = learner
        self._tasks = tasks
        self._buffer = buffer
        self._checkpoints = checkpoints
        self._journal = journal
        self._history = history
        self._view = view
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
        networks, history = self._learner.parts, self._history
        progress = await asyncio.to_thread(
            self._checkpoints.restore, networks.policy, networks.critic, networks.reference
        )
        state: Mapping[str, Any] = {} if progress is None else progress.state
        if progress is not None:
            self._resume(progress)
            if self._config.checkpoint.resume_mode == "auto":
                history.tell_lost_journal(progress.step)
        elif self._config.checkpoint.resume_mode == "auto":
            history.refuse_lost_checkpoints()
        self._journal.rewind(self.step)
        self._restored = self._learner.version
        self._buffer.restore(self.step, tuple(state.get("open", ())), self._recover)
        if aside := history.newly_set_aside:
            log.warning(
                "the last start ended by numbers that were not finite: the samples of that batch, %d tasks such as %s, "
                "are set aside and drawn again",
                len(aside),
                aside[0],
            )
        self._journal.add_event(RESUME, **self.describe(), settings=history.settings)
        return progress is not None

    async def save(self) -> None:
        """A checkpoint of what is done, unless there is one already."""
        if self._saved == self.step:
            return
        where, networks = self.describe(), self._learner.parts
        coefficient = None if self.control is None else self.control.coefficient
        state = {"tasks": self._buffer.frontier(), "open": where["open"], "kl_coefficient": coefficient}
        self._journal.add_event("checkpoint", **where)
        await self._journal.flush()
        await asyncio.to_thread(
            self._checkpoints.save,
            networks.policy,
            networks.critic,
            self.step,
            state,
            reference=networks.reference,
        )
        self._saved = self.step
        self._journal.add_event(SAVED, step=self.step)
        log.info("saved a checkpoint after step %d", self.step)

    def describe(self) -> dict[str, Any]:
        """The step, the policy, the next new task, the tasks that are under way, and the books of a sampler."""
        open_, position = list(self._buffer.open_positions), self._tasks.position
        where = {"step": self.step, "version": self._learner.version, "position": position, "open": open_}
        return {**where, **self._tasks.books()}

    def _resume(self, progress: Progress) -> None:
        state: Any = progress.state
        self.step = self.began = progress.step
        if self._config.checkpoint.resume_mode == "auto":
            self._saved = progress.step
        log.info("going on after step %d", progress.step)
        self._tasks.restore(state["tasks"])
        if state["kl_coefficient"] is not None:
            start = KLControl.start(self._config.algorithm.kl_ctrl)
            self.control = replace(start, coefficient=state["kl_coefficient"])
        self._view.resume(progress.step)

    def _recover(self, task: Task, oldest: int) -> RecoveredTask:
        """What earlier starts left of a task, as far as this run still has the weights, and tokens are young enough."""
        return self._history.recover(task, task.n or self._config.rollout.n, version=self._restored, oldest=oldest)
