"""The rollout of a simulated run: the real service, dispatcher and router, around sessions that only take time.

Owns the simulated session. It asks the router as a real one does, goes on after an interruption, and waits for its
tools; what it lacks is everything that touches a token. A row has one id for each stretch of tokens with one policy
version, or of one tool's answer: the number of tokens in it.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import cast

from treadle.config import RolloutConfig
from treadle.data.renderer import Renderer
from treadle.engine.router import Router
from treadle.observe import StallWatch
from treadle.rollout.dispatch import Dispatcher
from treadle.rollout.recall import NO_PAST, Past, Recall
from treadle.rollout.service import Kind, RolloutService
from treadle.rollout.worker import Dropped, Job
from treadle.trainer.simulation.engine import TimedEngine
from treadle.trainer.simulation.workload import Workload
from treadle.types import (
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

_ENDED = Outcome.ended(StopReason.STOP)


class _NoText:
    """In place of a renderer: nothing is ever rendered."""

    stop_token_ids: tuple[int, ...] = ()


class TimedWorker:
    """Runs simulated sessions."""

    def __init__(self, router: Router, workload: Workload, metric: str) -> None:
        self._router = router
        self._workload = workload
        self._metric = metric

    async def run(self, job: Job) -> Trajectory | Dropped:
        """Make one attempt."""
        uid, sample, clock = job.task.uid, job.sample, asyncio.get_running_loop().time
        began = clock()
        plan = self._workload.plan_of(f"{uid}#{job.attempt}" if job.attempt else uid, sample)
        growth = _Growth(plan.prompt_tokens)
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

    async def _sample(self, uid: str, sample: int, tokens: int, growth: "_Growth") -> None:
        """One answer, in as many requests as weight updates break it into."""
        while tokens:
            sampling = SamplingParams(max_tokens=tokens)
            completion = await self._router.generate(Request(uid, sample, (growth.context,), sampling, growth.sampled))
            for part, version in zip(completion.ids, completion.versions, strict=True):
                growth.add(part, 1, version)
                tokens -= part


class _Growth:
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
    """A rollout as a run sees it: what the manager is to the real one, on the caller's own loop."""

    name = "simulated rollout"

    def __init__(self, service: RolloutService) -> None:
        self.service = service

    async def generate_sequences(
        self, tasks: Sequence[Task], *, kind: Kind = Kind.TRAINING, seed: int | None = None
    ) -> Batch:
        return await self.service.generate(tasks, kind, seed)

    async def generate_group(self, task: Task, *, past: Past = NO_PAST) -> Group | Dropped:
        return await self.service.group(task, Kind.TRAINING, past)

    async def watch(self) -> None:
        await self.service.watch()

    async def keep(self) -> None:
        """Nobody will go on from here."""

    async def sleep(self) -> None:
        """There is no memory to give back."""


def start_rollout(
    rollout: RolloutConfig, engines: Sequence[TimedEngine], workload: Workload, metric: str, stack: AsyncExitStack
) -> TimedRollout:
    """The rollout around these engines; `stack` closes it. `metric` is what `algorithm.filter_groups` looks at."""
    router = Router(engines, limits=rollout.limits, failures=rollout.failures, rng=random.Random(rollout.seed))
    stack.push_async_callback(router.close)
    dispatcher = Dispatcher(rollout, [TimedWorker(router, workload, metric)], None, forget=router.forget)
    watch = StallWatch(rollout.limits.stall_report_s, tuple, lambda report: None)
    renderer = cast(Renderer, _NoText())
    return TimedRollout(
        RolloutService(
            rollout, renderer, router, Recall(router, None), dispatcher, watch, None, None, None, AsyncExitStack()
        )
    )
