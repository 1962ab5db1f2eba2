"""An agent worker somewhere else, as the dispatcher sees it: in a process of this machine, or in an actor of a cluster.

Owns the jobs it was given. The engines and the scorer stay with the manager: a worker sends each request up its channel
and gets its completion back. Knows a worker's place as a life that can end.
Every second a worker says what its sessions wait for. One that says nothing has code in it that holds the interpreter:
past the deadline of such code the worker is killed. Sessions that may have been at fault have failed; the others begin
again.
Waits: a job waits for its result, or for the end of the life; then that attempt has failed, and the next job starts
another.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from treadle.aio import GIVE_UP_S
from treadle.config import RolloutConfig
from treadle.context import Captured, capture, restore
from treadle.engine.channel import ChannelClosed, Peer
from treadle.engine.interrupt import Interrupted
from treadle.errors import Failure, LoopFailure, RequestRefused, RunError
from treadle.observe import Wait
from treadle.rollout.serialization import WaitReport
from treadle.rollout.services import Generator
from treadle.rollout.worker import STAGES, AgentLoopWorker, Dropped, Job
from treadle.types import Outcome, Trajectory

REPORT_S = 1.0
"""How often a worker says what its sessions wait for."""

PROBE_S = 0.5
"""How long a worker that holds still has to write down where it is, before it is killed."""

RESTARTS = 3
"""Starts in a row that may fail before the run ends."""

_SAME_S = 1.0
"""Two reports of a wait differ by less than this in when it began."""

Answer = Callable[[Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class SentJob:
    """A job on its way to a worker, with the context variables of whoever asked for it."""

    job: Job
    context: Captured


async def serve_jobs(worker: AgentLoopWorker, peer: Peer) -> None:
    """The worker's end: answer until the other end goes, and report meanwhile."""
    reporting = asyncio.create_task(_report(worker, peer))
    try:
        await peer.serve()
    finally:
        reporting.cancel()
        await worker.close()


async def run_sent(worker: AgentLoopWorker, sent: SentJob) -> Trajectory | Dropped:
    """Make one attempt, in a task of its own: the context variables are its own too."""
    restore(sent.context)
    return await worker.run(sent.job)


async def _report(worker: AgentLoopWorker, peer: Peer) -> None:
    clock = asyncio.get_running_loop().time
    with suppress(ChannelClosed):
        while True:
            now = clock()
            peer.tell(WaitReport(tuple(replace(wait, since=now - wait.since) for wait in worker.waits())))
            await asyncio.sleep(REPORT_S)


class Life(Protocol):
    """One process or actor, from the moment it is ready to its death."""

    @property
    def peer(self) -> Peer: ...

    @property
    def over(self) -> bool: ...

    async def cause(self) -> str:
        """Why it is over."""
        ...

    def probe(self) -> None:
        """Have it write down where it is, if it can."""
        ...

    def kill(self) -> str:
        """End it at once; where it was, as the end of a sentence, if that is known."""
        ...

    async def end(self) -> None: ...


class Succession:
    """One life after another: when one is over, the next begins as soon as it is needed."""

    def __init__(self, start: Callable[[], Awaitable[Life]]) -> None:
        self._start = start
        self._life: Life | None = None
        self._starting = asyncio.Lock()
        self._first = True

    async def present(self) -> Life:
        """The life that goes on, begun if it has to be; an error where none begins."""
        if self._life is not None and not self._life.over:
            return self._life
        async with self._starting:
            if self._life is None or self._life.over:
                await self.end()
                self._life = await self._begin()
            return self._life

    async def _begin(self) -> Life:
        """A life. A later one may be killed as it begins, by whatever killed the one before it: it is tried again."""
        tries, self._first = 1 if self._first else RESTARTS, False
        for number in range(1, tries):
            try:
                return await self._start()
            except RunError:
                await asyncio.sleep(0.5 * number)
        return await self._start()

    async def end(self) -> None:
        """End the life that goes on, if there is one."""
        if self._life is not None:
            await self._life.end()
            self._life = None


@dataclass(slots=True)
class _Sent:
    """A job that is running over there."""

    job: Job
    wait: Wait


@dataclass(slots=True)
class _Verdict:
    """Why a life was ended from here, and the jobs that may have been at fault."""

    silent_s: float
    blamed: dict[int, str] = field(default_factory=dict)
    """The stage of each, by the identity of the job."""
    place: str = ""


