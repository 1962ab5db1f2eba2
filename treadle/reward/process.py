"""A worker process, seen from the parent: started, asked, killed.

Owns the life of one process: its channel, its lifeline, its deadline and what its end means. Trusts nothing it says.
Invariant: `start` returns a worker that has loaded its functions; after `kill` no process of its tree is left. When
the parent dies, the kernel closes the lifeline and kills the worker's group.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from typing import cast

from treadle.config.reward import RewardConfig
from treadle.errors import ConfigError, Mistake
from treadle.exit_status import describe_exit
from treadle.reward.failure import Fault, ScoreFailure, name_function
from treadle.reward.frame import FrameStream
from treadle.reward.handshake import BOOT, Setup, read_report
from treadle.reward.kin import cpu_time_s, kill_group, kill_tree
from treadle.reward.packing import pack
from treadle.reward.printed import PrintedLines
from treadle.reward.verdict import Answer, decode

START_TIMEOUT_S = 60.0
"""How long a worker may take to import its functions."""

END_TIMEOUT_S = 5.0
"""How long a killed process may take to be gone."""

MOSTLY = 0.5
"""The share of a deadline on the CPU from which a score that is late was computing, and not waiting for something."""


class WorkerProcess(asyncio.SubprocessProtocol):
    """One process that runs one score at a time."""

    def __init__(self, reward: RewardConfig, names: tuple[str, ...], lifeline: int) -> None:
        self.needs: tuple[str, ...] = ()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reward, self._names = reward, names
        self._lifeline = lifeline
        self._stream = FrameStream()
        self._printed = PrintedLines(asyncio.get_running_loop().time)
        self._process: asyncio.SubprocessTransport | None = None
        self._killed = False
        self._computed_s = 0.0
        """CPU time it had used when the score began."""

    @classmethod
    async def start(cls, reward: RewardConfig, names: tuple[str, ...]) -> "WorkerProcess":
        """A worker that has loaded these functions.

        ConfigError where they cannot be used, ScoreFailure where the process dies or does not get ready.
        """
        ours, theirs = socket.socketpair()
        lifeline_end, lifeline = os.pipe()
        worker = cls(reward, names, lifeline)
        try:
            await worker._spawn(ours, theirs.fileno(), lifeline_end)
            with name_function(", ".join(names)):
                worker.needs = await worker._load()
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
        await loop.subprocess_exec(
            lambda: self, sys.executable, "-c", BOOT, *arguments,
            stdin=nowhere, stdout=here, stderr=same, pass_fds=(theirs, lifeline_end), start_new_session=True,
        )  # fmt: skip

    async def _load(self) -> tuple[str, ...]:
        """Hand over the setup and hear which arguments the functions need."""
        reward = self._reward
        chosen = ((name, reward.functions[name]) for name in self._names)
        functions = tuple(
            (name, function.path, function.kwargs, function.effective_scope()) for name, function in chosen
        )
        self._stream.send(pack(Setup(functions, reward.cpu_time_s, reward.memory_mb)))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                report = read_report(await self._stream.receive())
        except TimeoutError as error:
            raise ScoreFailure(Fault.TIMEOUT, f"was not imported within {START_TIMEOUT_S:g} s") from error
        mistakes = [locate(reward, name, mistake) for name, found in report.mistakes.items() for mistake in found]
        if mistakes:
            raise ConfigError(mistakes)
        return report.needs

    async def ask(self, payload: bytes, names: tuple[str, ...]) -> dict[str, Answer]:
        """What each of these functions says. A worker that is late, dies, is cancelled or garbles its answer is
        killed."""
        scores: dict[str, Answer] = {}
        deadline_s = asyncio.get_running_loop().time() + self._reward.timeout_s
        self._computed_s = self._measure_cpu()
        self._stream.send(json.dumps(names).encode())
        self._stream.send(payload)
        for name in names:
            with name_function(name):
                reply = await self._hear(deadline_s)
                if isinstance(reply, ScoreFailure):
                    raise reply
            scores[name] = reply
        return scores

    async def _hear(self, deadline_s: float) -> Answer | ScoreFailure:
        try:
            async with asyncio.timeout_at(deadline_s):
                reply = decode(await self._stream.receive())
        except TimeoutError as error:
            computed = self._measure_cpu() - self._computed_s > MOSTLY * self._reward.timeout_s
            self.kill()
            problem = f"ran past reward.timeout_s={self._reward.timeout_s:g}"
            raise ScoreFailure(Fault.TIMEOUT, problem, past_deadline=True, computed=computed) from error
        except BaseException:
            self.kill()
            raise
        if isinstance(reply, ScoreFailure) and reply.fault is Fault.MEMORY:
            self.kill()  # what filled the memory may still be there
        return reply

    def _measure_cpu(self) -> float:
        return 0.0 if self._process is None else cpu_time_s(self._process.get_pid())

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
        self._stream.fail(_explain(status, self._reward, ours=self._killed))
        self.kill()

    def connection_lost(self, error: Exception | None) -> None:
        self._printed.end()
        if not self.gone.done():
            self.gone.set_result(None)


def _explain(status: int, reward: RewardConfig, *, ours: bool) -> ScoreFailure:
    """What an exit status means; `ours`: it was killed from here."""
    if status == -signal.SIGPROF:
        problem = f"used more CPU than reward.cpu_time_s={reward.cpu_time_s:g}"
        return ScoreFailure(Fault.CPU_TIME, problem, past_deadline=True, computed=True)
    if status < 0:
        return ScoreFailure(Fault.CRASH, "was killed" if ours else f"was {describe_exit(status)}")
    return ScoreFailure(Fault.CRASH, f"ended its process with status {status}")


def locate(reward: RewardConfig, name: str, mistake: Mistake) -> Mistake:
    """A mistake about one function, with its full key and where the value came from."""
    origin = reward.functions[name].origin(mistake.key)
    return Mistake(f"reward.functions.{name}.{mistake.key}", mistake.problem, mistake.value, origin, mistake.fix)
