"""Which schedule, on which split of the GPUs: candidates, their forecasts, and the best of them.

Owns the search. Splits are chosen by arithmetic, near the points where training and generation take equally long with
engines at full, three quarters and half speed; then simulated. Every candidate gets the same work.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import log
from multiprocessing import get_context

from treadle.config import TrainConfig
from treadle.errors import ConfigError, Mistake
from treadle.trainer.simulation.assumptions import Assumptions
from treadle.trainer.simulation.forecast import Forecast
from treadle.trainer.simulation.setup import MODES, Mode, Setup, gpus_per_node
from treadle.trainer.simulation.simulation import simulate
from treadle.trainer.simulation.workload import MeanSession, Workload, expected_work

ENGINE_SPEEDS = (1.0, 0.75, 0.5)
"""How much of their full speed engines are taken to reach, for the splits that are tried."""

AS_GOOD = 1.03
"""Steps this much longer than the shortest count as equally good; then the least stale wins."""

WORTH_A_PROCESS = 100_000
"""Sessions from which it pays to simulate in several processes."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is compared: empty choices are filled in."""

    gpus: int
    modes: tuple[Mode, ...] = MODES
    splits: tuple[int, ...] = ()
    """GPUs that train."""
    staleness: tuple[int, ...] = ()
    """Bounds for fully_async."""
    steps: int = 8
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answers, in order of the question's modes, then by the GPUs that train."""

    question: Question
    forecasts: tuple[Forecast, ...]

    @property
    def best(self) -> Forecast:
        """The shortest step; of those nearly as short, the one with the youngest tokens."""
        shortest = min(found.step_s for found in self.forecasts)
        near = [found for found in self.forecasts if found.step_s <= AS_GOOD * shortest]
        return min(near, key=lambda found: (found.setup.lag, found.staleness_mean, found.step_s))

    @property
    def sync(self) -> Forecast | None:
        """What the others are measured against."""
        return next((found for found in self.forecasts if found.setup.mode == "sync"), None)


def compare(
    config: TrainConfig,
    assumptions: Assumptions,
    workload: Workload,
    question: Question,
    tell: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Simulate every candidate. `tell` hears what is being done."""
    filled = assumptions.fill(config.rollout)
    work = partial(simulate, config, filled, workload, steps=question.steps)
    splits = question.splits or choose_splits(config, filled, workload.mean, question.gpus)
    bounds = question.staleness or (config.trainer.max_staleness,)
    setups = list(candidates(question, splits, bounds))
    found = _simulate_all(config, question, work, setups, tell)
    if not question.staleness and "fully_async" in question.modes:
        best = min((item for item in found.values() if item.setup.mode == "fully_async"), key=lambda item: item.step_s)
        more = [
            Setup("fully_async", best.setup.train_gpus, best.setup.rollout_gpus, False, k) for k in _more(bounds[0])
        ]
        found |= _simulate_all(config, question, work, more, tell)
    ordered = sorted(found, key=lambda item: (MODES.index(item.mode), item.train_gpus, item.max_staleness))
    return Comparison(question, tuple(found[setup] for setup in ordered))


def candidates(question: Question, splits: Sequence[int], bounds: Sequence[int]) -> Iterable[Setup]:
    """Sync on all GPUs in turn; the others on each split."""
    gpus = question.gpus
    if "sync" in question.modes:
        yield Setup("sync", gpus, gpus, shared=True)
    for train_gpus in splits:
        if "one_step_off" in question.modes:
            yield Setup("one_step_off", train_gpus, gpus - train_gpus)
        if "fully_async" in question.modes:
            yield from (Setup("fully_async", train_gpus, gpus - train_gpus, False, bound) for bound in bounds)


def choose_splits(config: TrainConfig, assumptions: Assumptions, mean: MeanSession, gpus: int) -> tuple[int, ...]:
    """GPUs that train, in some splits that look balanced.

    The others divide over engines. Where there are several machines, each trains or samples as a whole if it can.
    """
    tp, node = config.rollout.tensor_model_parallel_size, gpus_per_node(config)
    possible = [count for count in range(1, gpus) if (gpus - count) % tp == 0]
    possible = [count for count in possible if count % node == 0] or possible
    if not possible:
        fix = f"at least 1 GPU trains and rollout.tensor_model_parallel_size = {tp} sample"
        raise ConfigError([Mistake("--gpus", f"{gpus} GPUs cannot be split", gpus, fix=fix)])
    work = expected_work(mean, assumptions, config)
    shares = [work.training / (work.training + work.generation / speed) for speed in ENGINE_SPEEDS]
    nearest = [min(possible, key=lambda count: abs(log(count / (share * gpus)))) for share in shares]
    return tuple(sorted(set(nearest)))


def _more(bound: int) -> tuple[int, ...]:
    return (2 * bound, 4 * bound) if bound else (1, 2)


def _simulate_all(
    config: TrainConfig,
    question: Question,
    work: Callable[[Setup], Forecast],
    setups: Sequence[Setup],
    tell: Callable[[str], None],
) -> dict[Setup, Forecast]:
    """One after the other, or in processes side by side; what comes out is the same."""
    sessions = len(setups) * question.steps * config.data.train_batch_size * config.rollout.n
    if question.processes == 1 or len(setups) == 1 or sessions < WORTH_A_PROCESS:
        return {setup: _told(work, setup, tell) for setup in setups}
    tell(f"simulating {len(setups)} ways to run")
    with ProcessPoolExecutor(min(question.processes, len(setups)), get_context("spawn")) as pool:
        return dict(zip(setups, pool.map(work, setups), strict=True))


def _told(work: Callable[[Setup], Forecast], setup: Setup, tell: Callable[[str], None]) -> Forecast:
    tell(f"simulating {setup}")
    return work(setup)
