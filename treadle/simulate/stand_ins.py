"""Stand-ins of a simulated run: timed sessions under the real dispatcher and router; policy, journal, checkpoints.

A simulated session sends requests to the router as a real one does, continues after an interruption, and waits for
its tools; it touches no token. A row has one id for each stretch of tokens with one policy version, or of one tool's
answer: the number of tokens in it. The policy only counts its versions; journal, checkpoints and history of a run that
is never resumed keep nothing.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from treadle.checkpoint.links import CheckpointScore
from treadle.checkpoint.store import Checkpoints, Progress
from treadle.config import RolloutConfig
from treadle.config.rollout import OnWeightUpdate
from treadle.data.renderer import Renderer
from treadle.engine.protocol import ConfirmedWeights, WeightUpdate
from treadle.engine.router import Router
from treadle.journal import Journal
from treadle.observe import StallWatchdog
from treadle.policy.protocol import Critic, Policy, Reference, TrainBatch
from treadle.rollout.completion_log import NOTHING_RECOVERED, CompletionLog, RecoveredTask
from treadle.rollout.dispatch import Dispatcher
from treadle.rollout.protocol import Dropped, Job
from treadle.rollout.service import RolloutKind, RolloutService
from treadle.simulate.engine import TimedEngine
from treadle.simulate.workload import Workload
from treadle.trainer.resume import RunHistory
from treadle.types import (
    NOTHING,
    Batch,
    Group,
    Outcome,
    Request,
    Row,
    SamplingParams,
    Score,
    StopReason,
    Task,
    Timing,
    Trajectory,
)


class CountingPolicy:
    """A policy, reference and critic at once: it has a version and nothing else."""

    def __init__(self) -> None:
        self.version = 0

    def train(self, batch: TrainBatch) -> Mapping[str, float]:
        self.version += 1
        return {}

    def logprobs(self, rows: Sequence[Row]) -> Tensor:
        return torch.zeros(0)

    def frozen_logprobs(self, rows: Sequence[Row]) -> None:
        return None

    def annotations(self) -> None:
        return None

    def gradient_norms(self, rows: Sequence[Row]) -> Tensor:
        return torch.zeros(0)

    def values(self, rows: Sequence[Row]) -> Tensor:
        return torch.zeros(0)

    def follow(self, policy: Policy, step: int) -> bool:
        return False

    def tensors(self) -> Mapping[str, Any]:
        return {}

    def save(self, directory: Path) -> None: ...

    def restore(self, directory: Path) -> None: ...

    def export(self, directory: Path) -> None: ...

    def close(self) -> None: ...


class NoSender:
    """Sender of weights that are not there: a version, and its number as the checksum."""

    async def publish(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, str(version), {})

    async def retire(self, version: int) -> None: ...


class NoJournal(Journal):
    """Journal that writes nothing."""

    def __init__(self) -> None:
        """There is no directory to hold."""

    def _put(self, record: object) -> None: ...

    async def flush(self, timeout_s: float = 30.0) -> None: ...


class NoCheckpoints(Checkpoints):
    """Checkpoints of a run that starts from nothing and saves nothing."""

    def __init__(self) -> None:
        """There is no directory to look in."""

    def restore(self, policy: Policy, critic: Critic | None, reference: Reference | None = None) -> Progress | None:
        return None

    def is_due(self, step: int) -> bool:
        return False

    def score(self, step: int, score: CheckpointScore) -> None: ...

    def save(
        self,
        policy: Policy,
        critic: Critic | None,
        step: int,
        state: Mapping[str, Any],
        reference: Reference | None = None,
    ) -> Path:
        return Path()


class NoHistory(RunHistory):
    """History of a run that starts from nothing."""

    def __init__(self) -> None:
        """There is no journal to read."""
        self._resumes = ()
        self._sampled = frozenset()
        self.set_aside = NOTHING
        self.settings = ""

    def refuse_lost_checkpoints(self) -> None: ...

    def tell_lost_journal(self, step: int) -> None: ...


_ENDED = Outcome.ended(StopReason.STOP)


class _NoText:
    """Placeholder of a renderer: a simulation renders nothing."""

    stop_token_ids: tuple[int, ...] = ()


class TimedWorker:
    """Agent worker that runs simulated sessions."""

    def __init__(self, router: Router, workload: Workload, metric: str) -> None:
        self._router = router
        self._workload = workload
        self._metric = metric

    async def run(self, job: Job) -> Trajectory | Dropped:
        """Make one attempt."""
        uid, sample, clock = job.task.uid, job.sample, asyncio.get_running_loop().time
        began = clock()
        plan = self._workload.plan_of(f"{uid}#{job.attempt}" if job.attempt else uid, sample)
        growth = _RowBuilder(plan.prompt_tokens)
        for answer in plan.answers:
            await self._sample(uid, sample, answer.tokens, growth)
            if answer.tool_s:
                await asyncio.sleep(answer.tool_s)
            if answer.tool_tokens:
                growth.add(answer.tool_tokens, 0, -1)
        reward = self._workload.reward_of(uid, sample)
        return Trajectory(
            uid,
            sample,
            (growth.row(),),
            _ENDED,
            Score(reward, {self._metric: reward}),
            timing=Timing(began, clock() - began, tool_s=plan.tool_s),
            attempt=job.attempt,
        )

    async def _sample(self, uid: str, sample: int, tokens: int, growth: "_RowBuilder") -> None:
        """One answer, in as many requests as weight updates break it into."""
        while tokens:
            sampling = SamplingParams(max_tokens=tokens)
            completion = await self._router.generate(Request(uid, sample, (growth.context,), sampling, growth.sampled))
            for part, version in zip(completion.ids, completion.versions, strict=True):
                growth.add(part, 1, version)
                tokens -= part


class _RowBuilder:
    """The row of a session as it grows."""

    __slots__ = ("_ids", "_mask", "_prompt", "_versions", "context", "sampled")

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._versions: list[int] = []
        self.context = prompt
        self.sampled = 0

    def add(self, tokens: int, sampled: int, version: int) -> None:
        self._ids.append(tokens)
        self._mask.append(sampled)
        self._versions.append(version)
        self.context += tokens
        self.sampled += sampled * tokens

    def row(self) -> Row:
        none = (0.0,) * len(self._ids)
        return Row((self._prompt,), tuple(self._ids), tuple(self._mask), none, tuple(self._versions))


class TimedRollout:
    """Rollout of a simulated run, on the caller's own event loop."""

    name = "simulated rollout"

    def __init__(self, service: RolloutService) -> None:
        self.service = service

    async def generate_sequences(
        self, tasks: Sequence[Task], *, kind: RolloutKind = RolloutKind.TRAINING, seed: int | None = None
    ) -> Batch:
        return await self.service.generate(tasks, kind, seed)

    async def generate_group(self, task: Task, *, past: RecoveredTask = NOTHING_RECOVERED) -> Group | Dropped:
        return await self.service.dispatcher.group(task, self.service.request(RolloutKind.TRAINING), past)

    async def watch(self) -> None:
        await self.service.watch()

    async def keep(self) -> None:
        """Nothing to record: a simulated run is never resumed."""

    async def sleep(self) -> None:
        """No memory to free."""

    async def update_weights(self, update: WeightUpdate, *, running: OnWeightUpdate = "continue") -> ConfirmedWeights:
        return await self.service.update_weights(update, running)


def start_rollout(
    rollout: RolloutConfig, engines: Sequence[TimedEngine], workload: Workload, metric: str, stack: AsyncExitStack
) -> TimedRollout:
    """The rollout around these engines; `stack` closes it. `metric` is what `algorithm.filter_groups` looks at."""
    router = Router(engines, limits=rollout.limits, failures=rollout.failures, rng=random.Random(rollout.seed))
    stack.push_async_callback(router.close)
    log = CompletionLog(router, None)
    dispatcher = Dispatcher(rollout, [TimedWorker(router, workload, metric)], None, completion_log=log)
    watch = StallWatchdog(rollout.limits.stall_report_s, tuple, lambda report: None)
    renderer = cast(Renderer, _NoText())
    return TimedRollout(
        RolloutService(
            rollout,
            renderer,
            router,
            log,
            dispatcher,
            watch,
            None,
            None,
            None,
            AsyncExitStack(),
        )
    )
