"""Trainer parts: the objects that a runtime supplies and a trainer uses; and the request to stop.

Owns the record that a runtime fills. Knows no schedule, and starts nothing.
Stop: a long wait ends where a stop is requested first (`unless`); work that may not be interrupted looks at `requested`
afterwards. A stop is never taken back.
"""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from treadle.algorithm.kl import KLControl
from treadle.checkpoint.store import Checkpoints
from treadle.data.tasks import TaskSource
from treadle.errors import Failure, RunError
from treadle.journal import Journal
from treadle.observe.trackers import Trackers
from treadle.rollout.provenance import RunInputs
from treadle.terminal import warn
from treadle.trainer.resume import RunHistory
from treadle.trainer.step import StepParts, StepReport, train_step
from treadle.trainer.validation import Rollout
from treadle.types import Group, Task
from treadle.weights.sync import PushReport

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


PushWeights = Callable[[int], Awaitable[PushReport]]

TrainStep = Callable[[Sequence[Group], int, KLControl | None, Sequence[float | None] | None], Awaitable[StepReport]]
"""Trains on groups, as a step, with the weight of KL and the baselines that the step needs."""


async def never() -> None:
    """Waits until cancelled."""
    await asyncio.get_running_loop().create_future()


class RunView(Protocol):
    """Display of a run's progress."""

    def watch(self, phase: Callable[[], str]) -> None: ...

    def resume(self, step: int) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def on_validation(self, step: int, success: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Validator:
    """A rollout with weights of its own: validation keeps to one version there while training goes on."""

    rollout: Rollout
    push: PushWeights


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """The objects of a run, filled in by a runtime."""

    step: StepParts
    rollout: Rollout
    push: PushWeights
    tasks: TaskSource
    validation_tasks: Sequence[Task]
    checkpoints: Checkpoints
    journal: Journal
    trackers: Trackers
    view: RunView
    lineage: RunHistory
    """What earlier starts of this run left."""
    train: TrainStep
    """One step; `train_in_thread` but where time is simulated."""
    inputs: RunInputs | None = None
    """What this start's trajectories are made from."""
    validator: Validator | None = None
    """None: validation shares the rollout's engines."""
    watch: Callable[[], Awaitable[None]] | None = None
    """Runs until cancelled; raises when a process dies, also one that no call waits for."""
    needs_push: Callable[[], Awaitable[None]] = never
    """Waits until an engine needs the next push to continue."""

    @property
    def version(self) -> int:
        """The policy's version."""
        return self.step.policy.version

    async def push_weights(self, push: PushWeights) -> PushReport:
        """Push the policy's weights. A failed push ends the run; it fails no trajectory."""
        try:
            return await push(self.version)
        except Failure as failure:
            raise RunError(str(failure)) from failure


async def train_in_thread(
    parts: StepParts,
    groups: Sequence[Group],
    step: int,
    control: KLControl | None,
    baselines: Sequence[float | None] | None,
) -> StepReport:
    """A step that leaves the loop free."""
    return await asyncio.to_thread(train_step, parts, groups, step=step, control=control, baselines=baselines)
