"""An agent worker: runs sessions, one coroutine each, and turns whatever happens into a trajectory.

Owns the life of a session: prompt, tools, loop, deadline, outcome. Knows nothing of rewards, groups or trainers.
Invariant: `run` returns a trajectory (or says that the prompt was dropped) for everything but a bug or a cancellation.
"""

import asyncio
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from treadle.config import ModelConfig, RolloutConfig
from treadle.data.renderer import Renderer, truncate
from treadle.errors import EngineFailure, Failure, LoopFailure, PromptFailure
from treadle.observe import Wait
from treadle.rollout.agent_loop import LoopFactory
from treadle.rollout.growth import Ledger
from treadle.rollout.parsers import parser
from treadle.rollout.services import Generator, Services
from treadle.rollout.session import Session, SessionRecord
from treadle.rollout.tools import Toolbox
from treadle.types import NOTHING, Outcome, SamplingParams, StopReason, Task, Timing, Trajectory

CUT_SIDES: Mapping[str, Literal["left", "middle", "right"]] = {
    "truncate_left": "left",
    "truncate_middle": "middle",
    "truncate_right": "right",
}


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt to be made."""

    task: Task
    sample: int
    sampling: SamplingParams
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """A task whose prompt is too long, where the config says to drop it."""

    uid: str
    detail: str


class AgentLoopWorker:
    """Runs any number of sessions at once on the loop it is called from."""

    def __init__(self, rollout: RolloutConfig, services: Services, toolbox: Toolbox, loops: LoopFactory) -> None:
        self._rollout = rollout
        self._services = services
        self._toolbox = toolbox
        self._loops = loops
        self._open: dict[int, Opened] = {}

    @classmethod
    async def create(
        cls, *, rollout: RolloutConfig, model: ModelConfig, engine: Generator, renderer: Renderer | None = None
    ) -> Self:
        """A worker with its tools started and its loops found, or an error."""
        loops = LoopFactory(rollout)
        services = Services(rollout, engine, renderer or Renderer.create(model), parser(rollout.multi_turn.format))
        toolbox = await Toolbox.create(rollout.multi_turn)
        return cls(rollout, services, toolbox, loops)

    async def run(self, job: Job) -> Trajectory | Dropped:
        """Make one attempt."""
        started_at, clock = time.time(), asyncio.get_running_loop().time
        began = clock()
        opened = Opened(job, began)
        self._open[id(job)] = opened
        try:
            prompt_ids = self._prompt(job.task)
            if isinstance(prompt_ids, Dropped):
                return prompt_ids
            outcome = await self._attempt(opened, prompt_ids)
        except Failure as failure:
            outcome = Outcome.failed(failure)
        except Exception as error:  # noqa: BLE001  a loop is the user's code: whatever breaks in it is its own
            outcome = Outcome.failed(LoopFailure(_describe(error)))
        finally:
            del self._open[id(job)]
        return _trajectory(opened, outcome, started_at, clock() - began)

    async def _attempt(self, opened: "Opened", prompt_ids: tuple[int, ...]) -> Outcome:
        job, limits = opened.job, self._rollout.limits
        loop = self._loops.create(job.task.agent)
        async with self._toolbox.open(job.task) as tools:
            schemas = self._toolbox.schemas(job.task.tools)
            session = Session(job.task, job.sample, self._services, tools, schemas, job.sampling, prompt_ids)
            opened.record = SessionRecord(session)
            try:
                async with asyncio.timeout(limits.session_timeout_s) as deadline:
                    await loop.run(session)
            except TimeoutError:
                if not deadline.expired():
                    raise
                session.end(StopReason.DEADLINE)
        ledger = opened.record.ledger
        if ledger.ended is StopReason.DEADLINE and not ledger.sampled:
            raise EngineFailure(f"no token within rollout.limits.session_timeout_s = {limits.session_timeout_s:g}")
        return Outcome.ended(ledger.ended or StopReason.STOP)

    def _prompt(self, task: Task) -> tuple[int, ...] | Dropped:
        """The prompt's ids, cut or refused as `rollout.overlong_prompts` says."""
        rollout = self._rollout
        ids = self._services.codec.prompt(task.messages, self._toolbox.schemas(task.tools))
        if len(ids) <= rollout.prompt_length:
            return ids
        detail = f"the prompt has {len(ids)} tokens; rollout.prompt_length is {rollout.prompt_length}"
        if rollout.overlong_prompts == "error":
            raise PromptFailure(f"{detail}: raise it, or set rollout.overlong_prompts to drop or truncate_left")
        if rollout.overlong_prompts == "drop":
            return Dropped(task.uid, detail)
        return truncate(ids, rollout.prompt_length, CUT_SIDES[rollout.overlong_prompts])

    def waits(self) -> Iterator[Wait]:
        """What every open session is waiting for, for stall reports."""
        for opened in self._open.values():
            yield opened.wait()

    async def close(self) -> None:
        """Release the tools. Sessions must have ended."""
        await self._toolbox.close()


@dataclass(slots=True)
class Opened:
    """A job that is running, and its session once it has one."""

    job: Job
    began: float
    record: SessionRecord | None = None

    def wait(self) -> Wait:
        ledger = self.record.ledger if self.record else Ledger(since=self.began)
        task = self.job.task
        return Wait(task.uid, self.job.sample, ledger.stage, ledger.since, ledger.server, ledger.last_event)


def _trajectory(opened: Opened, outcome: Outcome, started_at: float, total_s: float) -> Trajectory:
    job, record = opened.job, opened.record
    ledger = record.ledger if record else Ledger()
    return Trajectory(
        uid=job.task.uid,
        sample=job.sample,
        rows=record.rows() if record else (),
        outcome=outcome,
        messages=record.messages if record else job.task.messages,
        timing=Timing(started_at, total_s, ledger.generate_s, ledger.tool_s),
        attempt=job.attempt,
        data_source=job.task.data_source,
        extra=record.extra() if record else NOTHING,
    )


def _describe(error: Exception) -> str:
    """What broke and where, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
