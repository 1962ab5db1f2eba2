"""Rollout service: engines, router, workers, scorer and dispatcher, started together and closed together.

Runs on one event loop, the manager's. Owns the order of starting and closing; a part that cannot start closes the ones
started before it.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Self

from treadle.aio import BoundedBuffer, first_error
from treadle.config import ModelConfig, RewardConfig, RolloutConfig
from treadle.config.training import OnWeightUpdate
from treadle.data.renderer import Renderer
from treadle.engine.protocol import Engine, Gpu, TokenGenerator, WeightUpdate
from treadle.engine.requests import AnswerCheck
from treadle.engine.router import Router
from treadle.journal import Journal
from treadle.model.tokenizer import read_vocabulary_size
from treadle.observe import StallReport, StallWatchdog, Wait
from treadle.reward.context import RewardContext
from treadle.reward.scorer import Scorer
from treadle.rollout.completion_log import CompletionLog, RecoveredTask
from treadle.rollout.dispatch import Dispatcher, FindUnscored, RolloutRequest, no_trajectory
from treadle.rollout.engines import start_engines
from treadle.rollout.protocol import (
    Dropped,
    ManagedScorer,
    ManagedWorker,
    ReplicaMonitor,
    RolloutObserver,
)
from treadle.rollout.provenance import RunInputs
from treadle.rollout.remote_worker import RemoteAgentWorker, num_processes
from treadle.rollout.startup_checks import check_template
from treadle.rollout.worker import AgentLoopWorker
from treadle.terminal import warn
from treadle.types import NOTHING, Batch, Group, SamplingParams, Task, Trajectory


class RolloutKind(StrEnum):
    """What a call samples for."""

    TRAINING = "training"
    """As `rollout` says."""
    VALIDATION = "validation"
    """As `rollout.val_kwargs` says."""
    GREEDY = "greedy"
    """One sample at temperature 0, as a baseline."""


def print_stall(report: StallReport) -> None:
    """The default place for stall reports: standard error."""
    warn(report.text())


RecordEvent = Callable[[str, Mapping[str, object]], None]
"""Adds an event to the journal, if there is one: its kind and its fields."""


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """What a caller may bring instead of having it built from the config."""

    engines: Sequence[Engine] | Callable[[], Awaitable[Sequence[Engine]]] | None = None
    """Engines, or what starts them on the rollout's own loop."""
    renderer: Renderer | None = None
    journal: Journal | None = None
    observers: Sequence[RolloutObserver] = ()
    workers: Callable[[TokenGenerator], Awaitable[Sequence[ManagedWorker]]] | None = None
    """Starts agent workers elsewhere, which generate through what they are given."""
    scorer: Callable[[RewardContext], Awaitable[ManagedScorer]] | None = None
    """Starts a scorer elsewhere, with what it may use of this rollout."""
    attend: Callable[[Router, RecordEvent], Awaitable[ReplicaMonitor]] | None = None
    """Starts a monitor that replaces replicas which die, and records it."""
    on_stall: Callable[[StallReport], None] = print_stall
    api_keys: Mapping[str, str] = NOTHING
    """Keys of endpoints, by the environment variable that the config names for each."""
    inputs: RunInputs | None = None
    """What trajectories are made from, which is then recorded with each."""
    gpus: Mapping[str, Sequence[Gpu]] = NOTHING
    """Those of reward models, by the name of each."""


