"""A trajectory while it grows: its rows, its turns, and what it has spent.

Owns how tokens are appended. Invariant: rows only grow; mask is 1 exactly on sampled ids, each with its logprob and
policy version.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.types import Completion, Message, Row, StopReason, ToolCall, ToolResult, Turn


@dataclass(slots=True)
class Ledger:
    """What a session and its forks have spent together, and where they stand."""

    sampled: int = 0
    assistant_turns: int = 0
    user_turns: int = 0
    preemptions: int = 0
    invalid_streak: int = 0
    generate_s: float = 0.0
    tool_s: float = 0.0
    environment_s: float = 0.0
    ended: StopReason | None = None
    stage: str = "start"
    since: float = 0.0
    server: str = ""
    last_event: str = "started"
    spoken: list[Message] = field(default_factory=list)
    """The conversation of whichever fork spoke last: the one that ends with the answer."""
    turn_rewards: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    cleanups: list[tuple[Callable[[], Coroutine[Any, Any, None]], str]] = field(default_factory=list)
    """What to run when the loop has ended, last added first, and what to call it."""


@dataclass(slots=True)
class OpenTurn:
    start: int
    sampled_end: int
    stop: StopReason
    generate_s: float
    replica: str
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    tool_s: float = 0.0
    reward: float | None = None


class OpenRow:
    """A row that is still growing."""

    __slots__ = ("ids", "logprobs", "mask", "prompt_ids", "turns", "versions")

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.turns: list[OpenTurn] = []

    def add_sampled(self, completion: Completion) -> None:
        self.ids += completion.ids
        self.mask += [1] * len(completion.ids)
        self.logprobs += completion.logprobs
        self.versions += completion.versions

    def add_observed(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def close(self) -> Row:
        ends = [turn.start for turn in self.turns[1:]] + [len(self.ids)]
        turns = tuple(_closed(turn, end) for turn, end in zip(self.turns, ends, strict=False))
        return Row(
            self.prompt_ids, tuple(self.ids), tuple(self.mask), tuple(self.logprobs), tuple(self.versions), turns
        )


def _closed(turn: OpenTurn, end: int) -> Turn:
    return Turn(
        turn.start,
        turn.sampled_end,
        end,
        turn.stop,
        turn.calls,
        turn.results,
        turn.generate_s,
        turn.tool_s,
        turn.replica,
        turn.reward,
    )
