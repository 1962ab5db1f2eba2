"""Dispatcher: turns tasks into groups of scored trajectories, on the manager's event loop.

Owns the order of work: samples per task, concurrency (back-pressure on sessions), retries, scoring, journal records,
and the failure budget, which ends a run when more trajectories failed than `rollout.failures` allows.
Waits: a job waits for a free place (`agent.max_concurrent_sessions`), then while `drained` holds new sessions back; a
group waits for its samples; a stream waits for its reader. A failure ends a trajectory, never its batch; a spent
failure budget ends the run.
"""

import asyncio
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from treadle.aio import BoundedBuffer, first_error, run_concurrently, task_results
from treadle.config import FailureConfig, RolloutConfig
from treadle.engine.in_flight import InFlightRequest, InFlightRequests, PauseGate, WaitInterrupted
from treadle.errors import Boundary, BudgetSpent, DeadlineError, MisuseError, RewardFailure
from treadle.journal import Journal
from treadle.observe import Wait
from treadle.rollout.completion_log import NOTHING_RECOVERED, CompletionLog, RecoveredTask, needs_new_noise
from treadle.rollout.protocol import AgentWorker, Dropped, Job, RolloutObserver, RolloutObservers, TrajectoryScorer
from treadle.types import Batch, Group, Outcome, Provenance, SamplingParams, Score, Task, Trajectory


class FailureBudget:
    """Counts finished trajectories; raises when failures are more than the config allows."""

    def __init__(self, failures: FailureConfig, run_dir: Path | None = None) -> None:
        self._failures, self._run_dir = failures, run_dir
        self._finished = 0
        self._failed: Counter[Boundary] = Counter()
        self._last: dict[Boundary, str] = {}

    def add(self, outcome: Outcome) -> None:
        """Count an outcome; raise BudgetSpent, with the causes, when too many have failed."""
        failures = self._failures
        self._finished += 1
        if outcome.boundary is None:
            return
        self._failed[outcome.boundary] += 1
        self._last[outcome.boundary] = outcome.detail
        failed = self._failed.total()
        if self._finished >= failures.min_finished and failed > failures.max_failed_fraction * self._finished:
            raise BudgetSpent(self._report(failed))

    def _report(self, failed: int) -> str:
        allowed = f"rollout.failures.max_failed_fraction allows {self._failures.max_failed_fraction:g}"
        causes = (f"  {count} × {boundary}: {self._last[boundary]}" for boundary, count in self._failed.most_common())
        lines = [f"{failed} of {self._finished} trajectories failed; {allowed}", *causes]
        if self._run_dir is not None:
            lines.append(f"see them with: treadle show {shlex.quote(str(self._run_dir))} --failed")
        return "\n".join(lines)


RETRIED_BOUNDARIES = frozenset({Boundary.ENGINE, Boundary.TOOL, Boundary.ENVIRONMENT, Boundary.LOOP})
"""Failures that another attempt may escape. A prompt stays as it is, and a scorer has retries of its own."""


FindUnscored = Callable[[str, int], Trajectory | None]
"""Finds the trajectory of a uid and a sample, if there is one."""


def no_trajectory(uid: str, sample: int) -> Trajectory | None:
    return None


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """What a caller asked for: sampling, samples per task, and which samples it already has."""

    sampling: SamplingParams
    n: int
    done: Container[tuple[str, int]] = ()
    unscored: FindUnscored = no_trajectory
    """Samples that have tokens already, and need a score."""
    stamp: Callable[[Task], Provenance] | None = None
    """Says what the trajectories of a task are made from."""