class RolloutService:
    """All parts of a rollout, built by `start`; the constructor only stores them."""

    def __init__(
        self,
        rollout: RolloutConfig,
        renderer: Renderer,
        router: Router,
        completion_log: CompletionLog,
        dispatcher: Dispatcher,
        watchdog: StallWatchdog,
        monitor: ReplicaMonitor | None,
        journal: Journal | None,
        inputs: RunInputs | None,
        parts: AsyncExitStack,
    ) -> None:
        self._inputs = inputs
        self._rollout = rollout
        self._renderer = renderer
        self.router = router
        self._completion_log = completion_log
        self._dispatcher = dispatcher
        self._watchdog = watchdog
        self._monitor = monitor
        self._journal = journal
        self._parts = parts
        self._running: set[asyncio.Task[object]] = set()
        self._is_watched = False
        """Whether `watch` runs."""

    @classmethod
    async def start(
        cls, rollout: RolloutConfig, model: ModelConfig, reward: RewardConfig | None, parts: RolloutParts
    ) -> Self:
        """Start every part, or none."""
        async with AsyncExitStack() as started:
            renderer = parts.renderer
            if renderer is None:
                renderer = await asyncio.to_thread(Renderer.create, model)
            _check_rendering(renderer, rollout, parts.journal)
            if parts.engines is None:
                engines: Sequence[Engine] = await start_engines(
                    rollout, model, renderer, parts.api_keys.get(rollout.openai.api_key_env)
                )
            else:
                engines = await parts.engines() if callable(parts.engines) else parts.engines
            check = AnswerCheck(read_vocabulary_size(model), has_logprobs=rollout.name != "openai")
            limits, failures = rollout.limits, rollout.failures
            router = Router(engines, limits=limits, failures=failures, rng=random.Random(rollout.seed), check=check)
            started.push_async_callback(router.close)
            monitor = None
            if parts.attend is not None:
                monitor = await parts.attend(router, partial(_record_event, parts.journal))
                started.push_async_callback(monitor.close)
            completion_log = CompletionLog(router, parts.journal)
            started.callback(completion_log.close)
            workers = await _start_workers(rollout, model, renderer, completion_log, parts, started)
            scorer = None
            if reward is not None:
                context = RewardContext(model, renderer, router, start_engines, parts.api_keys, parts.gpus)
                elsewhere = parts.scorer if reward.weights() else None  # rewards of sessions are only summed
                scorer = await (elsewhere or partial(Scorer.create, reward))(context)
                started.push_async_callback(scorer.close)
            forget = partial(_forget, router, completion_log)
            dispatcher = Dispatcher(
                rollout, workers, scorer, parts.journal, parts.observers, forget, replicas=len(engines)
            )
            report = partial(_report_stall, parts)
            watchdog = StallWatchdog(rollout.limits.stall_report_s, lambda: _waits(workers, router, dispatcher), report)
            journal, closers = parts.journal, started.pop_all()
            return cls(
                rollout, renderer, router, completion_log, dispatcher, watchdog, monitor, journal, parts.inputs, closers
            )

    async def generate(self, tasks: Sequence[Task], kind: RolloutKind, seed: int | None = None) -> Batch:
        """Sample every task."""
        async with self._watched():
            return await self._dispatcher.generate(tasks, self._request(kind, seed=seed))

    async def stream(
        self,
        tasks: Sequence[Task],
        kind: RolloutKind,
        done: Container[tuple[str, int]],
        buffer: BoundedBuffer[Trajectory | Dropped],
        unscored: FindUnscored = no_trajectory,
    ) -> None:
        """Sample every task into `buffer`; those that `unscored` finds are scored, and not sampled again."""
        async with self._watched():
            request = replace(self._request(kind, done), unscored=unscored)
            await self._dispatcher.stream(tasks, request, buffer)

    async def group(self, task: Task, kind: RolloutKind, recovered: RecoveredTask) -> Group | Dropped:
        """Sample one task. `watch` must run meanwhile: it reports stalls and a journal that cannot be written."""
        request = self._request(kind)
        with self._counted():
            for sample in range(task.n or request.n):
                self._completion_log.forget(f"{task.uid}/{sample}")  # of a group that was cancelled, and begins again
            self._completion_log.recover(recovered.parts)
            return await self._dispatcher.group(task, request, recovered)

    async def watch(self) -> None:
        """Report stalls; raise when the journal cannot be written any more, or no replica is left; until cancelled."""
        self._is_watched = True
        try:
            with first_error():
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watchdog.run())
                    if self._monitor is not None:
                        group.create_task(self._monitor.watch())
                    if self._journal is not None:
                        group.create_task(self._journal.watch())
        finally:
            self._is_watched = False

    async def update_weights(self, update: WeightUpdate, running: OnWeightUpdate) -> str:
        """Hand new weights to every engine; `running` says what becomes of sessions that are open."""
        if running == "continue":
            return await self.router.update_weights(update)
        if running == "recompute":
            async with self._paused():
                return await self.router.update_weights(update)
        async with self._dispatcher.drained(restart=running == "drop"):
            return await self.router.update_weights(update)

    async def sleep(self) -> None:
        """Let the engines give their devices' memory back, weights included: new ones must be on their way."""
        await self.router.sleep(level=2)

    async def keep(self) -> None:
        """Interrupt what is being generated, and have the tokens so far on their way to the journal."""
        async with self._paused():
            await self.router.drain(self._rollout.limits.request_timeout_s)
            await self._completion_log.flush()

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        await self.router.pause()
        try:
            yield
        finally:
            await self.router.resume()

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
        """Count a call as running; meanwhile `watch`, unless it runs already."""
        with self._counted(), first_error():
            async with asyncio.TaskGroup() as group:
                watcher = None if self._is_watched else group.create_task(self.watch())
                yield
                if watcher is not None:
                    watcher.cancel()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)

    def _request(
        self, kind: RolloutKind, done: Container[tuple[str, int]] = (), seed: int | None = None
    ) -> RolloutRequest:
        rollout = self._rollout
        source = rollout.val_kwargs if kind is RolloutKind.VALIDATION else rollout
        sampling = SamplingParams(
            max_tokens=rollout.response_length,
            temperature=0.0 if kind is RolloutKind.GREEDY else source.temperature,
            top_p=source.top_p,
            top_k=source.top_k,
            min_p=source.min_p,
            repetition_penalty=source.repetition_penalty,
            presence_penalty=source.presence_penalty,
            frequency_penalty=source.frequency_penalty,
            stop=source.stop,
            stop_token_ids=() if rollout.ignore_eos else self._renderer.stop_token_ids,
            seed=rollout.seed if seed is None else seed,
        )
        n, inputs = 1 if kind is RolloutKind.GREEDY else source.n, self._inputs
        stamp = None if inputs is None else partial(inputs.stamp, validation=kind is RolloutKind.VALIDATION)
        return RolloutRequest(sampling, n, done, stamp=stamp)


