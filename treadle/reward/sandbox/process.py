"""Worker process, seen from the parent: started, asked, watched, killed.

Owns the life of one process: its environment, its channel, its lifeline, its limits and what its end means. Trusts
nothing it says.
Invariant: `start` returns a worker that has loaded its functions; after `kill` no process of its tree is left. When
the parent dies, the kernel closes the lifeline and kills the worker's group.
"""

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

from treadle.config.reward import RewardConfig
from treadle.errors import ConfigError, Mistake
from treadle.reward.result import Fault, RewardResult, ScoreFailure, decode, name_function
from treadle.reward.sandbox.limits import Usage, kill_group, kill_tree, measure
from treadle.reward.sandbox.protocol import (
    BOOT,
    FrameStream,
    WorkerReport,
    WorkerSetup,
    explain_status,
    pack,
    past_cpu_time,
    read_report,
    read_stamped,
    stamp,
)
from treadle.reward.worker_output import PrintedLines

START_TIMEOUT_S = 60.0
"""How long a worker may take to import its functions."""

END_TIMEOUT_S = 5.0
"""How long a killed process may take to be gone."""

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


def worker_environment(named: Iterable[str] = ()) -> dict[str, str]:
    """The environment of a worker: what programs need to run, and what the config names."""
    allowed = ENVIRONMENT.union(named)
    return {
        name: value for name, value in os.environ.items() if name in allowed or name.startswith(ENVIRONMENT_PREFIXES)
    }


