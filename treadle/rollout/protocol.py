"""Protocols of the rollout: what sessions, workers and the dispatcher need of each other and of an engine.

Owns the narrow interfaces, so that sessions, workers and dispatchers run against any object with these calls.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from treadle.config import RolloutConfig
from treadle.data.chat_template import ReasoningTags
from treadle.engine.protocol import TokenGenerator
from treadle.errors import EnvironmentFailure
from treadle.observe import Wait
from treadle.rollout.tools.thread_pool import DaemonThreadPool
from treadle.types import Message, SamplingParams, Score, Task, ToolCall, ToolResult, Trajectory

MAX_LOOP_THREADS = 256


class TextRenderer(Protocol):
    """Between messages and ids, as far as a session needs it."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]: ...

    def observation(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode(self, text: str) -> tuple[int, ...]: ...

    def drops_reasoning(self, *, has_calls: bool, user_follows: bool) -> bool: ...

    def least_tokens(self, texts: Iterable[str]) -> int: ...

    @property
    def reasoning_tags(self) -> ReasoningTags: ...


class CallParser(Protocol):
    """Finds tool calls in what a model wrote."""

    @property
    def starts(self) -> tuple[str, ...]: ...

    @property
    def frames_turns(self) -> bool: ...

    def opening(self, name: str) -> str: ...

    def parse(self, text: str) -> Any: ...


class SessionToolCalls(Protocol):
    """The tools of one session."""

    async def call_many(self, calls: Sequence[ToolCall], max_parallel: int) -> Sequence[ToolResult]: ...

    def add_schemas(self, schemas: Sequence[Mapping[str, Any]]) -> None: ...

    def check_added(self, call: ToolCall) -> ToolCall | None: ...


@dataclass(frozen=True, slots=True)
class Services:
    """What every session of a worker shares."""

    rollout: RolloutConfig
    engine: TokenGenerator
    renderer: TextRenderer
    parser: CallParser
    threads: DaemonThreadPool = field(
        default_factory=lambda: DaemonThreadPool(MAX_LOOP_THREADS, failure=EnvironmentFailure)
    )
    """For blocking code of loops and environments; tools have threads of their own."""
    announce: Callable[[Wait], None] | None = None
    """Called before a session enters code that may hold the interpreter, where a parent process supervises it."""


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt to be made."""

    task: Task
    sample: int
    sampling: SamplingParams
    attempt: int = 0
    redraws: int = 0
    """Earlier attempts that failed otherwise than by an engine: this one draws other noise than they did."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A task whose prompt is too long, where the config says to drop it."""

    uid: str
    detail: str


class AgentWorker(Protocol):
    """Makes attempts: a worker in this process, or one in another."""

    async def run(self, job: Job) -> Trajectory | Dropped: ...


class TrajectoryScorer(Protocol):
    """Scores trajectories."""

    @property
    def scores_groups(self) -> bool:
        """Whether a sample has its whole score only from `score_group`, once all samples of its task have ended."""
        ...

    async def score(self, task: Task, trajectory: Trajectory) -> Score | None: ...

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Score]: ...


class RolloutObserver(Protocol):
    """Called as trajectories start and end, on the manager's loop; must not block."""

    def start(self) -> None: ...

    def retry(self, finished: Trajectory) -> None: ...

    def finish(self, finished: Trajectory) -> None: ...

    def drop(self) -> None: ...


class RolloutObservers:
    """Several observers, as one."""

    def __init__(self, observers: Sequence[RolloutObserver]) -> None:
        self._observers = observers

    def start(self) -> None:
        for observer in self._observers:
            observer.start()

    def retry(self, finished: Trajectory) -> None:
        for observer in self._observers:
            observer.retry(finished)

    def finish(self, finished: Trajectory) -> None:
        for observer in self._observers:
            observer.finish(finished)

    def drop(self) -> None:
        for observer in self._observers:
            observer.drop()


class ManagedWorker(AgentWorker, Protocol):
    """An agent worker that the rollout closes again."""

    def waits(self) -> Iterator[Wait]: ...

    async def close(self) -> None: ...


class ManagedScorer(TrajectoryScorer, Protocol):
    """A scorer that the rollout closes again."""

    async def close(self) -> None: ...
