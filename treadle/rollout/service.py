"""Rollout service: engines, router, workers, scorer and dispatcher, started together and closed together.

Runs on one event loop, the manager's. Owns the order of starting and closing; a part that cannot start closes the ones
started before it.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Self

from treadle.aio import BoundedBuffer, first_error
from treadle.config import ModelConfig, RewardConfig, RolloutConfig
from treadle.config.rollout import OnWeightUpdate
from treadle.data.renderer import Renderer
from treadle.engine.protocol import ConfirmedWeights, Engine, TokenGenerator, WeightUpdate
from treadle.engine.replica_supervisor import ReplicaSupervisor, StartedEngines
from treadle.engine.requests import AnswerCheck
from treadle.engine.router import Router
from treadle.journal import Journal
from treadle.model.tokenizer import read_vocabulary_size
from treadle.observe import StallReport, StallWatchdog, Wait
from treadle.observe.gateway_totals import GatewayTotals
from treadle.reward.context import RewardContext
from treadle.rollout.completion_log import CompletionLog
from treadle.rollout.dispatch import Dispatcher, FindUnscored, RolloutRequest, no_trajectory
from treadle.rollout.engines import RolloutBackend, start_engines
from treadle.rollout.protocol import Dropped, ManagedWorker, RolloutObserver
from treadle.rollout.provenance import RunInputs
from treadle.rollout.seats import Opponents
from treadle.rollout.startup_checks import check_template
from treadle.terminal import warn
from treadle.types import NOTHING, Batch, Completion, Request, SamplingParams, Task, Trajectory


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


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """What a caller may bring instead of having it built from the config."""

    backend: RolloutBackend = field(default_factory=RolloutBackend)
    """Starts engines, agent workers and the scorer."""
    engines: Sequence[Engine] | None = None
    """Engines that are there already."""
    renderer: Renderer | None = None
    journal: Journal | None = None
    observers: Sequence[RolloutObserver] = ()
    on_stall: Callable[[StallReport], None] = print_stall
    api_keys: Mapping[str, str] = NOTHING
    """Keys of endpoints, by the environment variable that the config names for each."""
    inputs: RunInputs | None = None
    """What trajectories are made from, which is then recorded with each."""


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
        supervisor: ReplicaSupervisor | None,
        journal: Journal | None,
        inputs: RunInputs | None,
        parts: AsyncExitStack,
        num_ids: int | None = None,
    ) -> None:
        self._inputs = inputs
        self._num_ids = num_ids or 1
        self._rollout = rollout
        self._renderer = renderer
        self.router = router
        self._completion_log = completion_log
        self.dispatcher = dispatcher
        self._watchdog = watchdog
        self._supervisor = supervisor
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
            backend = parts.backend
            if parts.engines is None:
                api_key = parts.api_keys.get(rollout.openai.api_key_env)
                replicas = await backend.start_engines(rollout, model, renderer, api_key)
            else:
                replicas = StartedEngines(parts.engines)
            engines, supervisor = replicas.engines, replicas.supervisor
            num_ids = read_vocabulary_size(model)
            check = AnswerCheck(num_ids, has_logprobs=rollout.name != "openai")
            limits, failures = rollout.limits, rollout.failures
            router = Router(engines, limits=limits, failures=failures, rng=random.Random(rollout.seed), check=check)
            started.push_async_callback(router.close)
            if supervisor is not None:
                supervisor.connect(router, parts.journal)
                started.push_async_callback(supervisor.close)
            models: TokenGenerator = router
            if rollout.multi_turn.opponents:
                opponents = models = await Opponents.start(rollout, model, renderer, router)
                started.push_async_callback(opponents.close)
            completion_log = CompletionLog(models, parts.journal)
            started.callback(completion_log.close)
            engine = models if parts.journal is None else completion_log
            workers = await backend.start_workers(rollout, model, renderer, engine)
            for worker in workers:
                started.push_async_callback(worker.close)
            scorer = None
            if reward is not None:
                hidden = () if parts.journal is None else (str(parts.journal.run_dir),)
                gpus = backend.reward_gpus
                context = RewardContext(model, renderer, router, start_engines, parts.api_keys, gpus, hidden)
                scorer = await backend.start_scorer(reward, context)
                started.push_async_callback(scorer.close)
            observers = [*parts.observers]
            if rollout.uses_gateway():
                totals = GatewayTotals()
                observers.append(totals)
                started.callback(_report_gateway, totals, parts.journal)
            dispatcher = Dispatcher(
                rollout, workers, scorer, parts.journal, observers, completion_log, replicas=len(engines)
            )
            report = partial(_report_stall, parts)
            watchdog = StallWatchdog(rollout.limits.stall_report_s, lambda: _waits(workers, router, dispatcher), report)
            journal, closers = parts.journal, started.pop_all()
            return cls(
                *(rollout, renderer, router, completion_log, dispatcher, watchdog, supervisor),
                *(journal, parts.inputs, closers, num_ids),
            )

    async def generate(self, tasks: Sequence[Task], kind: RolloutKind, seed: int | None = None) -> Batch:
        """Sample every task."""
        async with self._watched():
            return await self.dispatcher.generate(tasks, self.request(kind, seed=seed))

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
            request = replace(self.request(kind, done), unscored=unscored)
            await self.dispatcher.stream(tasks, request, buffer)

    async def watch(self) -> None:
        """Report stalls; raise when the journal cannot be written any more, or no replica is left; until cancelled."""
        self._is_watched = True
        try:
            with first_error():
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watchdog.run())
                    if self._supervisor is not None:
                        group.create_task(self._supervisor.watch())
                    if self._journal is not None:
                        group.create_task(self._journal.watch())
        finally:
            self._is_watched = False

    async def update_weights(self, update: WeightUpdate, running: OnWeightUpdate) -> ConfirmedWeights:
        """Hand new weights to every engine; `running` says what becomes of sessions that are open."""
        if running == "continue":
            return await self.router.update_weights(update)
        if running == "recompute":
            async with self._paused():
                return await self.router.update_weights(update)
        async with self.dispatcher.drained(restart=running == "drop"):
            return await self.router.update_weights(update)

    async def probe(self, num_tokens: int) -> tuple[tuple[int, ...], dict[str, Completion]]:
        """An arbitrary prompt, and each replica's answer of as many tokens, drawn from the whole softmax."""
        rollout = self._rollout
        size = min(num_tokens, rollout.sequence_length() // 2)
        ids = tuple((7919 * at + 13) % self._num_ids for at in range(size))
        sampling = SamplingParams(size, temperature=rollout.temperature, seed=rollout.seed)
        return ids, await self.router.generate_on_each(Request("probe", 0, ids, sampling))

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
        limit, running = self._rollout.limits.close_timeout_s, self._running - {asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=limit)
        await self.dispatcher.cancel_groups(limit)
        await self._parts.aclose()

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Count a call as running; meanwhile `watch`, unless it runs already."""
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        self._running.add(task)
        try:
            with first_error():
                async with asyncio.TaskGroup() as group:
                    watcher = None if self._is_watched else group.create_task(self.watch())
                    yield
                    if watcher is not None:
                        watcher.cancel()
        finally:
            self._running.discard(task)

    def request(
        self, kind: RolloutKind, done: Container[tuple[str, int]] = (), seed: int | None = None
    ) -> RolloutRequest:
        """What a call of this kind asks of the dispatcher."""
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


def _check_rendering(renderer: Renderer, rollout: RolloutConfig, journal: Journal | None) -> None:
    """Refuse a template that cannot do what the rollout needs; say at the start where it does something unexpected."""
    parity = renderer.parity
    notes = check_template(parity, rollout.multi_turn)
    if journal is not None:
        journal.add_event("rendering", parity=str(parity), differences=len(parity.differences), notes=notes)
    for note in notes:
        warn(f"note: {note}")


def _report_gateway(totals: GatewayTotals, journal: Journal | None) -> None:
    """At the end of a rollout: what its agents did, and the habit that costs most."""
    line = totals.line()
    if line is not None:
        if journal is not None:
            journal.add_event("gateway", **totals.fields())
        warn(line)


def _report_stall(parts: RolloutParts, report: StallReport) -> None:
    parts.on_stall(report)
    if parts.journal is not None:
        parts.journal.add_event("stall", **report.fields())


def _waits(workers: Sequence[ManagedWorker], router: Router, dispatcher: Dispatcher) -> Iterator[Wait]:
    """What each open session waits for; for those that generate, the router knows on which replica."""
    replicas = {request.session: request.replica for request in router.in_flight()}
    for worker in workers:
        for wait in worker.waits():
            server = replicas.get(f"{wait.uid}/{wait.sample}")
            yield wait if server is None else replace(wait, server=server)
    yield from dispatcher.waits()
