"""Classifier in a process of its own: the end of the thread that asks it, and the process.

Owns the deadline, the death and the restart of that process. All calls block, and come from one thread; `interrupt`
alone comes from any. Trusts nothing the process says: its answers are checked JSON and raw arrays of bounded size.
Invariant: a process that is late, dies or garbles an answer is gone before the failure is raised, and the next batch
gets a new one, until one cannot be loaded several times in a row. On a CPU the kernel bounds the memory of the
process, on a GPU torch does.
"""

import resource
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.config.reward import ClassifierConfig
from treadle.errors import ConfigError, DeadlineError, RunError
from treadle.exit_status import describe_exit
from treadle.process.channel import ChannelClosed, ChannelCodec
from treadle.process.child_handle import ChildProcess, DiedWhileStarting, ProcessSpec
from treadle.process.child_main import BlockingParent
from treadle.process.codec import RecordCodec
from treadle.process.launcher import BlockingLaunch, BlockingProcess
from treadle.process.rpc import RpcReply, RpcRequest
from treadle.process.supervisor import RestartFailed, RestartPolicy, restart_blocking
from treadle.reward.result import MAX_RESULT_BYTES, Fault, ScoreFailure, blame_function

if TYPE_CHECKING:
    from treadle.reward.classifier.model import ClassifierModel


@dataclass(frozen=True, slots=True)
class ClassifierSetup:
    """What the process is told first."""

    path: str
    device: str
    dtype: str
    memory_mb: int
    gpu_memory_utilization: float


@dataclass(frozen=True, slots=True)
class ClassifierReply:
    """The logits of a batch; or the fault and the problem that it came to."""

    scores: tuple[float, ...] = ()
    fault: str = ""
    problem: str = ""

    @classmethod
    def of(cls, failure: ScoreFailure) -> "ClassifierReply":
        if failure.fault is Fault.MEMORY and failure.__cause__ is not None:
            return cls(fault=failure.fault, problem="ran out of memory (memory_mb)")
        return cls(fault=failure.fault, problem=failure.problem)


CODEC = ChannelCodec(to_parent=RecordCodec(replies=(ClassifierReply,), max_bytes=MAX_RESULT_BYTES).frames())


RESTART = RestartPolicy(attempts=3, first_wait_s=1.0)


