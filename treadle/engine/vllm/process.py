"""The server process of a vLLM replica, as its owner sees it: started, listened to, ended.

Owns the process group, the socket it listens on and the last lines it printed. Knows no protocol beyond the greeting.
Invariant: when `end` returns, no process of the group is left; when the owner dies, the server ends by itself.
"""

import asyncio
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from treadle.config.rollout import ModelConfig, RolloutConfig
from treadle.cores import num_cores
from treadle.engine.vllm.protocol import FrameKind, ReplicaSocket, ReplicaSocketClosed, ServerHello, VLLMServerSetup
from treadle.errors import DeadlineError, EngineFailure
from treadle.exit_status import describe_exit
from treadle.model.tokenizer import resolve_model_path
from treadle.types import NOTHING

_KEPT_LINES = 300
_LAST_LINES = 15
_CAUSE = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt): .+)$")
"""What a traceback ends with. vLLM's processes repeat each other's: the first one is where it began."""
_LINE_BYTES = 1 << 16
_EXIT_S = 20.0
"""How long a server that hung up may take to be gone. Killed ones are gone at once, others clean up."""
_EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""Without graphs nothing is compiled, vLLM's sampler included: its first step would take many seconds."""


class ServerProcess:
    """Built by `start`; the constructor only holds."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, folder: Path, launch_s: float) -> None:
        self.name = name
        self.process = process
        self._folder = folder
        self._launch_s = launch_s
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._exit = ""
        self._listening = asyncio.ensure_future(self._listen())

    @classmethod
    async def start(
        cls,
        rollout: RolloutConfig,
        model: ModelConfig,
        *,
        name: str,
        device: str = "cpu",
        environment: Mapping[str, str] = NOTHING,
    ) -> "ServerProcess":
        """Launch a server. It is not up yet: `connect` waits for that."""
        directory = resolve_model_path(model.path, origin=model.origin("path"))
        folder = Path(tempfile.mkdtemp(prefix="treadle-vllm-"))
        try:
            process = await _spawn(folder, _variables(rollout, device, environment))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        server = cls(name, process, folder, rollout.limits.launch_timeout_s)
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(VLLMServerSetup(rollout, model, str(directory), tuple(sys.path))))
        return server

    async def connect(self) -> tuple[ReplicaSocket, ServerHello]:
        """A client's end, and the server's greeting once it is up. Within the launch deadline, or an error."""
        link = await ReplicaSocket.connect(str(self._folder / "socket"))
        try:
            return link, await self._greeting(link)
        except BaseException:
            link.close()
            await link.wait_closed()
            raise

    async def _greeting(self, link: ReplicaSocket) -> ServerHello:
        try:
            async with asyncio.timeout(self._launch_s):
                kind, _, body = await link.receive()
        except TimeoutError:
            raise self.late() from None
        except ReplicaSocketClosed:
            raise EngineFailure(await self.explain_exit("while it started")) from None
        greeting = pickle.loads(body)
        if kind is FrameKind.FAILURE:
            raise greeting
        assert isinstance(greeting, ServerHello), "the first frame is a greeting, or the reason why there is none"
        return greeting

    def late(self) -> DeadlineError:
        """The error of a server that does not serve in time, with what it printed last."""
        limit = f"rollout.limits.launch_timeout_s = {self._launch_s:g}"
        return DeadlineError(f"{self.name} did not start within {limit}{self._last_lines()}")

    async def explain_exit(self, when: str = "") -> str:
        """How the process ended, and what it printed last. For when it has ended, or is about to."""
        try:
            async with asyncio.timeout(_EXIT_S):
                await self.process.wait()
                await self._listening
        except TimeoutError:
            return f"{self.name} closed its socket{' ' + when if when else ''}, and is not gone yet{self._last_lines()}"
        assert self.process.returncode is not None
        if not self._exit:
            self._exit = describe_exit(self.process.returncode)
        return f"{self.name} died{' ' + when if when else ''}: {self._exit}{self._last_lines()}"

    def _last_lines(self) -> str:
        """The first error among the lines that are kept, and the last few of them."""
        cause = next((found[1] for line in self._lines if (found := _CAUSE.search(line))), "")
        lines = "".join(f"\n    {line}" for line in list(self._lines)[-_LAST_LINES:])
        return f"{': ' + cause if cause else ''}; its last lines:{lines}" if lines else ""

    async def _listen(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than any log line should be
                continue
            if not line:
                return
            self._lines.append(line.decode(errors="replace").rstrip())

    async def end(self, timeout_s: float) -> None:
        """Let the server end in order, and what does not end in time by force."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self.process.wait()
        except TimeoutError:
            pass
        finally:
            self._kill_group()
            await self.process.wait()
            await asyncio.wait({self._listening}, timeout=_EXIT_S)
            self._listening.cancel()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _kill_group(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # all of them ended by themselves


async def _spawn(folder: Path, variables: Sequence[str]) -> asyncio.subprocess.Process:
    """The server, which listens on a socket in `folder`."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        return await asyncio.create_subprocess_exec(
            *("env", *variables, sys.executable, "-m", "treadle.engine.vllm.server", str(listener.fileno())),
            pass_fds=[listener.fileno()],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LINE_BYTES,
            start_new_session=True,
        )


def _variables(rollout: RolloutConfig, device: str, environment: Mapping[str, str]) -> list[str]:
    """What the server's environment has beyond ours."""
    on_cpu = device == "cpu"
    eager = _EAGER if rollout.enforce_eager or on_cpu else {}
    added = {**eager, **(_share_cores(rollout) if on_cpu else {}), **environment}
    return [f"{name}={value}" for name, value in added.items()]


def _share_cores(rollout: RolloutConfig) -> dict[str, str]:
    """A share of the cores for each worker, and one for the trainer.

    By itself vLLM binds the workers of every replica to the same cores, and has no tensor parallelism on one socket.
    """
    workers = rollout.tensor_model_parallel_size * rollout.replicas_per_node
    threads = max(1, num_cores() // (workers + 1))
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