class WorkerProcess(asyncio.SubprocessProtocol):
    """One process that runs one score at a time."""

    def __init__(self, reward: RewardConfig, names: tuple[str, ...], lifeline: int) -> None:
        self.report = WorkerReport((), {}, ())
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reward, self._names = reward, names
        self._lifeline = lifeline
        self._stream = FrameStream()
        self._printed = PrintedLines(asyncio.get_running_loop().time)
        self._process: asyncio.SubprocessTransport | None = None
        self._killed = False
        self._number = 0
        """Of the next reply."""
        self._before = Usage()
        """What it had used when the score began."""

    @classmethod
    async def start(cls, reward: RewardConfig, names: tuple[str, ...], sandbox: bool = False) -> "WorkerProcess":
        """A worker that has loaded these functions; all of them sandboxed, or none.

        ConfigError where they cannot be used, ScoreFailure where the process dies or does not get ready.
        """
        ours, theirs = socket.socketpair()
        lifeline_end, lifeline = os.pipe()
        worker = cls(reward, names, lifeline)
        try:
            await worker._spawn(ours, theirs.fileno(), lifeline_end)
            with name_function(", ".join(names)):
                worker.report = await worker._load(sandbox)
        except BaseException:
            await asyncio.shield(worker.end())
            raise
        finally:
            theirs.close()
            os.close(lifeline_end)
        return worker

    async def _spawn(self, ours: socket.socket, theirs: int, lifeline_end: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._stream, sock=ours)
        arguments = (json.dumps(sys.path), str(theirs), str(lifeline_end))
        nowhere, here, same = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
        functions = (self._reward.functions[name] for name in self._names)
        named = [variable for function in functions for variable in function.env]
        await loop.subprocess_exec(
            lambda: self, sys.executable, "-c", BOOT, *arguments,
            stdin=nowhere, stdout=here, stderr=same, pass_fds=(theirs, lifeline_end), start_new_session=True,
            env=worker_environment(named),
        )  # fmt: skip

    async def _load(self, sandbox: bool) -> WorkerReport:
        """Hand over the setup and hear which arguments the functions need."""
        reward = self._reward
        chosen = ((name, reward.functions[name]) for name in self._names)
        functions = tuple(
            (name, function.path, function.kwargs, function.effective_scope()) for name, function in chosen
        )
        self._stream.send(pack(WorkerSetup(functions, reward.cpu_time_s, reward.memory_mb, sandbox)))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                report = read_report(await self._stream.receive())
        except TimeoutError as error:
            raise ScoreFailure(Fault.TIMEOUT, f"was not imported within {START_TIMEOUT_S:g} s") from error
        self._stream.asked = False
        mistakes = [locate(reward, name, mistake) for name, found in report.mistakes.items() for mistake in found]
        if mistakes:
            raise ConfigError(mistakes)
        return report

    async def ask(self, payload: bytes, names: tuple[str, ...]) -> dict[str, RewardResult]:
        """What each of these functions says. A worker that is late, dies, is cancelled or garbles its answer is
        killed."""
        scores: dict[str, RewardResult] = {}
        deadline_s = asyncio.get_running_loop().time() + self._reward.timeout_s
        token = secrets.token_bytes(16)
        self._before = self._measure()
        self._stream.asked = True
        self._stream.send(stamp(self._number, token, json.dumps(names).encode()))
        self._stream.send(payload)
        for name in names:
            with name_function(name):
                reply = await self._hear(deadline_s, token)
                if isinstance(reply, ScoreFailure):
                    self._end_request()
                    raise reply
            scores[name] = reply
        self._end_request()
        return scores

    def _end_request(self) -> None:
        """From here on nothing is due: what still comes is a second reply, or a forged one."""
        self._stream.asked = False
        if not self._stream.quiet:
            self.kill()

    async def _hear(self, deadline_s: float, token: bytes) -> RewardResult | ScoreFailure:
        try:
            number, given, message = read_stamped(await self._wait(deadline_s))
            if (number, given) != (self._number, token):
                raise ScoreFailure(Fault.CRASH, "gave an answer that belongs to no request")
            self._number += 1
            reply = decode(message)
        except BaseException:
            self.kill()
            raise
        if isinstance(reply, ScoreFailure) and reply.fault is Fault.MEMORY:
            self.kill()  # what filled the memory may still be there
        return reply

    async def _wait(self, deadline_s: float) -> bytes:
        """The next message, within deadline, CPU time and memory."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout_at(min(deadline_s, loop.time() + WATCH_S)):
                    return await self._stream.receive()
            except TimeoutError:
                self._check_usage()
                if loop.time() >= deadline_s:
                    computed = self._measure().cpu_time_s - self._before.cpu_time_s > MOSTLY * self._reward.timeout_s
                    problem = f"ran past reward.timeout_s={self._reward.timeout_s:g}"
                    raise ScoreFailure(Fault.TIMEOUT, problem, past_deadline=True, computed=computed) from None

    def _check_usage(self) -> None:
        """What the kernel's limits do not see: timers that were undone, shared memory, the sum over a tree."""
        used, reward = self._measure(), self._reward
        if used.cpu_time_s - self._before.cpu_time_s > reward.cpu_time_s:
            raise past_cpu_time(reward.cpu_time_s)
        if used.memory_mb > max(self._before.memory_mb, 0.0) + reward.memory_mb:
            problem = "ran out of memory (reward.memory_mb), with the processes it started and what they share"
            raise ScoreFailure(Fault.MEMORY, problem)

    def _measure(self) -> Usage:
        return Usage() if self._process is None else measure(self._process.get_pid())

    @property
    def usable(self) -> bool:
        """Alive, with nothing unread: an answer nobody asked for is not trusted."""
        return not self._killed and not self.gone.done() and self._stream.quiet

    def kill(self) -> None:
        """Kill the whole tree now; `gone` is done when the system says so."""
        if self._killed:
            return
        self._killed = True
        if self._process is None:
            self.gone.set_result(None)
        elif self._process.get_returncode() is None:
            kill_tree(self._process.get_pid())
        # Only now: either of these can end the worker by itself, and its tree would be lost from sight.
        self._stream.abort()
        os.close(self._lifeline)

    async def end(self) -> None:
        """Kill, and wait until it is gone."""
        self.kill()
        await asyncio.wait([self.gone], timeout=END_TIMEOUT_S)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._process = cast(asyncio.SubprocessTransport, transport)  # uvloop's has the methods, not the class

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        """Something was printed."""
        self._printed.add(data if isinstance(data, bytes) else data.encode())

    def process_exited(self) -> None:
        """The process is dead, by our hand or another's; what it left in its group goes too."""
        assert self._process is not None
        status = self._process.get_returncode()
        assert status is not None
        kill_group(self._process.get_pid())
        self._process.close()
        self._stream.fail(explain_status(status, self._reward.cpu_time_s, ours=self._killed))
        self.kill()

    def connection_lost(self, error: Exception | None) -> None:
        self._printed.end()
        if not self.gone.done():
            self.gone.set_result(None)


def locate(reward: RewardConfig, name: str, mistake: Mistake) -> Mistake:
    """A mistake about one function, with its full key and where the value came from."""
    origin = reward.functions[name].origin(mistake.key)
    return replace(mistake, key=f"reward.functions.{name}.{mistake.key}", origin=origin)
