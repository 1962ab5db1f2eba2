"""Process of an agent worker: runs the jobs that its parent sends, with tokens that it asks the parent for.

Owns what crosses its channel. Tools have run in that process, so what it sends is read by `WORKER_CODEC` and never as a
pickle. Every second it reports what its sessions wait for.

    serve_worker        runs jobs until its channel closes, and ends what its tools left running
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from treadle.config import ModelConfig, RolloutConfig
from treadle.context_vars import Captured, restore
from treadle.errors import (
    EngineFailure,
    EnvironmentFailure,
    Failure,
    LoopFailure,
    PromptFailure,
    RequestRefused,
    RewardFailure,
    ToolFailure,
)
from treadle.observe import Wait
from treadle.process.channel import ChannelClosed, pickle_by_fields
from treadle.process.child_main import ParentConnection
from treadle.process.codec import RecordCodec
from treadle.process.rpc import RpcPeer
from treadle.rollout.protocol import Dropped, Job
from treadle.rollout.trajectory_checks import check_row, check_timing, check_tool_result, check_turn, check_wait
from treadle.rollout.worker import AgentLoopWorker
from treadle.types import (
    Completion,
    Outcome,
    Request,
    Row,
    SamplingParams,
    Task,
    Timing,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

REPORT_S = 1.0
"""How often a worker reports what its sessions wait for."""


@dataclass(frozen=True, slots=True)
class AgentWorkerSetup:
    """First message to a worker process."""

    rollout: RolloutConfig
    model: ModelConfig
    sends_text: bool = True
    """Whether engines want the conversation, too, and not its tokens alone."""


@dataclass(frozen=True, slots=True)
class SentJob:
    """A job on its way to a worker, with the context variables of the caller."""

    job: Job
    context: Captured


@dataclass(frozen=True, slots=True)
class WaitReport:
    """What the sessions of a worker wait for. `since` is an age here: clocks differ between machines."""

    waits: tuple[Wait, ...]


pickle_by_fields(
    *(SentJob, Job, Task, Request, SamplingParams, Completion, Trajectory, Row),
    *(Turn, ToolCall, ToolResult, Outcome, Timing),
)


def _fail_unsendable(trajectory: Trajectory, problem: str) -> Trajectory:
    """A failed trajectory in place of one that cannot be sent, with the reason."""
    fix = "give loops and tools extra values of plain JSON, or set rollout.agent.num_workers=0"
    outcome = Outcome.failed(LoopFailure(f"the trajectory cannot leave its worker process: {problem}; {fix}"))
    return Trajectory(
        trajectory.uid,
        trajectory.sample,
        (),
        outcome,
        timing=trajectory.timing,
        attempt=trajectory.attempt,
        data_source=trajectory.data_source,
    )


_FAILURES = (
    *(PromptFailure, EngineFailure, RequestRefused, ToolFailure),
    *(EnvironmentFailure, LoopFailure, RewardFailure),
)

WORKER_CODEC = RecordCodec(
    requests=(Request,),
    notifies=(WaitReport,),
    replies=(Trajectory, Dropped),
    errors=tuple(kind.__name__ for kind in _FAILURES),
    checks={
        Row: check_row,
        Turn: check_turn,
        ToolResult: check_tool_result,
        Timing: check_timing,
        Wait: check_wait,
    },
    replace_reply=_fail_unsendable,
)
"""What a worker sends."""


class UpstreamEngine:
    """Engine of a worker process: sends requests to the manager."""

    peer: RpcPeer

    def __init__(self, sends_text: bool = True) -> None:
        self._sends_text = sends_text

    async def generate(self, request: Request) -> Completion:
        if not self._sends_text:
            request = replace(request, messages=(), tools=())
        if request.on_tokens is not None:
            request = replace(request, on_tokens=None)  # tokens come with the answer
        completion: Completion = await self.peer.request(request)
        return completion

    def announce(self, wait: Wait) -> None:
        """Report the next stage of a session before it begins: its code may never return."""
        with suppress(ChannelClosed):
            self.peer.notify(WaitReport((replace(wait, since=0.0),)), at_once=True)


async def serve_worker(parent: ParentConnection, setup: AgentWorkerSetup) -> None:
    """Set up a worker, then run jobs until the manager's end closes."""
    engine = UpstreamEngine(setup.sends_text)
    worker = await AgentLoopWorker.create(
        rollout=setup.rollout, model=setup.model, engine=engine, announce=engine.announce
    )
    engine.peer = parent.peer(partial(_run_sent, worker), Failure)
    parent.started()
    reporting = asyncio.create_task(_report(worker, engine.peer))
    try:
        await engine.peer.serve()
    finally:
        reporting.cancel()
        await worker.close()


async def _run_sent(worker: AgentLoopWorker, sent: SentJob) -> Trajectory | Dropped:
    """Make one attempt, in a task of its own: the context variables are its own too."""
    restore(sent.context)
    return await worker.run(sent.job)


async def _report(worker: AgentLoopWorker, peer: RpcPeer) -> None:
    clock = asyncio.get_running_loop().time
    with suppress(ChannelClosed):
        while True:
            now = clock()
            peer.notify(WaitReport(tuple(replace(wait, since=now - wait.since) for wait in worker.waits())))
            await asyncio.sleep(REPORT_S)
