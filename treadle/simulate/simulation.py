"""Simulator of a training run in virtual time, and the comparison of schedules and GPU splits.

A simulated run is the real schedule, buffer and rollout on a virtual clock, with a trainer that only takes time. Owns
what is measured, and when: after the run has settled, and before its end is in sight. Splits to compare are chosen by
arithmetic, near the points where training and generation take equally long with engines at full, three quarters and
half speed; then simulated. Every candidate gets the same work. Knows no command line.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil, log
from multiprocessing import get_context

from treadle.algorithm.kl import KLControl
from treadle.config import TrainConfig
from treadle.data.task_feed import TaskFeed
from treadle.data.task_source import TaskSource
from treadle.errors import ConfigError, Mistake
from treadle.observe.step_metrics import Spans
from treadle.observe.trackers import Trackers
from treadle.simulate import clock
from treadle.simulate.assumptions import Assumptions
from treadle.simulate.engine import ReplicaWork, TimedEngine, replica_speed
from treadle.simulate.forecast import (
    MODES,
    Forecast,
    Mode,
    ScheduleSetup,
    SessionTotals,
    StepMark,
    choose_max_sessions,
    count_replicas,
    derive_config,
    gpus_per_node,
    make_forecast,
)
from treadle.simulate.stand_ins import (
    CountingPolicy,
    NoCheckpoints,
    NoHistory,
    NoJournal,
    NoSender,
    TimedRollout,
    start_rollout,
)
from treadle.simulate.workload import MeanSession, Workload, expected_work
from treadle.trainer.schedules import SCHEDULES
from treadle.trainer.step import Learner, StepParts, StepReport
from treadle.trainer.trainer import Trainer
from treadle.types import Group, Row, Task
from treadle.weights.sync import WeightLock, WeightSync

HORIZON_S = 10 * 365 * 24 * 3600.0


def simulate(
    config: TrainConfig, assumptions: Assumptions, workload: Workload, setup: ScheduleSetup, *, steps: int = 8
) -> Forecast:
    """Run a schedule in virtual time, and say how at least `steps` of its steps went once it had settled."""
    simulated = _SimulatedRun(config, assumptions.fill(config.rollout), workload, setup, steps)
    with _uncollected():
        return clock.run(simulated.run(), horizon_s=HORIZON_S)


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
class MeasuredSteps:
    """Which steps are measured."""

    first: int
    last: int
    total: int

    @classmethod
    def of(cls, steps: int, max_staleness: int) -> "MeasuredSteps":
        """At least `steps`, after the run has settled and before it samples less because its end is near.

        With a bound of `max_staleness` steps come in rounds of one more: one waits for stragglers, the others go by
        quickly. Only whole rounds have a mean that means something.
        """
        settled, measured = 2 + 2 * max_staleness, ceil(steps / (max_staleness + 1)) * (max_staleness + 1)
        return cls(settled, settled + measured, settled + measured + (max_staleness + 1 if max_staleness else 0))


TakeStep = Callable[[Sequence[Group], KLControl | None], Awaitable[StepReport]]
"""A training step in the time that it is assumed to take."""


class _SimulatedRun:
    """One simulated run: trainer, engines and measurements."""

    def __init__(
        self, config: TrainConfig, assumptions: Assumptions, workload: Workload, setup: ScheduleSetup, steps: int
    ) -> None:
        self._window = MeasuredSteps.of(steps, setup.staleness_bound)
        self._given = config
        places = choose_max_sessions(config.rollout, assumptions, workload.mean, setup)
        self._config = derive_config(config, setup, places=places, steps=self._window.total)
        self._assumptions = assumptions
        self._setup = setup
        self._workload = workload
        self._policy = CountingPolicy()
        self._engines: list[TimedEngine] = []
        self._sessions = SessionTotals()
        self._marks: list[StepMark] = []

    async def run(self) -> Forecast:
        """The whole run."""
        async with AsyncExitStack() as stack:
            speed = replica_speed(self._assumptions, self._config.rollout)
            count, push_s = count_replicas(self._config.rollout, self._setup), self._assumptions.push_s
            overlap = self._assumptions.push_overlap or 0.0
            self._engines = [TimedEngine(f"replica-{at}", speed, push_s, overlap) for at in range(count)]
            metric = self._config.algorithm.filter_groups.metric
            rollout = start_rollout(self._config.rollout, self._engines, self._workload, metric, stack)
            await SCHEDULES[self._setup.mode](self._trainer(rollout))
        marks = self._marks[self._window.first - 1 : self._window.last]
        return make_forecast(self._setup, self._assumptions, self._given, speed, len(self._engines), marks)

    def _trainer(self, rollout: TimedRollout) -> Trainer:
        config, policy, weights = self._config, self._policy, WeightSync.of(self._config, NoSender())
        count = self._window.total * config.data.train_batch_size
        networks = StepParts(policy, config.actor, config.algorithm, config.trainer, reference=policy, critic=policy)
        return Trainer(
            config,
            learner=TimedLearner(self.train, networks, weights.lock),
            rollout=rollout,
            weights=weights,
            tasks=TaskFeed(TaskSource([Task(str(at), ()) for at in range(count)], shuffle=False, seed=0)),
            checkpoints=NoCheckpoints(),
            journal=NoJournal(),
            trackers=Trackers({}),
            view=self,
            history=NoHistory(),
            spans=Spans(asyncio.get_running_loop().time),
        )

    async def train(self, groups: Sequence[Group], control: KLControl | None) -> StepReport:
        """Take as long as the tokens do."""
        self._sessions.add(groups, self._policy.version, self._given.rollout.limits.session_timeout_s)
        tokens = sum(row.prompt_ids[0] + sum(row.ids) for group in groups for row in _rows(group))
        per_s = self._setup.train_gpus * self._assumptions.train_tokens_per_s
        await asyncio.sleep(tokens * self._config.actor.ppo_epochs / per_s)
        self._policy.version += 1
        control = control or KLControl.start(self._config.algorithm.kl_ctrl)
        return StepReport(self._policy.version, {}, control)

    def begin(self, total_steps: int) -> None: ...

    def watch(self, phase: Callable[[], str]) -> None: ...

    def resume(self, step: int) -> None: ...

    def on_validation(self, step: int, success: float) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over: note where everything stands."""
        work = sum((engine.work() for engine in self._engines), ReplicaWork())
        seconds = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("seconds/")}
        now = asyncio.get_running_loop().time()
        last = self._marks[-1].seconds if self._marks else {}
        total = {name: last.get(name, 0.0) + seconds.get(name, 0.0) for name in {*last, *seconds}}
        self._marks.append(StepMark(step, now, work, total, self._sessions.note()))