class ClassifierProcess:
    """A backend of `Batches`."""

    def __init__(self, classifier: ClassifierConfig, device: str) -> None:
        self._classifier = classifier
        self._device = device
        self._interrupted = threading.Event()
        self._lost_for_good = ""
        """Why it is not started again."""
        self._child: ChildProcess | None = None
        """Of the process that runs, or starts."""
        self._process: BlockingProcess | None = None

    def load(self) -> None:
        """Start a process that loads its model. ConfigError where it cannot, ScoreFailure where it dies or is late."""
        self.close()
        classifier = self._classifier
        limit_s = classifier.launch_timeout_s
        setup = ClassifierSetup(
            classifier.path, self._device, classifier.dtype, classifier.memory_mb, classifier.gpu_memory_utilization
        )
        serve = f"{__name__}:{serve_classifier.__name__}"
        launch = BlockingLaunch.begin(ProcessSpec("classifier", serve, setup, limit_s, codec=CODEC, quiet=True))
        self._child = launch.child
        if self._interrupted.is_set():
            self._child.kill()
        try:
            self._process = launch.ready()
        except ConfigError:
            raise
        except DeadlineError as error:
            problem = f"was not loaded within launch_timeout_s={limit_s:g}{self._child.last_output()}"
            raise ScoreFailure(Fault.TIMEOUT, problem) from error
        except DiedWhileStarting as error:
            raise ScoreFailure(Fault.CRASH, self._died("ended", error.status)) from error
        except RunError as error:
            raise ScoreFailure(Fault.CRASH, str(error)) from error
        started = self._process.started
        if started is not None:
            self.close()
            raise ScoreFailure(Fault(started["fault"]), str(started["problem"]))

    def score(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        """The logit of each text."""
        if self._process is None or self._process.child.exited.done():
            self._restart()
        assert self._process is not None
        timeout_s = self._classifier.timeout_s
        try:
            reply: ClassifierReply = self._process.peer.submit(tuple(texts)).result(timeout_s)
        except TimeoutError as error:
            words = self._process.child.last_output()
            self.close()
            problem = f"computed for more than timeout_s={timeout_s:g}{words}"
            raise ScoreFailure(Fault.TIMEOUT, problem) from error
        except ChannelClosed as error:
            raise self._lost() from error
        if reply.fault:
            raise ScoreFailure(Fault(reply.fault), reply.problem)
        if len(reply.scores) != len(texts):
            self.close()
            raise ScoreFailure(Fault.CRASH, "garbled an answer")
        return list(reply.scores)

    def interrupt(self) -> None:
        """Kill the process, so that whatever waits for it hears at once, and start no other."""
        self._interrupted.set()
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """Kill the process and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.end()
        self._process = self._child = None

    def _restart(self) -> None:
        """A new process, where the model could once be loaded; given up when that fails as often as the policy says."""
        if not self._lost_for_good:
            try:
                return restart_blocking(self._load_again, RESTART, retry=ScoreFailure, wait=self._interrupted.wait)
            except RestartFailed as failed:
                self._lost_for_good = str(failed)
        raise ScoreFailure(Fault.CRASH, f"could not be loaded again, and was given up: {self._lost_for_good}")

    def _load_again(self) -> None:
        """One attempt; that the model cannot be loaded now is no mistake of the config."""
        if self._interrupted.is_set():
            raise RestartFailed("it was stopped")
        try:
            self.load()
        except (ConfigError, OSError) as error:
            raise ScoreFailure(Fault.CRASH, str(error)) from error

    def _lost(self) -> ScoreFailure:
        """The process has gone, or was refused: what is known of its end."""
        assert self._process is not None
        if self._process.peer.problem is not None:
            self.close()
            return ScoreFailure(Fault.CRASH, "garbled an answer")
        problem = self._died("ended", self._process.child.exited.result())
        self.close()
        return ScoreFailure(Fault.CRASH, problem)

    def _died(self, problem: str, status: int) -> str:
        assert self._child is not None
        how = "killed" if self._interrupted.is_set() and status == -signal.SIGKILL else describe_exit(status)
        return f"{problem}: its process ended: {how}{self._child.last_output()}"


def serve_classifier(parent: BlockingParent, setup: ClassifierSetup) -> None:
    """Load one model, say so, then score batch after batch until the channel closes."""
    try:
        with blame_function(""):
            loaded = _load(setup)
    except ScoreFailure as failure:
        reply = ClassifierReply.of(failure)
        return parent.started({"fault": reply.fault, "problem": reply.problem})
    if isinstance(loaded, ConfigError):
        raise loaded
    parent.started()
    with suppress(ChannelClosed):
        while True:
            request: RpcRequest = parent.channel.receive()
            parent.channel.send(RpcReply(request.number, _score(loaded, request.body)))


def _score(network: "ClassifierModel", texts: tuple[tuple[int, ...], ...]) -> ClassifierReply:
    try:
        with blame_function(""):
            return ClassifierReply(tuple(network.score(texts)))
    except ScoreFailure as failure:
        return ClassifierReply.of(failure)


def _load(setup: ClassifierSetup) -> "ClassifierModel | ConfigError":
    """The model, or what is wrong with its section."""
    import torch

    from treadle.reward.classifier.model import ClassifierModel

    device = setup.device
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if device == "cpu":
        most = setup.memory_mb << 20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    network = ClassifierModel(setup.path, device=device, dtype=setup.dtype)
    index = torch.device(device).index or 0
    if device != "cpu" and index < torch.cuda.device_count():  # one that is not there is refused by `load`
        torch.cuda.set_per_process_memory_fraction(setup.gpu_memory_utilization, index)
    try:
        network.load()
    except ConfigError as error:
        return error
    return network
