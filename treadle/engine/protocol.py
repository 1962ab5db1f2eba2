"""Engine protocol: from prompt ids to completions.

Every engine, and the router in front of several, implements these calls; `tests/contract/test_engine.py` says what
they promise. Failures are `EngineFailure`. A request that was aborted is not a failure but a completion that keeps the
tokens it has. Refuses to know where an engine runs and which component calls it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from treadle.errors import EngineFailure
from treadle.types import Completion, Request, StopReason

Encode = Callable[[str], Sequence[int]]
"""Text to ids, with no special tokens added."""

Decode = Callable[[Sequence[int]], str]
"""Ids to text."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as this process counts it, and as CUDA_VISIBLE_DEVICES names it to another."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights on their way to an engine, and what the engine must confirm."""

    version: int
    checksum: str
    tensors: Mapping[str, Any]
    """By their Hugging Face names. In one process a dict; to another process a map that can be pickled and opens where
    it is read. Read `batches_of` it through, once: a tensor may be gone when the next batch is taken. Empty: the engine
    holds the sender's own module."""


@dataclass(frozen=True, slots=True)
class ConfirmedWeights:
    """What an engine confirms after an update."""

    checksum: str
    """Of the weights it holds now."""
    pause_s: float = 0.0
    """How long it could sample nothing meanwhile; of several engines the longest."""


@runtime_checkable
class BatchedTensors(Protocol):
    """A map that is read some tensors at a time."""

    def batches(self) -> Iterator[Sequence[tuple[str, Any]]]: ...


def batches_of(tensors: Mapping[str, Any]) -> Iterator[Sequence[tuple[str, Any]]]:
    """The tensors of an update, those together that are there at once; no batch is empty."""
    if isinstance(tensors, BatchedTensors):
        yield from filter(None, tensors.batches())
    elif isinstance(tensors, dict):
        yield from filter(None, [list(tensors.items())])
    else:
        for pair in tensors.items():
            yield [pair]


class TensorShape(Protocol):
    """One tensor of an update that has yet to arrive."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> Sequence[int]: ...


@runtime_checkable
class KnownShapes(Protocol):
    """A map that knows its tensors before they arrive."""

    @property
    def specs(self) -> Sequence[TensorShape]: ...


def shapes_of(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[int]]]:
    """Names and shapes of an update's tensors, where they are known before one is read; none elsewhere."""
    if isinstance(tensors, dict):
        yield from ((name, tensor.shape) for name, tensor in tensors.items())
    elif isinstance(tensors, KnownShapes):
        yield from ((spec.name, spec.shape) for spec in tensors.specs)


ABORTED = Completion((), (), (), StopReason.ABORT)
"""The answer to a request that ended before it had a token."""


class EngineGone(EngineFailure):
    """The engine's process has ended."""


class TokenGenerator(Protocol):
    """Answers requests: an engine, or the router in front of several."""

    async def generate(self, request: Request) -> Completion: ...


class Engine(Protocol):
    """One replica. Built by its factory, whole; `close` is the last call. All calls come from one event loop."""

    @property
    def name(self) -> str:
        """Which replica this is, in logs, reports and trajectories."""
        ...

    @property
    def version(self) -> int:
        """The policy version of the weights in use."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Sample until a stop token, the token limit or an abort.

        The ids end with the stop token where there was one. Cancelling the call ends the work in the engine too.
        An engine that can tell tokens while it samples calls `request.on_tokens`, never after this has returned; the
        last tokens may come with the completion alone.
        """
        ...

    async def abort(self, session: str | None = None) -> None:
        """End the requests of one session, or all: they return what they have, with stop reason ABORT.

        Requests held back by a pause end as well, with no tokens. Later requests are served as ever.
        """
        ...

    async def pause(self) -> None:
        """Hold new requests back; running ones are aborted and keep their tokens. Then nothing is sampled."""
        ...

    async def resume(self) -> None:
        """Let held requests go on. Harmless when nothing is paused."""
        ...

    async def health(self) -> None:
        """Return if the engine can serve; raise EngineFailure, with the reason, if it cannot."""
        ...

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        """Take new weights; return the checksum of what arrived, for the sender to compare.

        Requests in flight go on with the new weights: each token carries the version that sampled it.
        """
        ...

    async def close(self) -> None:
        """Free everything. Running requests are aborted, later ones raise EngineFailure. Closing twice is harmless."""
        ...


@runtime_checkable
class SupportsSleep(Protocol):
    """An engine that can give the memory of a shared device back. The next weights wake it, whatever the level."""

    async def sleep(self, level: int = 1) -> None:
        """Free what can be had again: 1 keeps the weights somewhere, 2 does not. No request may be running."""
        ...


@runtime_checkable
class SupportsForget(Protocol):
    """An engine that keeps something for a session's next turn."""

    def forget(self, session: str) -> None:
        """The session is over. A hint: no call waits for it, and unknown sessions do no harm."""
        ...


@runtime_checkable
class Restarting(Protocol):
    """An engine whose process is started again when it dies."""

    @property
    def restarting(self) -> bool:
        """Whether that is under way: requests wait for it, for as long as starts and weights may take."""
        ...


class ProcessEngine(Engine, Protocol):
    """An engine in a process of its own. Calls that find the process gone raise EngineGone."""

    async def gone(self) -> str:
        """Wait until the process has ended, without a deadline; how that came about."""
        ...


@runtime_checkable
class SupportsKill(Protocol):
    """An engine whose process can be killed."""

    def kill(self) -> None:
        """Kill it at once; `gone` returns then."""
        ...


@runtime_checkable
class SupportsReplace(Protocol):
    """An engine whose process can be replaced while it lives."""

    def replace(self, reason: str) -> bool:
        """Kill the process, for the next one to take its place; False where that is not to be done now."""
        ...


@runtime_checkable
class Placed(Protocol):
    """An engine that may be on another machine after it was started again."""

    @property
    def place(self) -> str:
        """Where it is, in words."""
        ...
