"""Protocols of the rollout: what a session needs of engine, renderer, parser and tools.

Owns the narrow interfaces, so that sessions and workers run against any object with these calls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from treadle.config import RolloutConfig
from treadle.errors import EnvironmentFailure
from treadle.observe import Wait
from treadle.rollout.tools.thread_pool import DaemonThreadPool
from treadle.types import Completion, Message, Request, ToolCall, ToolResult

MAX_LOOP_THREADS = 256


class TokenGenerator(Protocol):
    """Whoever answers requests: an engine, or the router in front of several."""

    async def generate(self, request: Request) -> Completion: ...


class TextCodec(Protocol):
    """Between messages and ids, as far as a session needs it."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]: ...

    def observation(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class CallParser(Protocol):
    """Finds tool calls in what a model wrote."""

    def parse(self, text: str) -> Any: ...


class SessionToolCalls(Protocol):
    """The tools of one session."""

    async def call_many(self, calls: Sequence[ToolCall], max_parallel: int) -> Sequence[ToolResult]: ...


@dataclass(frozen=True, slots=True)
class Services:
    """What every session of a worker shares."""

    rollout: RolloutConfig
    engine: TokenGenerator
    codec: TextCodec
    parser: CallParser
    threads: DaemonThreadPool = field(
        default_factory=lambda: DaemonThreadPool(MAX_LOOP_THREADS, failure=EnvironmentFailure)
    )
    """For blocking code of loops and environments; tools have threads of their own."""
    announce: Callable[[Wait], None] | None = None
    """Told before a session enters code that may hold the interpreter, where somebody outside wants to know."""
