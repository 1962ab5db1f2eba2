"""Reward worker, seen from the parent: started, asked, watched, killed.

Owns the environment and the limits of one process, and what its end means. Trusts nothing it says.
Invariant: `start` returns a worker that has loaded its functions; after `kill` no process of its tree is left.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import replace

from treadle.config.reward import RewardConfig
from treadle.errors import ConfigError, DeadlineError, Mistake, RunError
from treadle.process.channel import ChannelClosed
from treadle.process.child_handle import DiedWhileStarting, ProcessSpec
from treadle.process.launcher import LocalProcess, SubprocessLauncher
from treadle.process.rpc import unguessable_numbers
from treadle.reward.result import Fault, RewardResult, ScoreFailure, decode, name_function
from treadle.reward.sandbox.limits import Usage, measure
from treadle.reward.sandbox.protocol import (
    WORKER_CODEC,
    FunctionReply,
    FunctionScore,
    PrintedLines,
    RewardWorkerSetup,
    WorkerReport,
    explain_status,
    pack,
    past_cpu_time,
    read_report,
)
from treadle.sandbox.confine import usual_secrets

START_TIMEOUT_S = 60.0
"""How long a worker may take to import its functions."""

END_TIMEOUT_S = 5.0
"""How long a killed process may take to be gone."""

MAX_PROCESSES = 128
"""Of a worker and all that its function starts."""
WATCH_S = 0.25
"""How often a running score's CPU time and memory are read."""

MOSTLY = 0.5
"""The share of a deadline on the CPU from which a score that is late was computing, and not waiting for something."""

ENVIRONMENT = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "DYLD_LIBRARY_PATH",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_HOME",
        "HF_HOME",
        "XDG_CACHE_HOME",
    ]
)
"""The variables a worker is given. No key and no token is among them."""
ENVIRONMENT_PREFIXES = ("LC_", "PYTHON")

OUTSIDE = frozenset({-signal.SIGHUP, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL})
"""Exit statuses that say nothing about a function: something else ended its process, which is started once more."""


def worker_environment(named: Iterable[str] = ()) -> dict[str, str]:
    """The environment of a worker: what programs need to run, and what the config names."""
    allowed = ENVIRONMENT.union(named)
    return {
        name: value for name, value in os.environ.items() if name in allowed or name.startswith(ENVIRONMENT_PREFIXES)
    }


