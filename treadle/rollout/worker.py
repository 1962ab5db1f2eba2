"""Agent worker: runs sessions, one coroutine each, and turns whatever happens into a trajectory.

Owns a session from prompt to outcome: prompt, tools, loop, deadline. Knows nothing of rewards, groups or trainers.
Invariant: `run` returns a trajectory (or says that the prompt was dropped) for everything but a bug or a cancellation.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Self
from zlib import crc32

from treadle.aio import GIVE_UP_S, abandon, cancel_and_wait, describe_error, error_location, run_shielded, task_location
from treadle.config import ModelConfig, RolloutConfig
from treadle.data.renderer import Renderer
from treadle.engine.protocol import TokenGenerator
from treadle.errors import EngineFailure, EnvironmentFailure, Failure, LoopFailure, ToolFailure
from treadle.observe import Wait
from treadle.rollout.agent_loop import LoopFactory
from treadle.rollout.parsers import parser
from treadle.rollout.protocol import Dropped, Job, Services
from treadle.rollout.session import Session
from treadle.rollout.tools import Toolbox
from treadle.rollout.trajectory_builder import PromptDropped, SessionRecord, SessionState, fit_prompt
from treadle.rollout.trajectory_checks import refuse_own_names
from treadle.types import NOTHING, Outcome, StopReason, Timing, Trajectory

DRIFT_SHARE = 32
"""One session in so many has its row compared with a rendering of the whole conversation."""

CLEANUP_S = 20.0
"""How long an environment may take to close."""

STAGE_FAILURES: Mapping[str, type[Failure]] = {"tools": ToolFailure, "environment": EnvironmentFailure}
"""The failure of a session that breaks at a stage; at any other, LoopFailure."""


class AgentLoopWorker:
    """Runs any number of sessions at once on the loop it is called from."""

    def __init__(self, rollout: RolloutConfig, services: Services, toolbox: Toolbox, loops: LoopFactory) -> None:
        self._rollout = rollout
        self._services = services
        self._toolbox = toolbox
        self._loops = loops
        self._open: dict[int, RunningJob] = {}

    @classmethod
    async def create(
        cls,
        *,
        rollout: RolloutConfig,
        model: ModelConfig,
        engine: TokenGenerator,
        renderer: Renderer | None = None,
        announce: Callable[[Wait], None] | None = None,
    ) -> Self:
        """A worker with its tools started and its loops found, or an error. `announce`: see `Services`."""
        loops = LoopFactory(rollout)
        renderer, calls = renderer or Renderer.create(model), parser(rollout.multi_turn.format)
        services = Services(rollout, engine, renderer, calls, announce=announce)
        await loops.open()
        try:
            toolbox = await Toolbox.create(rollout.multi_turn, rollout.sandbox)
        except BaseException:
            await loops.close()
            raise
        return cls(rollout, services, toolbox, loops)

    async def run(self, job: Job) -> Trajectory | Dropped:
        """Make one attempt."""
        started_at, clock = time.time(), asyncio.get_running_loop().time
        began = clock()
        running = RunningJob(job, began)
        self._open[id(job)] = running
        attempt = asyncio.ensure_future(self._attempt(running))
        try:
            outcome = await self._await_outcome(running, attempt)
        finally:
            del self._open[id(job)]
        if isinstance(outcome, Dropped):
            return outcome
        trajectory = _trajectory(running, outcome, started_at, clock() - began)
        is_looked_at = crc32(f"{job.task.uid}/{job.sample}".encode()) % DRIFT_SHARE == 0
        if is_looked_at and "gateway" not in trajectory.extra:
            return self._with_drift(trajectory, running)  # an agent's own tools are not known here
        return trajectory

    def _with_drift(self, trajectory: Trajectory, running: "RunningJob") -> Trajectory:
        """The trajectory with a note of whether its row is what the template makes of the whole conversation."""
        assistant_turns = [at for at, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
        is_cut = "prompt_tokens_cut" in trajectory.extra
        if not trajectory.outcome.ok or len(trajectory.rows) != 1 or is_cut or len(assistant_turns) < 2:
            return trajectory
        row = trajectory.rows[0]
        assert running.record is not None, "a session that ended has one"
        shown = running.record.schemas
        try:
            whole = self._services.renderer.prompt(trajectory.messages[: assistant_turns[-1]], shown)
        except Failure:
            return trajectory
        drift = float(whole != (*row.prompt_ids, *row.ids[: row.turns[-1].start]))
        return replace(trajectory, extra={**trajectory.extra, "drift": drift})

    async def _await_outcome(
        self, running: "RunningJob", attempt: "asyncio.Task[Outcome | Dropped]"
    ) -> Outcome | Dropped:
        """What an attempt came to. One that outlives its deadline, whatever it does about it, is abandoned."""
        limit = self._rollout.limits.session_timeout_s
        try:
            await asyncio.wait({attempt}, timeout=limit + GIVE_UP_S)
            if not attempt.done() and running.is_loop_over:
                await asyncio.wait({attempt})  # its tools are being released, which has deadlines of its own
        except asyncio.CancelledError:
            running.is_cancelled = True
            if not await cancel_and_wait(attempt) and running.is_loop_over:
                await asyncio.wait({attempt})
            raise
        if not attempt.done():
            abandon(attempt)
            attempt.cancel()
            late = (
                f"did not end within {GIVE_UP_S:g} s of rollout.limits.session_timeout_s = {limit:g}, and was abandoned"
            )
            return Outcome.failed(running.failure(f"{late}{task_location(attempt)}"))
        if attempt.cancelled():
            return Outcome.failed(running.failure("cancelled its own task"))
        return attempt.result()

    async def _attempt(self, running: "RunningJob") -> Outcome | Dropped:
        """One attempt, whatever the user's code does: a task that ends with SystemExit would end the event loop."""
        job = running.job
        try:
            prompt_ids = self._prompt(running)
            loop = self._loops.create(job.task.agent)
            async with self._toolbox.open(job.task) as tools:
                schemas = self._toolbox.schemas(job.task.tools)
                session = Session(
                    job.task, job.sample, self._services, tools, schemas, job.sampling, prompt_ids, attempt=job.redraws
                )
                async with self._recorded(session, running):
                    await loop.run(session)
            assert running.record is not None
            refuse_own_names(running.record.state.extra)
            return Outcome.ended(running.record.state.ended or StopReason.STOP)
        except PromptDropped as dropped:
            return Dropped(job.task.uid, str(dropped))
        except Failure as failure:
            return Outcome.failed(failure)
        except asyncio.CancelledError as error:
            if running.is_cancelled:
                raise
            return Outcome.failed(running.failure(f"cancelled its own task{error_location(error)}"))
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001  a loop is the user's code: whatever breaks in it is its own
            return Outcome.failed(running.failure(describe_error(error)))

    @asynccontextmanager
    async def _recorded(self, session: Session, running: "RunningJob") -> AsyncIterator[None]:
        """Around a loop: its record, deadline and cleanups. Raises where a late end is not the model's own."""
        record = running.record = SessionRecord(session)
        record.state.opened = running.began  # turns count from where the trajectory's own times do
        limit, at = self._rollout.limits.session_timeout_s, ""
        try:
            try:
                async with asyncio.timeout(limit) as deadline:
                    yield
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                at = error_location(error.__cause__ or error)
            if deadline.expired():
                running.check_deadline(limit, at)
                session.end(StopReason.DEADLINE)
        finally:
            running.is_loop_over = True
            for work, what in reversed(record.state.cleanups):
                await run_shielded(work(), CLEANUP_S, what)

    def _prompt(self, running: "RunningJob") -> tuple[int, ...]:
        """The prompt's ids; none where the environment writes it."""
        task = running.job.task
        if not task.messages:
            return ()
        ids = self._services.renderer.prompt(task.messages, self._toolbox.schemas(task.tools))
        fitted = fit_prompt(ids, self._rollout)
        running.num_truncated = len(ids) - len(fitted)
        return fitted

    def waits(self) -> Iterator[Wait]:
        """What every open session is waiting for, for stall reports."""
        for running in self._open.values():
            yield running.wait()

    async def close(self) -> None:
        """Release the tools. Sessions must have ended."""
        self._services.threads.close()
        await self._loops.close()
        await self._toolbox.close()


