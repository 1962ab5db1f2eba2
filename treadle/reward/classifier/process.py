"""A classifier in a process of its own, seen from the thread that asks it.

Owns the life of that process: start, deadline, death and restart. All calls block, and come from one thread;
`interrupt` alone comes from any. Trusts nothing the process says: its answers are JSON of bounded size.
Invariant: a process that is late, dies or garbles an answer is gone before the failure is raised, and the next batch
gets a new one. When this process dies, by SIGKILL too, the kernel ends that one.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import IO, Any

from treadle.config.reward import ClassifierConfig
from treadle.errors import ConfigError, Mistake
from treadle.exit_status import describe_exit
from treadle.reward.result import MAX_RESULT_BYTES, Fault, ScoreFailure
from treadle.reward.sandbox.limits import kill_tree
from treadle.reward.sandbox.protocol import HEADER

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from treadle.reward.classifier.process_main import main; main()"
)
"""Its program text. Arguments: the parent's import path, the channel, the lifeline."""

END_TIMEOUT_S = 5.0
LAST_WORDS = 400


class ClassifierProcess:
    """A backend of `Batches`."""

    def __init__(self, classifier: ClassifierConfig, device: str) -> None:
        self._classifier = classifier
        self._device = device
        self._interrupted = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._lifeline = -1
        self._errors: IO[bytes] | None = None

    def load(self) -> None:
        """Start a process that loads its model. ConfigError where it cannot, ScoreFailure where it dies or is late."""
        self.close()
        self._spawn()
        classifier = self._classifier
        setup = {
            "path": classifier.path,
            "device": self._device,
            "dtype": classifier.dtype,
            "memory_mb": classifier.memory_mb,
            "gpu_memory_utilization": classifier.gpu_memory_utilization,
        }
        limit_s = classifier.launch_timeout_s
        answer = self._ask(setup, limit_s, f"was not loaded within launch_timeout_s={limit_s:g}")
        if mistakes := answer.get("mistakes"):
            self.close()
            raise ConfigError(Mistake(key, problem, fix=fix) for key, problem, fix in mistakes)

    def score(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        """The logit of each text."""
        if self._process is None or self._process.poll() is not None:
            self._restart()
        timeout_s = self._classifier.timeout_s
        answer = self._ask({"texts": texts}, timeout_s, f"computed for more than timeout_s={timeout_s:g}")
        scores = answer.get("scores")
        if not isinstance(scores, list) or len(scores) != len(texts):
            raise self._end(Fault.CRASH, "garbled an answer")
        return [float(score) for score in scores]

    def interrupt(self) -> None:
        """Kill the process, so that whoever waits for it hears at once, and start no other."""
        self._interrupted = True
        process = self._process
        if process is not None and process.poll() is None:
            kill_tree(process.pid)

    def close(self) -> None:
        """Kill the process and wait until it is gone."""
        if self._process is not None:
            kill_tree(self._process.pid)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
            self._process = None
        if self._channel is not None:
            self._channel.close()
            os.close(self._lifeline)
            self._channel = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _restart(self) -> None:
        """A new process, where the model could once be loaded; that it now cannot is no mistake of the config."""
        try:
            self.load()
        except (ConfigError, OSError) as error:
            raise ScoreFailure(Fault.CRASH, f"could not be loaded again: {error}") from error

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline_end, self._lifeline = os.pipe()
        self._channel, self._errors = ours, TemporaryFile()  # noqa: SIM115 - closed with the process
        arguments = (json.dumps(sys.path), str(theirs.fileno()), str(lifeline_end))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(theirs.fileno(), lifeline_end),
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(lifeline_end)
        if self._interrupted:
            kill_tree(self._process.pid)

    def _ask(self, message: Any, timeout_s: float, late: str) -> dict[str, Any]:
        """Send a message and read the answer to it, or the failure it reports."""
        assert self._channel is not None
        deadline = time.monotonic() + timeout_s
        body = json.dumps(message).encode()
        try:
            self._channel.settimeout(timeout_s)
            self._channel.sendall(HEADER.pack(len(body)) + body)
            size = HEADER.unpack(self._receive(HEADER.size, deadline))[0]
            answer = json.loads(self._receive(min(size, MAX_RESULT_BYTES), deadline))
        except TimeoutError as error:
            raise self._end(Fault.TIMEOUT, late) from error
        except OSError as error:
            raise self._end(Fault.CRASH, "ended") from error
        except ValueError as error:
            raise self._end(Fault.CRASH, "garbled an answer") from error
        if not isinstance(answer, dict):
            raise self._end(Fault.CRASH, "garbled an answer")
        if "fault" in answer:
            raise ScoreFailure(Fault(answer["fault"]), str(answer["problem"]))
        return answer

    def _receive(self, size: int, deadline: float) -> bytes:
        assert self._channel is not None
        data = b""
        while len(data) < size:
            self._channel.settimeout(max(1e-3, deadline - time.monotonic()))
            piece = self._channel.recv(size - len(data))
            if not piece:
                raise ConnectionError("the channel is closed")
            data += piece
        return data

    def _end(self, fault: Fault, problem: str) -> ScoreFailure:
        """Kill the process, and say what is known of its end."""
        words, status = "", None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                status = self._process.wait(0.2 if fault is Fault.CRASH else 0.0)
            words = self._last_words()
        self.close()
        if status is not None:
            how = "killed" if self._interrupted else describe_exit(status)
            problem = f"{problem}: its process ended: {how}"
        return ScoreFailure(fault, f"{problem}; its last words: {words}" if words else problem)

    def _last_words(self) -> str:
        assert self._errors is not None
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - LAST_WORDS))
        return " ".join(self._errors.read().decode(errors="replace").split())
