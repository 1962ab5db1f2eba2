"""The rollout itself: engines, workers, scorer and dispatcher, started together and closed together.

Everything here lives on one event loop, the manager's. Owns the order of starting and closing; a part that cannot start
takes down the ones before it.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Self

from treadle.config import ModelConfig, RewardConfig, RolloutConfig
from treadle.data.renderer import Renderer
from treadle.engine.protocol import Engine
from treadle.engine.router import Router
from treadle.journal import Journal
from treadle.observe import StallReport, StallWatch, Wait
from treadle.reward.scorer import Scorer
from treadle.rollout.dispatch import Dispatcher, Observer, Order, first_error
from treadle.rollout.engines import start_engines
from treadle.rollout.feed import Feed
from treadle.rollout.process import ProcessWorker
from treadle.rollout.worker import AgentLoopWorker, Dropped
from treadle.types import Batch, SamplingParams, Task, Trajectory


class Kind(StrEnum):
    """What a call samples for."""

    TRAINING = "training"
    """As `rollout` says."""
    VALIDATION = "validation"
    """As `rollout.val_kwargs` says."""
    GREEDY = "greedy"
    """One sample at temperature 0, as a baseline."""


def print_stall(report: StallReport) -> None:
    """The default place for stall reports: standard error."""
    print(report.text(), file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a caller may bring instead of having it built from the config."""

    engines: Sequence[Engine] | Callable[[], Awaitable[Sequence[Engine]]] | None = None
    """Engines, or what starts them on the rollout's own loop."""
    renderer: Renderer | None = None
    journal: Journal | None = None
    observers: Sequence[Observer] = ()
    on_stall: Callable[[StallReport], None] = print_stall
    api_key: str | None = None


class RolloutService:
    """Started by `start`, whole; the constructor only holds."""

    def __init__(
        self,
        rollout: RolloutConfig,
        renderer: Renderer,
        router: Router,
        dispatcher: Dispatcher,
        watch: StallWatch,
        journal: Journal | None,
        parts: AsyncExitStack,
    ) -> None:
        self._rollout = rollout
        self._renderer = renderer
        self.router = router
        self._dispatcher = dispatcher
        self._watch = watch
        self._journal = journal
        self._parts = parts
        self._running: set[asyncio.Task[object]] = set()

    @classmethod
    async def start(cls, rollout: RolloutConfig, model: ModelConfig, reward: RewardConfig | None, parts: Parts) -> Self:
        """Start every part, or none."""
        async with AsyncExitStack() as started:
            renderer = parts.renderer
            if renderer is None:
                renderer = await asyncio.to_thread(Renderer.create, model)
            _tell_differences(renderer, parts.journal)
            engines = await _start_engines(rollout, model, renderer, parts)
            router = Router(engines, limits=rollout.limits, failures=rollout.failures, rng=random.Random(rollout.seed))
            started.push_async_callback(router.close)
            workers = await _start_workers(rollout, model, renderer, router, started)
            scorer = None
            if reward is not None and reward.functions:
                scorer = await Scorer.create(reward)
                started.push_async_callback(scorer.close)
            dispatcher = Dispatcher(rollout, workers, scorer, parts.journal, parts.observers, router.forget)
            report = partial(_report_stall, parts)
            watch = StallWatch(rollout.limits.stall_report_s, lambda: _waits(workers, router), report)
            return cls(rollout, renderer, router, dispatcher, watch, parts.journal, started.pop_all())

    async def generate(self, tasks: Sequence[Task], kind: Kind, seed: int | None = None) -> Batch:
        """Sample every task."""
        async with self._watched():
            return await self._dispatcher.generate(tasks, self._order(kind, seed=seed))

    async def stream(
        self,
        tasks: Sequence[Task],
        kind: Kind,
        done: Container[tuple[str, int]],
        feed: Feed[Trajectory | Dropped],
    ) -> None:
        """Sample every task into `feed`."""
        async with self._watched():
            await self._dispatcher.stream(tasks, self._order(kind, done), feed)

    async def close(self) -> None:
        """End what is running, then close every part, last started first."""
        running = [task for task in self._running if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=self._rollout.limits.close_timeout_s)
        await self._parts.aclose()

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Count a call as running; meanwhile report stalls, and end it if the journal can no longer be written."""
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        self._running.add(task)
        try:
            with first_error():
                async with asyncio.TaskGroup() as group:
                    watchers = [group.create_task(self._watch.run())]
                    if self._journal is not None:
                        watchers.append(group.create_task(self._journal.watch()))
                    yield
                    for watcher in watchers:
                        watcher.cancel()
        finally:
            self._running.discard(task)

    def _order(self, kind: Kind, done: Container[tuple[str, int]] = (), seed: int | None = None) -> Order:
        rollout = self._rollout
        source = rollout.val_kwargs if kind is Kind.VALIDATION else rollout
        sampling = SamplingParams(
            max_tokens=rollout.response_length,
            temperature=0.0 if kind is Kind.GREEDY else source.temperature,
            top_p=source.top_p,
            top_k=source.top_k,
            stop_token_ids=() if rollout.ignore_eos else self._renderer.stop_token_ids,
            seed=rollout.seed if seed is None else seed,
        )
        return Order(sampling, 1 if kind is Kind.GREEDY else source.n, done)


async def _start_engines(
    rollout: RolloutConfig, model: ModelConfig, renderer: Renderer, parts: Parts
) -> Sequence[Engine]:
    if parts.engines is None:
        return await start_engines(rollout, model, renderer, parts.api_key)
    return await parts.engines() if callable(parts.engines) else parts.engines


async def _start_workers(
    rollout: RolloutConfig, model: ModelConfig, renderer: Renderer, router: Router, started: AsyncExitStack
) -> list[AgentLoopWorker | ProcessWorker]:
    """One worker here, or several in processes of their own."""
    workers: list[AgentLoopWorker | ProcessWorker] = []
    if rollout.agent.num_workers == 1:
        workers.append(await AgentLoopWorker.create(rollout=rollout, model=model, engine=router, renderer=renderer))
        started.push_async_callback(workers[0].close)
        return workers
    for number in range(rollout.agent.num_workers):
        worker = await ProcessWorker.create(rollout=rollout, model=model, engine=router, name=f"agent worker {number}")
        started.push_async_callback(worker.close)
        workers.append(worker)
    return workers


def _tell_differences(renderer: Renderer, journal: Journal | None) -> None:
    """Where turn by turn and all at once give other ids, say so at the start: people compare with other tools."""
    proof = renderer.proof
    if journal is not None:
        journal.add_event("rendering", proof=str(proof), differences=len(proof.differences))
    if proof.differences:
        print(f"note: turn by turn, the chat template gives other ids than all at once:\n{proof}", file=sys.stderr)


def _report_stall(parts: Parts, report: StallReport) -> None:
    parts.on_stall(report)
    if parts.journal is not None:
        parts.journal.add_event("stall", **report.fields())


def _waits(workers: Sequence[AgentLoopWorker | ProcessWorker], router: Router) -> Iterator[Wait]:
    """What each open session waits for; for those that generate, the router knows on which replica."""
    replicas = {flight.session: flight.replica for flight in router.flights()}
    for worker in workers:
        for wait in worker.waits():
            server = replicas.get(f"{wait.uid}/{wait.sample}")
            yield wait if server is None else replace(wait, server=server)