@dataclass(slots=True)
class RunningJob:
    """A job that is running, and its session once it has one."""

    job: Job
    began: float
    record: SessionRecord | None = None
    num_truncated: int = 0
    """Tokens of the prompt that were cut out."""
    is_loop_over: bool = False
    """Whether the loop has ended: what follows is ours."""
    is_cancelled: bool = False
    """Whether it was cancelled from outside."""

    def failure(self, detail: str) -> Failure:
        """A failure of whatever the session is at."""
        stage = self.record.state.stage if self.record else "start"
        return STAGE_FAILURES.get(stage, LoopFailure)(detail)

    def check_deadline(self, limit_s: float, at: str) -> None:
        """Raise where the session's time went into something that the model has no part in; `at`: where it was."""
        assert self.record is not None
        state = self.record.state
        waited_s = asyncio.get_running_loop().time() - state.since
        limit = f"rollout.limits.session_timeout_s = {limit_s:g}"
        own_s = limit_s - state.generate_s - state.tool_s - state.environment_s
        if state.stage in ("start", "loop") and not self.record.generates and 2 * own_s > limit_s:
            raise LoopFailure(f"the loop's own code took {own_s:.3g} s of {limit}{at}")
        if not state.sampled and state.stage == "agent":
            raise LoopFailure(f"the agent asked for nothing within {limit}{at}")
        if not state.sampled:
            raise EngineFailure(f"no token within {limit}")
        if state.stage == "generate" and 2 * waited_s > limit_s:
            turn = state.assistant_turns + 1
            raise EngineFailure(f"turn {turn} had no answer for {waited_s:.3g} s, until {limit}")
        if state.stage == "environment" and 2 * (state.environment_s + waited_s) > limit_s:
            raise EnvironmentFailure(f"the environment took {state.environment_s + waited_s:.3g} s of {limit}")

    def wait(self) -> Wait:
        state = self.record.state if self.record else SessionState(since=self.began)
        task = self.job.task
        return Wait(task.uid, self.job.sample, state.stage, state.since, state.server, state.last_event)


def _trajectory(running: RunningJob, outcome: Outcome, started_at: float, total_s: float) -> Trajectory:
    job, record = running.job, running.record
    state = record.state if record else SessionState()
    extra = record.extra() if record else NOTHING
    if running.num_truncated and "prompt_tokens_cut" not in extra:
        extra = {**extra, "prompt_tokens_cut": running.num_truncated}
    return Trajectory(
        uid=job.task.uid,
        sample=job.sample,
        rows=record.rows() if record else (),
        outcome=outcome,
        messages=record.messages if record else job.task.messages,
        timing=Timing(
            *(started_at, total_s, max(0.0, state.generate_s - state.queue_s), state.tool_s), queue_s=state.queue_s
        ),
        attempt=job.attempt,
        data_source=job.task.data_source,
        extra=extra,
    )