class TimedLearner(Learner):
    """Learner whose steps `take_step` makes: they only take time."""

    def __init__(self, take_step: TakeStep, parts: StepParts, lock: WeightLock) -> None:
        super().__init__(parts, lock)
        self._take_step = take_step

    async def train(
        self,
        groups: Sequence[Group],
        *,
        step: int,
        control: KLControl | None,
        baselines: Sequence[float | None] | None,
    ) -> StepReport:
        return await self._take_step(groups, control)


def _rows(group: Group) -> list[Row]:
    return [row for trajectory in group.survivors for row in trajectory.rows]


ENGINE_SPEEDS = (1.0, 0.75, 0.5)
"""How much of their full speed engines are taken to reach, for the splits that are tried."""

AS_GOOD = 1.03
"""Steps this much longer than the shortest count as equally good; then the least stale wins."""

WORTH_A_PROCESS = 100_000
"""Sessions from which it pays to simulate in several processes."""


@dataclass(frozen=True, slots=True)
class ComparisonSpec:
    """What is compared: empty choices are filled in."""

    gpus: int
    modes: tuple[Mode, ...] = MODES
    splits: tuple[int, ...] = ()
    """GPUs that train."""
    staleness: tuple[int, ...] = ()
    """Bounds for fully_async."""
    steps: int = 8
    processes: int = 1

    @property
    def needs_split(self) -> bool:
        """Whether a schedule is among them in which some GPUs train and others sample."""
        return self.modes != ("sync",)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Forecasts of a comparison, in order of its modes, then by the GPUs that train."""

    spec: ComparisonSpec
    forecasts: tuple[Forecast, ...]

    @property
    def best(self) -> Forecast:
        """The shortest step; of those nearly as short, the one with the youngest tokens."""
        shortest = min(found.step_s for found in self.forecasts)
        near = [found for found in self.forecasts if found.step_s <= AS_GOOD * shortest]
        return min(near, key=lambda found: (found.setup.staleness_bound, found.staleness_mean, found.step_s))

    @property
    def sync(self) -> Forecast | None:
        """What the others are measured against."""
        return next((found for found in self.forecasts if found.setup.mode == "sync"), None)


def compare(
    config: TrainConfig,
    assumptions: Assumptions,
    workload: Workload,
    spec: ComparisonSpec,
    report_progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Simulate every candidate. `report_progress` is called with a line before each of them."""
    filled = assumptions.fill(config.rollout)
    work = partial(simulate, config, filled, workload, steps=spec.steps)
    splits = spec.splits
    if spec.needs_split and not splits:
        splits = choose_splits(config, filled, workload.mean, spec.gpus)
    bounds = spec.staleness or (config.trainer.max_staleness,)
    setups = list(candidates(spec, splits, bounds))
    found = _simulate_all(config, spec, work, setups, report_progress)
    if not spec.staleness and "fully_async" in spec.modes:
        best = min((item for item in found.values() if item.setup.mode == "fully_async"), key=lambda item: item.step_s)
        more = [
            ScheduleSetup("fully_async", best.setup.train_gpus, best.setup.rollout_gpus, False, k)
            for k in _more(bounds[0])
        ]
        found |= _simulate_all(config, spec, work, more, report_progress)
    ordered = sorted(found, key=lambda item: (MODES.index(item.mode), item.train_gpus, item.max_staleness))
    return Comparison(spec, tuple(found[setup] for setup in ordered))


