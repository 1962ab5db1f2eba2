"""One simulated training run: the real schedule, flow and rollout, on a clock that jumps.

Owns the trainer that only takes time, what is measured, and when: after the run has settled, and before its end is in
sight. Knows no command line, and compares nothing.
"""

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil

from treadle.algorithm.kl import KLControl
from treadle.config import TrainConfig
from treadle.data.tasks import TaskSource
from treadle.engine.protocol import WeightUpdate
from treadle.observe.spans import Spans
from treadle.observe.trackers import Trackers
from treadle.trainer.parts import Parts
from treadle.trainer.run import Run
from treadle.trainer.schedules import SCHEDULES
from treadle.trainer.simulation import clock
from treadle.trainer.simulation.assumptions import Assumptions
from treadle.trainer.simulation.engine import TimedEngine, Work, replica_speed
from treadle.trainer.simulation.forecast import Forecast, Mark, Sessions, forecast
from treadle.trainer.simulation.rollout import TimedRollout, start_rollout
from treadle.trainer.simulation.setup import Setup, choose_places, count_replicas, derive
from treadle.trainer.simulation.standins import CountingPolicy, NoCheckpoints, NoJournal, NoLineage
from treadle.trainer.simulation.workload import Workload
from treadle.trainer.step import StepParts, StepReport
from treadle.types import Group, Row, Task
from treadle.weights.push import PushReport

HORIZON_S = 10 * 365 * 24 * 3600.0


def simulate(
    config: TrainConfig, assumptions: Assumptions, workload: Workload, setup: Setup, *, steps: int = 8
) -> Forecast:
    """Run a schedule in virtual time, and say how at least `steps` of its steps went once it had settled."""
    stage = _Stage(config, assumptions.fill(config.rollout), workload, setup, steps)
    with _uncollected():
        return clock.run(stage.play(), horizon_s=HORIZON_S)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the cycle collector: it would walk every open session again and again, for half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Window:
    """Which steps are measured."""

    first: int
    last: int
    total: int

    @classmethod
    def of(cls, steps: int, lag: int) -> "Window":
        """At least `steps`, after the run has settled and before it samples less because its end is near.

        With a bound of `lag` steps come in rounds of lag + 1: one waits for stragglers, the others go by quickly. Only
        whole rounds have a mean that means something.
        """
        settled, measured = 2 + 2 * lag, ceil(steps / (lag + 1)) * (lag + 1)
        return cls(settled, settled + measured, settled + measured + (lag + 1 if lag else 0))


class _Stage:
    """The parts of one simulated run, and what they noted."""

    def __init__(
        self, config: TrainConfig, assumptions: Assumptions, workload: Workload, setup: Setup, steps: int
    ) -> None:
        self._window = Window.of(steps, setup.lag)
        self._given = config
        places = choose_places(config.rollout, assumptions, workload.mean, setup)
        self._config = derive(config, setup, places=places, steps=self._window.total)
        self._assumptions = assumptions
        self._setup = setup
        self._workload = workload
        self._policy = CountingPolicy()
        self._engines: list[TimedEngine] = []
        self._sessions = Sessions()
        self._marks: list[Mark] = []

    async def play(self) -> Forecast:
        """The whole run."""
        async with AsyncExitStack() as stack:
            speed = replica_speed(self._assumptions, self._config.rollout)
            count, push_s = count_replicas(self._config.rollout, self._setup), self._assumptions.push_s
            self._engines = [TimedEngine(f"replica-{at}", speed, push_s) for at in range(count)]
            metric = self._config.algorithm.filter_groups.metric
            rollout = start_rollout(self._config.rollout, self._engines, self._workload, metric, stack)
            run = Run(self._config, self._parts(rollout), Spans(asyncio.get_running_loop().time))
            await SCHEDULES[self._setup.mode](run)
        marks = self._marks[self._window.first - 1 : self._window.last]
        return forecast(self._setup, self._assumptions, self._given, speed, len(self._engines), marks)

    def _parts(self, rollout: TimedRollout) -> Parts:
        config, policy = self._config, self._policy
        count = self._window.total * config.data.train_batch_size
        step = StepParts(policy, config.actor, config.algorithm, config.trainer, reference=policy, critic=policy)
        return Parts(
            step=step,
            rollout=rollout,
            push=partial(self._push, rollout),
            tasks=TaskSource([Task(str(at), ()) for at in range(count)], shuffle=False, seed=0),
            validation_tasks=(),
            checkpoints=NoCheckpoints(),
            journal=NoJournal(),
            trackers=Trackers({}),
            view=self,
            lineage=NoLineage(),
            train=self._train,
        )

    async def _push(self, rollout: TimedRollout, version: int) -> PushReport:
        running = self._config.trainer.on_weight_update
        checksum = await rollout.service.update_weights(WeightUpdate(version, str(version), {}), running)
        return PushReport(version, checksum, 0, 0.0, 0.0)

    async def _train(
        self, groups: Sequence[Group], step: int, control: KLControl | None, baselines: Sequence[float | None] | None
    ) -> StepReport:
        """Take as long as the tokens do."""
        self._sessions.add(groups, self._policy.version, self._given.rollout.limits.session_timeout_s)
        tokens = sum(row.prompt_ids[0] + sum(row.ids) for group in groups for row in _rows(group))
        per_s = self._setup.train_gpus * self._assumptions.train_tokens_per_s
        await asyncio.sleep(tokens * self._config.actor.ppo_epochs / per_s)
        self._policy.version += 1
        control = control or KLControl.start(self._config.algorithm.kl_ctrl)
        return StepReport(self._policy.version, {}, control)

    def watch(self, phase: Callable[[], str]) -> None: ...

    def resume(self, step: int) -> None: ...

    def on_validation(self, step: int, success: float) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over: note where everything stands."""
        work = sum((engine.work() for engine in self._engines), Work())
        seconds = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("seconds/")}
        now = asyncio.get_running_loop().time()
        last = self._marks[-1].seconds if self._marks else {}
        total = {name: last.get(name, 0.0) + seconds.get(name, 0.0) for name in {*last, *seconds}}
        self._marks.append(Mark(step, now, work, total, self._sessions.note()))


def _rows(group: Group) -> list[Row]:
    return [row for trajectory in group.survivors for row in trajectory.rows]