class WorkerProcess:
    """One process that runs one score at a time."""

    def __init__(self, reward: RewardConfig, process: LocalProcess, report: WorkerReport) -> None:
        self.report = report
        self.process = process
        self.gone: asyncio.Future[int] = asyncio.wrap_future(process.child.exited)
        self._reward = reward
        self._before = Usage()
        """What it had used when the score began."""

    @classmethod
    async def start(
        cls, reward: RewardConfig, names: tuple[str, ...], sandbox: bool = False, hidden: tuple[str, ...] = ()
    ) -> "WorkerProcess":
        """A worker that has loaded these functions; all of them sandboxed, or none. `hidden`: what code cannot read.

        ConfigError where they cannot be used, ScoreFailure where the process dies or does not get ready.
        """
        with name_function(", ".join(names)):
            process = await _launch(reward, names, sandbox, hidden)
            try:
                report = read_report(process.started)
                mistakes = [
                    locate(reward, name, mistake) for name, found in report.mistakes.items() for mistake in found
                ]
                if mistakes:
                    raise ConfigError(mistakes)
            except BaseException:
                await asyncio.shield(process.end())
                raise
            return cls(reward, process, report)

    async def ask(self, payload: bytes, names: tuple[str, ...]) -> dict[str, RewardResult]:
        """What each of these functions says. A worker that is late, dies, is cancelled or garbles its answer is
        killed."""
        scores: dict[str, RewardResult] = {}
        deadline_s = asyncio.get_running_loop().time() + self._reward.timeout_s
        self._before = self._measure()
        for at, name in enumerate(names):
            with name_function(name):
                reply = await self._request_score(FunctionScore(name, None if at else payload), deadline_s)
                if isinstance(reply, ScoreFailure):
                    raise reply
            scores[name] = reply
        return scores

    async def _request_score(self, order: FunctionScore, deadline_s: float) -> RewardResult | ScoreFailure:
        request = asyncio.ensure_future(self.process.peer.request(order))
        try:
            reply = decode(await self._wait(request, deadline_s))
        except BaseException:
            request.cancel()
            self.kill()
            raise
        if isinstance(reply, ScoreFailure) and reply.fault is Fault.MEMORY:
            self.kill()  # what filled the memory may still be there
        return reply

    async def _wait(self, request: "asyncio.Future[FunctionReply]", deadline_s: float) -> bytes:
        """The reply, within deadline, CPU time and memory."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.wait({request}, timeout=min(WATCH_S, max(0.0, deadline_s - loop.time())))
            if request.done():
                try:
                    return request.result().data
                except ChannelClosed:
                    raise await self._explain_end() from None
            self._check_usage()
            if loop.time() >= deadline_s:
                computed = self._measure().cpu_time_s - self._before.cpu_time_s > MOSTLY * self._reward.timeout_s
                problem = f"ran past reward.timeout_s={self._reward.timeout_s:g}"
                raise ScoreFailure(Fault.TIMEOUT, problem, past_deadline=True, computed=computed)

    async def _explain_end(self) -> ScoreFailure:
        """Why the channel closed under a request."""
        channel = self.process.channel
        if channel.flooded:
            return ScoreFailure(Fault.TOO_LARGE, "flooded its worker's channel")
        if channel.problem is not None:
            return ScoreFailure(Fault.CRASH, f"gave an answer that belongs to no request ({channel.problem})")
        ours = self.process.child.killed
        return explain_status(await asyncio.shield(self.gone), self._reward.cpu_time_s, ours=ours)

    def _check_usage(self) -> None:
        """What the kernel's limits do not see: timers that were undone, shared memory, the sum over a tree."""
        used, reward = self._measure(), self._reward
        if used.cpu_time_s - self._before.cpu_time_s > reward.cpu_time_s:
            raise past_cpu_time(reward.cpu_time_s)
        if used.processes > MAX_PROCESSES:
            raise ScoreFailure(Fault.CRASH, f"started more than {MAX_PROCESSES} processes")
        if used.memory_mb > max(self._before.memory_mb, 0.0) + reward.memory_mb:
            problem = "ran out of memory (reward.memory_mb), with the processes it started and what they share"
            raise ScoreFailure(Fault.MEMORY, problem)

    def _measure(self) -> Usage:
        return measure(self.process.pid)

    @property
    def over(self) -> bool:
        """Dead or killed, or something came that was not asked for."""
        return self.process.child.killed or self.process.over or self.process.channel.problem is not None

    def kill(self) -> None:
        """Kill the whole tree now; `gone` is done when the system says so."""
        self.process.kill()

    async def end(self) -> None:
        """Kill, and wait until it is gone."""
        self.kill()
        await self.process.end()


async def _launch(reward: RewardConfig, names: tuple[str, ...], sandbox: bool, hidden: tuple[str, ...]) -> LocalProcess:
    """A process that has loaded these functions, or has found mistakes; ScoreFailure where it has done neither."""
    chosen = [(name, reward.functions[name]) for name in names]
    functions = tuple(
        (name, function.path, function.kwargs, function.effective_scope(), function.python) for name, function in chosen
    )
    printed = PrintedLines(time.monotonic)
    spec = ProcessSpec(
        f"reward worker ({', '.join(names)})",
        "treadle.reward.sandbox.worker:serve_rewards",
        pack(RewardWorkerSetup(functions, reward.cpu_time_s, reward.memory_mb, sandbox, (*usual_secrets(), *hidden))),
        START_TIMEOUT_S,
        codec=WORKER_CODEC,
        environment=worker_environment(variable for _, function in chosen for variable in function.env),
        output=lambda data: printed.add(data) if data else printed.end(),
    )
    try:
        try:
            return await SubprocessLauncher().launch(spec, _refuse, numbers=unguessable_numbers())
        except DiedWhileStarting as error:
            if error.status not in OUTSIDE:
                raise
            return await SubprocessLauncher().launch(spec, _refuse, numbers=unguessable_numbers())
    except DeadlineError as error:
        raise ScoreFailure(Fault.TIMEOUT, f"was not imported within {START_TIMEOUT_S:g} s") from error
    except DiedWhileStarting as error:
        raise explain_status(error.status, reward.cpu_time_s) from error
    except RunError as error:
        raise ScoreFailure(Fault.CRASH, str(error)) from error


async def _refuse(request: object) -> object:
    raise AssertionError(f"a reward worker asks nothing: {request!r}")


def locate(reward: RewardConfig, name: str, mistake: Mistake) -> Mistake:
    """A mistake about one function, with its full key and where the value came from."""
    origin = reward.functions[name].origin(mistake.key)
    return replace(mistake, key=f"reward.functions.{name}.{mistake.key}", origin=origin)
