"""Agent worker in another process, for loops and tools that block or need more than one core: on this machine, or on a
cluster.

Owns the jobs it was given; what runs them there is `worker_process`. The engines and the scorer stay with the manager:
a worker sends each request up its channel and gets its completion back.

    RemoteAgentWorker   the manager's end: a job waits for its result, or for the end of the process; then that attempt
                        has failed, and the next job starts another process

A worker that reports nothing runs code that holds the interpreter: past the deadline of such code it is killed.
Sessions that may have been at fault have failed; the others begin again.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

from treadle.aio import GIVE_UP_S
from treadle.config import ModelConfig, RolloutConfig
from treadle.config.rollout import BOX_TOOLS
from treadle.context_vars import capture
from treadle.engine.in_flight import WaitInterrupted
from treadle.engine.protocol import TokenGenerator
from treadle.errors import (
    Failure,
    LoopFailure,
    RequestRefused,
)
from treadle.model.tokenizer import read_vocabulary_size
from treadle.observe import Wait
from treadle.process.channel import ChannelClosed, ChannelCodec
from treadle.process.child_handle import ProcessSpec
from treadle.process.launcher import Launcher, RemoteProcess, SubprocessLauncher
from treadle.process.supervisor import RestartPolicy, Supervisor
from treadle.rollout.environments.schemes import runs_here
from treadle.rollout.protocol import Dropped, Job
from treadle.rollout.tools.function import FunctionTool, ToolMode, load_tools
from treadle.rollout.trajectory_checks import find_problem
from treadle.rollout.worker import STAGE_FAILURES
from treadle.rollout.worker_process import REPORT_S, WORKER_CODEC, AgentWorkerSetup, SentJob, WaitReport, serve_worker
from treadle.types import (
    Outcome,
    Trajectory,
)

RESTART = RestartPolicy(attempts=3, first_wait_s=0.5)
"""Starts in a row that may fail before the run ends."""

_SAME_S = 1.0
"""Two reports of a wait differ by less than this in when it began."""

_HERE = SubprocessLauncher()


def num_processes(rollout: RolloutConfig) -> int:
    """Worker processes: as configured, or one where a user's code is called, which can hold the interpreter.

    Agents that talk to the gateway are kept out of the manager's process, too: it holds rewards and keys.
    """
    if rollout.agent.num_workers is not None:
        return rollout.agent.num_workers
    return 1 if rollout.uses_gateway() or _calls_user_code(rollout) else 0


def _calls_user_code(rollout: RolloutConfig) -> bool:
    """Whether loops, tools, the environment or the parser come from outside; a plain tool of ours may block as well."""
    agent, turns = rollout.agent, rollout.multi_turn
    tools = {at: path for at, path in enumerate(turns.tools) if path not in BOX_TOOLS}
    blocking = any(isinstance(tool, FunctionTool) and tool.mode is ToolMode.THREAD for tool in load_tools(tools))
    if blocking or runs_here(turns) or agent.allow_imports_from_data:
        return True
    return _has_user_loop(rollout) or any(map(_is_users, (*tools.values(), turns.format)))


def _has_user_loop(rollout: RolloutConfig) -> bool:
    """Whether a loop is a user's own, or calls a user's agent function."""
    agent = rollout.agent
    paths = {agent.default_agent_loop, *(loop.path or name for name, loop in agent.loops.items())}
    return "function_agent" in paths or any(map(_is_users, paths))


def _is_users(path: str) -> bool:
    return ":" in path and not path.startswith("treadle.")


@dataclass(slots=True)
class _Sent:
    """A job that runs in the worker process."""

    job: Job
    wait: Wait


@dataclass(slots=True)
class _KillReason:
    """Why a process was killed by this side, and the jobs that may have been at fault."""

    silent_s: float
    blamed: dict[int, str] = field(default_factory=dict)
    """The stage of each, by the identity of the job."""
    place: str = ""


class RemoteAgentWorker:
    """Agent worker in another process. One that dies is replaced when the next job comes."""

    def __init__(
        self,
        name: str,
        setup: AgentWorkerSetup,
        engine: TokenGenerator,
        launcher: Callable[[], Launcher],
        vocabulary_size: int | None = None,
    ) -> None:
        self._name = name
        self._setup = setup
        self._engine = engine
        self._launcher = launcher
        self._vocabulary_size = vocabulary_size
        """How many token ids the model embeds; None where that is not known."""
        self._supervisor = Supervisor(self._launch, RESTART)
        self._process: RemoteProcess | None = None
        """The one that was given the last job."""
        self._last_heard = 0.0
        self._running: dict[int, _Sent] = {}
        self._sessions: dict[str, _Sent] = {}
        """The same, by the session's name."""
        self._kill_reason: _KillReason | None = None
        """On that process."""
        self._timer: asyncio.TimerHandle | None = None
        self._max_silence_s = _max_silence_s(setup.rollout)

    @classmethod
    async def create(
        cls,
        *,
        rollout: RolloutConfig,
        model: ModelConfig,
        engine: TokenGenerator,
        name: str,
        launcher: Callable[[], Launcher] = lambda: _HERE,
        sends_text: bool = True,
    ) -> Self:
        """A worker whose process has answered, or an error. `launcher` says where, whenever one is started."""
        vocabulary_size = await asyncio.to_thread(read_vocabulary_size, model)
        worker = cls(name, AgentWorkerSetup(rollout, model, sends_text), engine, launcher, vocabulary_size)
        await worker._supervisor.current()
        return worker

    @property
    def pid(self) -> int:
        """The id of the worker's process."""
        assert self._supervisor.process is not None
        return self._supervisor.process.pid

    async def _launch(self) -> RemoteProcess:
        limits = self._setup.rollout.limits
        spec = ProcessSpec(
            self._name,
            f"{serve_worker.__module__}:{serve_worker.__name__}",
            self._setup,
            limits.launch_timeout_s,
            "rollout.limits.launch_timeout_s",
            codec=ChannelCodec(to_parent=WORKER_CODEC.frames()),
            kill_with_parent=False,
            reap=True,
            trace=True,
            max_stall_s=2 * self._max_silence_s,  # this side kills it first, as long as it lives
            end_timeout_s=limits.close_timeout_s,
        )
        return await self._launcher().launch(spec, self._answer, Failure)

    async def run(self, job: Job) -> Trajectory | Dropped:
        """Make one attempt in the worker process. If the worker dies, that attempt has failed."""
        process = await self._supervisor.current()
        now = asyncio.get_running_loop().time()
        if process is not self._process:
            self._process, self._last_heard, self._kill_reason = process, now, None
        wait = Wait(job.task.uid, job.sample, "agent loop", now, self._name, "sent to the worker")
        sent = self._running[id(job)] = self._sessions[f"{job.task.uid}/{job.sample}"] = _Sent(job, wait)
        self._start_timer()
        try:
            result: Trajectory | Dropped = await process.peer.request(SentJob(job, capture()))
            return self._check_result(result, job)
        except ChannelClosed:
            kill_reason = self._kill_reason if process is self._process else None
            if kill_reason is not None and id(job) not in kill_reason.blamed:
                raise WaitInterrupted(f"another session held {self._name} up") from None
            detail = f"{self._name} died: {await process.cause()}"
            kind: type[Failure] = LoopFailure
            if kill_reason is not None:
                kind = STAGE_FAILURES.get(kill_reason.blamed[id(job)], LoopFailure)
                detail = f"held {self._name} up for {kill_reason.silent_s:.0f} s, which was killed{kill_reason.place}"
            failed = Outcome.failed(kind(detail))
            return Trajectory(
                job.task.uid, job.sample, (), failed, attempt=job.attempt, data_source=job.task.data_source
            )
        finally:
            del self._running[id(job)]
            if self._sessions.get(f"{job.task.uid}/{job.sample}") is sent:
                del self._sessions[f"{job.task.uid}/{job.sample}"]

    def _check_result(self, result: Trajectory | Dropped, job: Job) -> Trajectory | Dropped:
        """The attempt that was asked for, without a score, as workers do not score; a failed one in the place of any
        other, and of one that no session of this model makes."""
        task = job.task
        if isinstance(result, Dropped):
            matches = result.uid == task.uid
        else:
            asked = (task.uid, job.sample, job.attempt, task.data_source)
            matches = (result.uid, result.sample, result.attempt, result.data_source) == asked and result.reward is None
        problem = "" if matches else "another trajectory than it was asked for"
        if matches and isinstance(result, Trajectory):
            problem = find_problem(result, self._vocabulary_size)
        if not problem:
            return result
        failed = Outcome.failed(LoopFailure(f"{self._name} answered with {problem}"))
        return Trajectory(task.uid, job.sample, (), failed, attempt=job.attempt, data_source=task.data_source)

    async def _answer(self, body: Any) -> Any:
        """Requests of the worker are for tokens; its notifications are wait reports."""
        self._last_heard = now = asyncio.get_running_loop().time()
        if isinstance(body, WaitReport):
            return self._update_waits(body, now)
        sent = self._sessions.get(body.session)
        if sent is None:  # cancelled by now, or not of this worker
            raise RequestRefused(f"{self._name} asked for tokens of session {body.session!r}, which it does not run")
        sent.wait = replace(sent.wait, stage="generate", since=now)
        completion = await self._engine.generate(body)
        sent.wait = replace(sent.wait, stage="loop", since=asyncio.get_running_loop().time())
        return completion

    def _update_waits(self, report: WaitReport, now: float) -> None:
        for wait in report.waits:
            sent = self._sessions.get(f"{wait.uid}/{wait.sample}")
            if sent is not None:
                since, before = now - wait.since, sent.wait
                same = wait.stage == before.stage and abs(since - before.since) < _SAME_S
                server = wait.server or self._name
                sent.wait = replace(wait, since=before.since if same else since, server=server)

    def _start_timer(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(REPORT_S, self._check_silence, loop.time() + REPORT_S)

    def _check_silence(self, due: float) -> None:
        """Kill the worker where it has been silent for too long. One timer, while jobs run."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        if now - due > REPORT_S:
            self._last_heard = now  # this loop was late itself: reports may lie unread
        silent_s = now - self._last_heard
        if self._running and self._kill_reason is None and silent_s > self._max_silence_s and self._process is not None:
            self._kill_reason = _KillReason(silent_s, self._blamed_jobs())
            self._process.probe()
            wait_s = self._process.probe_s
            asyncio.get_running_loop().call_later(wait_s, self._kill, self._process, self._kill_reason)
        if self._running:
            self._start_timer()

    def _blamed_jobs(self) -> dict[int, str]:
        """Jobs in the user's code at the worker's last report; all, where there is none."""
        stages = {at: sent.wait.stage for at, sent in self._running.items()}
        return {at: stage for at, stage in stages.items() if stage != "generate"} or stages

    def _kill(self, process: RemoteProcess, kill_reason: _KillReason) -> None:
        kill_reason.place = process.kill()

    def waits(self) -> Iterator[Wait]:
        """What every open job is waiting for, as last reported by the worker."""
        for sent in self._running.values():
            yield sent.wait

    async def close(self) -> None:
        """End the process or actor; at once, where it does not respond."""
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None and asyncio.get_running_loop().time() - self._last_heard > GIVE_UP_S:
            self._process.kill()
        await self._supervisor.end()


def _max_silence_s(rollout: RolloutConfig) -> float:
    """How long a worker may be silent: longer than any call that may hold it up within its deadline."""
    turns = rollout.multi_turn
    if _has_user_loop(rollout):  # what it computes between its turns has the session's deadline alone
        return rollout.limits.session_timeout_s + GIVE_UP_S
    longest = max(turns.tool_timeout_s, turns.environment_timeout_s if turns.environment else 0.0)
    return min(longest, rollout.limits.session_timeout_s) + GIVE_UP_S