def candidates(spec: ComparisonSpec, splits: Sequence[int], bounds: Sequence[int]) -> Iterable[ScheduleSetup]:
    """Sync on all GPUs in turn; the others on each split."""
    gpus = spec.gpus
    if "sync" in spec.modes:
        yield ScheduleSetup("sync", gpus, gpus, shared=True)
    for train_gpus in splits:
        if "one_step_off" in spec.modes:
            yield ScheduleSetup("one_step_off", train_gpus, gpus - train_gpus)
        if "fully_async" in spec.modes:
            yield from (ScheduleSetup("fully_async", train_gpus, gpus - train_gpus, False, bound) for bound in bounds)


def choose_splits(config: TrainConfig, assumptions: Assumptions, mean: MeanSession, gpus: int) -> tuple[int, ...]:
    """GPUs that train, in some splits that look balanced.

    The others divide over engines. Where there are several machines, each trains or samples as a whole if it can.
    """
    tp, node = config.rollout.tensor_model_parallel_size, gpus_per_node(config)
    possible = [count for count in range(1, gpus) if (gpus - count) % tp == 0]
    possible = [count for count in possible if count % node == 0] or possible
    if not possible:
        fix = f"at least 1 GPU trains and rollout.tensor_model_parallel_size = {tp} sample; or --modes sync, in turn"
        raise ConfigError([Mistake("--gpus", f"{gpus} GPUs cannot be split", gpus, fix=fix)])
    work = expected_work(mean, assumptions, config)
    shares = [work.training / (work.training + work.generation / speed) for speed in ENGINE_SPEEDS]
    nearest = [min(possible, key=lambda count: abs(log(count / (share * gpus)))) for share in shares]
    return tuple(sorted(set(nearest)))


def _more(bound: int) -> tuple[int, ...]:
    return (2 * bound, 4 * bound) if bound else (1, 2)


def _simulate_all(
    config: TrainConfig,
    spec: ComparisonSpec,
    work: Callable[[ScheduleSetup], Forecast],
    setups: Sequence[ScheduleSetup],
    report_progress: Callable[[str], None],
) -> dict[ScheduleSetup, Forecast]:
    """One after the other, or in processes side by side; what comes out is the same."""
    sessions = len(setups) * spec.steps * config.data.train_batch_size * config.rollout.n
    if spec.processes == 1 or len(setups) == 1 or sessions < WORTH_A_PROCESS:
        return {setup: _simulate_one(work, setup, report_progress) for setup in setups}
    report_progress(f"simulating {len(setups)} ways to run")
    with ProcessPoolExecutor(min(spec.processes, len(setups)), get_context("spawn")) as pool:
        return dict(zip(setups, pool.map(work, setups), strict=True))


def _simulate_one(
    work: Callable[[ScheduleSetup], Forecast], setup: ScheduleSetup, report_progress: Callable[[str], None]
) -> Forecast:
    report_progress(f"simulating {setup}")
    return work(setup)