class Dispatcher:
    """Gives jobs to workers and assembles groups from the results. The workers share `replicas` engines."""

    def __init__(
        self,
        rollout: RolloutConfig,
        workers: Sequence[AgentWorker],
        scorer: TrajectoryScorer | None,
        journal: Journal | None = None,
        observers: Sequence[RolloutObserver] = (),
        completion_log: CompletionLog | None = None,
        replicas: int = 1,
    ) -> None:
        self._rollout = rollout
        self._workers = workers
        self._scorer = scorer
        self._group_scorer = scorer if scorer is not None and scorer.scores_groups else None
        self._journal = journal
        self._observers = RolloutObservers(observers)
        self._completion_log = completion_log
        self._budget = FailureBudget(rollout.failures, journal.run_dir if journal is not None else None)
        self._places = asyncio.Semaphore(rollout.num_places(replicas))
        self._gate = PauseGate()
        self._attempts = InFlightRequests()
        self._turn = 0
        self._groups: set[asyncio.Task[object]] = set()
        """Tasks that wait for a group."""
        self._scoring: dict[tuple[str, int], float] = {}
        """Trajectories that wait for their score, and since when."""

    def waits(self) -> Iterator[Wait]:
        """What is waited for here, once sessions have ended."""
        for (uid, sample), since in self._scoring.items():
            yield Wait(uid, sample, "score", since, "the scorer", "the session ended")

    async def generate(self, tasks: Sequence[Task], request: RolloutRequest) -> Batch:
        """Groups in the order of the tasks, once every sample has ended."""
        _refuse_repeats(tasks)
        with first_error():
            async with asyncio.TaskGroup() as work:
                running = [work.create_task(self.group(task, request)) for task in tasks]
        groups = task_results(running)
        dropped = tuple(group.uid for group in groups if isinstance(group, Dropped))
        return Batch(tuple(group for group in groups if isinstance(group, Group)), dropped)

    async def group(
        self, task: Task, request: RolloutRequest, recovered: RecoveredTask = NOTHING_RECOVERED
    ) -> Group | Dropped:
        """One group, once every sample has ended; what an earlier run finished is taken over.

        With too few survivors, samples that failed are drawn once more.
        """
        if self._completion_log is not None:
            self._completion_log.begin_group(task.uid, task.n or request.n, recovered.parts)
        finished, unscored = self._split_scored(task, request, recovered.finished)
        request = replace(request, unscored=lambda uid, sample: unscored.pop(sample, None)) if unscored else request
        missing = [sample for sample in self._missing_samples(task, request) if sample not in finished]
        redraws = Counter(recovered.redraws)
        with self._listed(), first_error():
            results = await run_concurrently(
                [self._sample(task, sample, request, redraws, recovered.attempt) for sample in missing]
            )
            if dropped := [result for result in results if isinstance(result, Dropped)]:
                return dropped[0]
            finished.update({result.sample: result for result in results if isinstance(result, Trajectory)})
            group = Group(task, tuple(finished[at] for at in sorted(finished)))
            enough = self._rollout.failures.min_group_size
            if missing and len(group.survivors) >= enough:
                group = await self._score_group(group, redraws)
            if len(group.survivors) >= enough:
                return group
            failed = [trajectory for trajectory in group.trajectories if not trajectory.outcome.ok]
            again = await run_concurrently(
                [self._sample(task, old.sample, request, redraws, old.attempt + 1) for old in failed]
            )
            redone = {new.sample: new for new in again if isinstance(new, Trajectory)}
            group = Group(task, tuple(redone.get(old.sample, old) for old in group.trajectories))
            return await self._score_group(group, redraws)

    def _split_scored(
        self, task: Task, request: RolloutRequest, finished: Sequence[Trajectory]
    ) -> tuple[dict[int, Trajectory], dict[int, Trajectory]]:
        """Finished samples by number: those that are done, and those that need a score."""
        known = {trajectory.sample: trajectory for trajectory in finished}
        if self._scorer is None:
            return known, {}
        unscored = {sample: sampled for sample, sampled in known.items() if sampled.reward is None}
        if self._group_scorer is not None and (unscored or len(known) < len(self._missing_samples(task, request))):
            return {}, known  # a score in a group is of that very group
        return {sample: sampled for sample, sampled in known.items() if sample not in unscored}, unscored

    @contextmanager
    def _listed(self) -> Iterator[None]:
        """List the task that runs as one that waits for a group."""
        task = asyncio.current_task()
        assert task is not None, "groups are sampled in tasks"
        self._groups.add(task)
        try:
            yield
        finally:
            self._groups.discard(task)

    async def cancel_groups(self, timeout_s: float) -> None:
        """Cancel every group that is being sampled, and wait until they have ended, for as long as given."""
        groups = set(self._groups)
        for task in groups:
            task.cancel()
        if groups:
            await asyncio.wait(groups, timeout=timeout_s)

    @asynccontextmanager
    async def drained(self, *, restart: bool) -> AsyncIterator[None]:
        """Run a block while no session is open: those that are end first, or, with `restart`, begin again after it."""
        self._gate.pause()
        try:
            if restart:
                self._attempts.interrupt("weights were updated")
            limit = self._rollout.limits.session_timeout_s
            if not await self._attempts.drain(limit):
                oldest = next(iter(self._attempts)).session
                raise DeadlineError(f"{len(self._attempts)} sessions did not end within {limit:g} s, such as {oldest}")
            yield
        finally:
            self._gate.resume()

    async def stream(
        self, tasks: Sequence[Task], request: RolloutRequest, buffer: BoundedBuffer[Trajectory | Dropped]
    ) -> None:
        """Every sample into `buffer` as it ends, or with rewards of scope group as its group does; dropped tasks once
        each."""
        _refuse_repeats(tasks)
        try:
            with first_error():
                async with asyncio.TaskGroup() as work:
                    running = [work.create_task(self._stream_task(task, request, buffer)) for task in tasks]
            task_results(running)
        finally:
            await buffer.close()

    async def _stream_task(
        self, task: Task, request: RolloutRequest, buffer: BoundedBuffer[Trajectory | Dropped]
    ) -> None:
        if self._group_scorer is not None:
            return await self._stream_group(task, request, buffer)

        async def one(sample: int) -> None:
            result = await self._sample(task, sample, request, Counter())
            if isinstance(result, Trajectory) or sample == 0:
                await buffer.put(result)

        await run_concurrently([one(sample) for sample in self._missing_samples(task, request)])

    async def _stream_group(
        self, task: Task, request: RolloutRequest, buffer: BoundedBuffer[Trajectory | Dropped]
    ) -> None:
        missing, n = self._missing_samples(task, request), task.n or request.n
        if not missing:
            return
        if len(missing) < n:
            raise MisuseError(
                f"{n - len(missing)} of {n} samples of {task.uid} are done, the others are not: with rewards of scope "
                "group, all samples of a task are scored together"
            )
        redraws = Counter[int]()
        results = await run_concurrently([self._sample(task, sample, request, redraws) for sample in missing])
        drawn = tuple(result for result in results if isinstance(result, Trajectory))
        for dropped in [result for result in results if isinstance(result, Dropped)][:1]:
            await buffer.put(dropped)
        for trajectory in (await self._score_group(Group(task, drawn), redraws)).trajectories:
            await buffer.put(trajectory)

    def _missing_samples(self, task: Task, request: RolloutRequest) -> list[int]:
        return [sample for sample in range(task.n or request.n) if (task.uid, sample) not in request.done]

    async def _sample(
        self, task: Task, sample: int, request: RolloutRequest, redraws: Counter[int], attempt: int = 0
    ) -> Trajectory | Dropped:
        """One sample: attempts until one does not fail or the retries are spent; then counted against the budget.

        Where groups are scored, one that did not fail is counted after that. `redraws` counts, by sample, the attempts
        whose noise must not be drawn again.
        """
        session, clock = f"{task.uid}/{sample}", asyncio.get_running_loop().time
        last, began = attempt + self._rollout.failures.session_retries, clock()
        async with self._places:
            queue_s = waited_s = clock() - began
            self._observers.start()
            result: Trajectory | Dropped | None = request.unscored(task.uid, sample)
            while True:
                if result is None:
                    if self._gate.shut:
                        queue_s += await self._hold(session)
                    job = Job(task, sample, request.sampling, attempt, redraws[sample])
                    try:
                        with InFlightRequest(self._attempts, session, clock()):
                            result = await self._next_worker().run(job)
                    except WaitInterrupted:  # `drained` restarts it
                        self._forget(session)
                        continue
                    if isinstance(result, Dropped):
                        break
                    timing = replace(result.timing, queue_s=queue_s + result.timing.queue_s)
                    result = replace(result, timing=timing)
                assert isinstance(result, Trajectory)
                result = await self._settle(task, result, request, redraws)
                if result.outcome.boundary not in RETRIED_BOUNDARIES or attempt >= last:
                    break
                self._observers.retry(result)
                attempt, queue_s, result = attempt + 1, waited_s, None
        if isinstance(result, Dropped):
            self._observers.drop()
        elif not self._waits_for_group(result):
            self._finish(result)
        return result

    def _forget(self, session: str) -> None:
        if self._completion_log is not None:
            self._completion_log.forget(session)

    async def _hold(self, session: str) -> float:
        """Wait while `drained` holds new sessions back; how long that took."""
        clock = asyncio.get_running_loop().time
        began = clock()
        await self._gate.admit(session)
        return clock() - began

    def _waits_for_group(self, trajectory: Trajectory) -> bool:
        return self._group_scorer is not None and trajectory.outcome.ok

    def _finish(self, trajectory: Trajectory) -> None:
        self._observers.finish(trajectory)
        self._budget.add(trajectory.outcome)

    async def _settle(
        self, task: Task, result: Trajectory, request: RolloutRequest, redraws: Counter[int]
    ) -> Trajectory:
        """A trajectory that has its tokens, scored and recorded."""
        if request.stamp is not None:
            result = replace(result, provenance=request.stamp(task))
        if result.outcome.ok and self._scorer is not None:
            result = await self._score(task, result, self._scorer)
        redraws[result.sample] += needs_new_noise(result.outcome)
        await self._record(_without_score(result) if self._waits_for_group(result) else result)
        return result

    async def _record(self, trajectory: Trajectory) -> None:
        if self._journal is not None:
            self._journal.add(trajectory)
        # Not before the journal has it, so that a crash finds one or the other.
        self._forget(f"{trajectory.uid}/{trajectory.sample}")
        if self._journal is not None and self._journal.full:
            await self._journal.drain()

    async def _score(self, task: Task, trajectory: Trajectory, scorer: TrajectoryScorer) -> Trajectory:
        clock = asyncio.get_running_loop().time
        began = clock()
        outcome, reward = trajectory.outcome, None
        self._scoring[trajectory.uid, trajectory.sample] = began
        try:
            reward = await scorer.score(task, trajectory)
        except RewardFailure as failure:
            outcome = Outcome.failed(failure)
        finally:
            self._scoring.pop((trajectory.uid, trajectory.sample), None)
        timing = replace(trajectory.timing, score_s=clock() - began)
        return replace(trajectory, outcome=outcome, reward=reward, timing=timing)

    async def _score_group(self, group: Group, redraws: Counter[int]) -> Group:
        """The samples of a task with what their group adds to the score of each: all that did not fail, or none.

        Each has been recorded without a score, and is now recorded with it.
        """
        scorer, waiting = self._group_scorer, group.survivors
        if scorer is None or not waiting:
            return group
        clock = asyncio.get_running_loop().time
        began, rewards, failed = clock(), list[Score | None]([None] * len(waiting)), None
        self._scoring.update({(item.uid, item.sample): began for item in waiting})
        try:
            rewards = [*await scorer.score_group(group.task, waiting)]
        except RewardFailure as failure:
            failed = Outcome.failed(failure)
        finally:
            for item in waiting:
                self._scoring.pop((item.uid, item.sample), None)
        scored: dict[int, Trajectory] = {}
        for item, reward in zip(waiting, rewards, strict=True):
            timing = replace(item.timing, score_s=item.timing.score_s + clock() - began)
            result = replace(item, outcome=failed or item.outcome, reward=reward, timing=timing)
            redraws[item.sample] += needs_new_noise(result.outcome)
            await self._record(result)
            self._finish(result)
            scored[item.sample] = result
        return Group(group.task, tuple(scored.get(item.sample, item) for item in group.trajectories))

    def _next_worker(self) -> AgentWorker:
        """Workers take turns; they all reach the same engines."""
        self._turn = (self._turn + 1) % len(self._workers)
        return self._workers[self._turn]


def _without_score(trajectory: Trajectory) -> Trajectory:
    """As it is recorded while its group goes on: a reader of the journal sees that it needs a score."""
    return replace(trajectory, reward=None, provenance=replace(trajectory.provenance, scoring=""))


def _refuse_repeats(tasks: Sequence[Task]) -> None:
    counts = Counter(task.uid for task in tasks)
    repeated = [uid for uid, count in counts.items() if count > 1]
    if repeated:
        raise MisuseError(f"{len(repeated)} tasks share a uid with another, such as {repeated[0]!r}: uids must differ")