class DistantWorker:
    """A `HiredWorker`. One that dies is replaced when the next job comes."""

    def __init__(
        self, name: str, start: Callable[[Answer], Awaitable[Life]], rollout: RolloutConfig, engine: Generator
    ) -> None:
        self._name = name
        self._engine = engine
        self._lives = Succession(lambda: start(self._answer))
        self._life: Life | None = None
        """The one that was given the last job."""
        self._heard = 0.0
        self._running: dict[int, _Sent] = {}
        self._sessions: dict[str, _Sent] = {}
        """The same, by the session's name."""
        self._verdict: _Verdict | None = None
        """On that life."""
        self._timer: asyncio.TimerHandle | None = None
        self._patience_s = _patience_s(rollout)

    @classmethod
    async def started(
        cls, name: str, start: Callable[[Answer], Awaitable[Life]], rollout: RolloutConfig, engine: Generator
    ) -> Self:
        """A worker that has answered, or an error. `start` is given what answers the worker's questions."""
        worker = cls(name, start, rollout, engine)
        await worker._lives.present()
        return worker

    async def run(self, job: Job) -> Trajectory | Dropped:
        """Make one attempt over there. If the worker dies, that attempt has failed."""
        life = await self._lives.present()
        now = asyncio.get_running_loop().time()
        if life is not self._life:
            self._life, self._heard, self._verdict = life, now, None
        wait = Wait(job.task.uid, job.sample, "agent loop", now, self._name, "sent to the worker")
        sent = self._running[id(job)] = self._sessions[f"{job.task.uid}/{job.sample}"] = _Sent(job, wait)
        self._watch()
        try:
            result: Trajectory | Dropped = await life.peer.ask(SentJob(job, capture()))
            return self._checked(result, job)
        except ChannelClosed:
            verdict = self._verdict if life is self._life else None
            if verdict is not None and id(job) not in verdict.blamed:
                raise Interrupted(f"another session held {self._name} up") from None
            detail = f"{self._name} died: {await life.cause()}"
            kind: type[Failure] = LoopFailure
            if verdict is not None:
                kind = STAGES.get(verdict.blamed[id(job)], LoopFailure)
                detail = f"held {self._name} up for {verdict.silent_s:.0f} s, which was killed{verdict.place}"
            failed = Outcome.failed(kind(detail))
            return Trajectory(
                job.task.uid, job.sample, (), failed, attempt=job.attempt, data_source=job.task.data_source
            )
        finally:
            del self._running[id(job)]
            if self._sessions.get(f"{job.task.uid}/{job.sample}") is sent:
                del self._sessions[f"{job.task.uid}/{job.sample}"]

    def _checked(self, result: Trajectory | Dropped, job: Job) -> Trajectory | Dropped:
        """The attempt that was asked for, without a score: a worker has none to give."""
        task = job.task
        if isinstance(result, Dropped):
            whose = result.uid == task.uid
        else:
            asked = (task.uid, job.sample, job.attempt, task.data_source)
            whose = (result.uid, result.sample, result.attempt, result.data_source) == asked and result.reward is None
        if whose:
            return result
        failed = Outcome.failed(LoopFailure(f"{self._name} answered with another trajectory than it was asked for"))
        return Trajectory(task.uid, job.sample, (), failed, attempt=job.attempt, data_source=task.data_source)

    async def _answer(self, body: Any) -> Any:
        """What the worker asks for is tokens; what it tells is what its sessions wait for."""
        self._heard = now = asyncio.get_running_loop().time()
        if isinstance(body, WaitReport):
            return self._note(body, now)
        sent = self._sessions.get(body.session)
        if sent is None:  # withdrawn by now, or not one of ours
            raise RequestRefused(f"{self._name} asked for tokens of session {body.session!r}, which it does not run")
        sent.wait = replace(sent.wait, stage="generate", since=now)
        completion = await self._engine.generate(body)
        sent.wait = replace(sent.wait, stage="loop", since=asyncio.get_running_loop().time())
        return completion

    def _note(self, report: WaitReport, now: float) -> None:
        for wait in report.waits:
            sent = self._sessions.get(f"{wait.uid}/{wait.sample}")
            if sent is not None:
                since, before = now - wait.since, sent.wait
                same = wait.stage == before.stage and abs(since - before.since) < _SAME_S
                server = wait.server or self._name
                sent.wait = replace(wait, since=before.since if same else since, server=server)

    def _watch(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(REPORT_S, self._look, loop.time() + REPORT_S)

    def _look(self, due: float) -> None:
        """Give the worker up where it has been silent for too long. One timer, while jobs run."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        if now - due > REPORT_S:
            self._heard = now  # this loop was late itself: reports may lie unread
        silent_s = now - self._heard
        if self._running and self._verdict is None and silent_s > self._patience_s and self._life is not None:
            self._verdict = _Verdict(silent_s, self._suspects())
            self._life.probe()
            asyncio.get_running_loop().call_later(PROBE_S, self._kill, self._life, self._verdict)
        if self._running:
            self._watch()

    def _suspects(self) -> dict[int, str]:
        """Jobs in the user's code when the worker was last heard of; all, where there is none."""
        stages = {at: sent.wait.stage for at, sent in self._running.items()}
        return {at: stage for at, stage in stages.items() if stage != "generate"} or stages

    def _kill(self, life: Life, verdict: _Verdict) -> None:
        verdict.place = life.kill()

    def waits(self) -> Iterator[Wait]:
        """What every open job is waiting for, as the worker said last."""
        for sent in self._running.values():
            yield sent.wait

    async def close(self) -> None:
        """End the process or actor; at once, where it does not listen."""
        if self._timer is not None:
            self._timer.cancel()
        if self._life is not None and asyncio.get_running_loop().time() - self._heard > GIVE_UP_S:
            self._life.kill()
        await self._lives.end()


def _patience_s(rollout: RolloutConfig) -> float:
    """How long a worker may be silent: longer than any call that may hold it up within its deadline."""
    turns = rollout.multi_turn
    longest = max(turns.tool_timeout_s, turns.environment_timeout_s if turns.environment else 0.0)
    return min(longest, rollout.limits.session_timeout_s) + GIVE_UP_S