async def _start_workers(
    rollout: RolloutConfig,
    model: ModelConfig,
    renderer: Renderer,
    engine: TokenGenerator,
    parts: RolloutParts,
    started: AsyncExitStack,
) -> Sequence[ManagedWorker]:
    """One worker here, some in processes of their own, or those that the caller provides."""
    workers: list[ManagedWorker] = []
    wanted = num_processes(rollout)
    if parts.workers is not None:
        workers += await parts.workers(engine)
        for worker in workers:
            started.push_async_callback(worker.close)
    elif wanted == 0:
        workers.append(await AgentLoopWorker.create(rollout=rollout, model=model, engine=engine, renderer=renderer))
        started.push_async_callback(workers[0].close)
    else:
        for number in range(wanted):
            name = f"agent worker {number}"
            workers.append(await RemoteAgentWorker.create(rollout=rollout, model=model, engine=engine, name=name))
            started.push_async_callback(workers[-1].close)
    return workers


def _forget(router: Router, completion_log: CompletionLog, session: str) -> None:
    """A session is over: its state for a next turn is dropped."""
    router.forget(session)
    completion_log.forget(session)


def _check_rendering(renderer: Renderer, rollout: RolloutConfig, journal: Journal | None) -> None:
    """Refuse a template that cannot do what the rollout needs; say at the start where it does something unexpected."""
    proof = renderer.proof
    notes = check_template(proof, rollout.multi_turn)
    if journal is not None:
        journal.add_event("rendering", proof=str(proof), differences=len(proof.differences), notes=notes)
    for note in notes:
        warn(f"note: {note}")


def _record_event(journal: Journal | None, kind: str, fields: Mapping[str, object]) -> None:
    if journal is not None:
        journal.add_event(kind, **fields)


def _report_stall(parts: RolloutParts, report: StallReport) -> None:
    parts.on_stall(report)
    if parts.journal is not None:
        parts.journal.add_event("stall", **report.fields())


def _waits(workers: Sequence[ManagedWorker], router: Router, dispatcher: Dispatcher) -> Iterator[Wait]:
    """What each open session waits for; for those that generate, the router knows on which replica."""
    replicas = {flight.session: flight.replica for flight in router.flights()}
    for worker in workers:
        for wait in worker.waits():
            server = replicas.get(f"{wait.uid}/{wait.sample}")
            yield wait if server is None else replace(wait, server=server)
    yield from dispatcher.waits()
