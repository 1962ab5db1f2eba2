"""Trajectory builder: rows and turns of a session while they grow, truncation of prompts, the shared token budget.

Owns how tokens are appended, and how many may still be sampled. Invariant: rows only grow; the mask is 1 exactly on
sampled ids, each with its logprob and policy version; sampled and reserved tokens together never exceed the budget.

Waits: a request waits for budget only while requests of other rows have reserved all that is left; each of those ends
and returns what it did not use.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from treadle.config import RolloutConfig
from treadle.data.renderer import truncate
from treadle.errors import PromptFailure
from treadle.rollout.trajectory_checks import OWN_NAMES
from treadle.types import NOTHING, Completion, Message, Row, StopReason, ToolCall, ToolResult, Turn

if TYPE_CHECKING:
    from treadle.rollout.session import Session

TRUNCATION_SIDES: Mapping[str, Literal["left", "middle", "right"]] = {
    "truncate_left": "left",
    "truncate_middle": "middle",
    "truncate_right": "right",
}


class PromptDropped(Exception):
    """A prompt that is too long, where the config says to drop its task."""


def fit_prompt(ids: tuple[int, ...], rollout: RolloutConfig) -> tuple[int, ...]:
    """A prompt's ids, cut or refused as `rollout.overlong_prompts` says."""
    if len(ids) <= rollout.prompt_length:
        return ids
    detail = f"the prompt has {len(ids)} tokens; rollout.prompt_length is {rollout.prompt_length}"
    if rollout.overlong_prompts == "error":
        raise PromptFailure(f"{detail}: raise it, or set rollout.overlong_prompts to drop or truncate_left")
    if rollout.overlong_prompts == "drop":
        raise PromptDropped(detail)
    return truncate(ids, rollout.prompt_length, TRUNCATION_SIDES[rollout.overlong_prompts])


@dataclass(slots=True)
class SessionState:
    """What a session and its forks have spent together, and where they stand."""

    sampled: int = 0
    reserved: int = 0
    """Tokens that requests under way may still sample."""
    prompt_tokens_cut: int = 0
    """Tokens of the prompt that were cut out."""
    assistant_turns: int = 0
    user_turns: int = 0
    preemptions: int = 0
    invalid_streak: int = 0
    generate_s: float = 0.0
    """Of whole requests, with their time in an engine's queue."""
    queue_s: float = 0.0
    """Of that, in an engine's queue."""
    tool_s: float = 0.0
    environment_s: float = 0.0
    ended: StopReason | None = None
    stage: str = "start"
    since: float = 0.0
    opened: float = 0.0
    """When the session began, by the loop's clock."""
    server: str = ""
    last_event: str = "started"
    conversation: list[Message] = field(default_factory=list)
    """The conversation of whichever fork spoke last: the one that ends with the answer."""
    turn_rewards: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    cleanups: list[tuple[Callable[[], Coroutine[Any, Any, None]], str]] = field(default_factory=list)
    """What to run when the loop has ended, last added first, and what to call it."""
    released: asyncio.Event | None = None
    """A request has ended, and what it reserved is free or spent; None while no request waits for that."""

    async def reserve(self, budget: int, wanted: int, sharers: int) -> int:
        """Tokens for one request, at least one; 0 if the budget is spent. Each of `sharers` gets its part of the rest.

        So no two requests that run at once can exceed the budget together.
        """
        while self.sampled + self.reserved >= budget and self.reserved:
            if self.released is None or self.released.is_set():
                self.released = asyncio.Event()
            await self.released.wait()
        left = budget - self.sampled - self.reserved
        granted = min(wanted, max(1, left // sharers)) if left > 0 else 0
        self.reserved += granted
        return granted

    def release(self, granted: int, sampled: int) -> None:
        """A request has ended: what it sampled is spent, the rest of what it reserved is free."""
        self.reserved -= granted
        self.sampled += sampled
        if self.released is not None:
            self.released.set()


@dataclass(slots=True)
class TurnBuilder:
    start: int
    sampled_end: int
    stop: StopReason
    generate_s: float
    replica: str
    started_s: float
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    tool_s: float = 0.0
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class RowMark:
    """A place in a row: where a branch can begin. Made by `Session.mark`; it holds no tokens."""

    row: int
    num_ids: int
    """Ids of the response before it."""
    num_messages: int
    """Messages of the conversation before it."""


class RowBuilder:
    """A row that is still growing."""

    __slots__ = (
        *("broken_turn", "has_begun", "ids", "is_generating", "kept_end", "logprobs", "mask", "num_sampled"),
        *("number", "processed", "processed_logprobs", "prompt_ids", "seat", "turns", "versions"),
    )

    def __init__(self, prompt_ids: tuple[int, ...], number: int = 0) -> None:
        self.prompt_ids = prompt_ids
        self.number = number
        self.has_begun = False
        """Whether it has ever asked for tokens."""
        self.is_generating = False
        self.broken_turn: int | None = None
        """Where the turn starts that an engine's failure broke off; the next request goes on with it."""
        self.kept_end: int | None = None
        """How many ids of the response the trajectory keeps; None for all."""
        self.seat: int | None = None
        """The agent that it is a row of, in an episode of several."""
        self.num_sampled = 0
        """Noise is drawn by this count: the tokens of an opponent count, too."""
        self.processed = False
        """Whether some token was drawn from another distribution than the whole softmax."""
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.processed_logprobs: list[float] = []
        self.versions: list[int] = []
        self.turns: list[TurnBuilder] = []

    def add_sampled(self, completion: Completion) -> None:
        self.ids += completion.ids
        self.mask += [1] * len(completion.ids)
        self.logprobs += completion.logprobs
        self.processed_logprobs += completion.processed_logprobs or completion.logprobs
        self.versions += completion.versions
        self.num_sampled += len(completion.ids)
        self.processed |= bool(completion.processed_logprobs)

    def add_opponent(self, completion: Completion) -> None:
        """Tokens that another model sampled: given, as far as the policy is concerned."""
        self.add_observed(completion.ids)
        self.num_sampled += len(completion.ids)

    def add_observed(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.processed_logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    @property
    def num_kept(self) -> int:
        """How many ids of the response the trajectory keeps."""
        return len(self.ids) if self.kept_end is None else self.kept_end

    def close(self) -> Row:
        end = self.num_kept
        kept = [turn for turn in self.turns if turn.sampled_end <= end]
        ends = [turn.start for turn in kept[1:]] + [end]
        turns = tuple(_build_turn(turn, last) for turn, last in zip(kept, ends, strict=False))
        processed = tuple(self.processed_logprobs[:end]) if self.processed else ()
        columns = tuple(self.ids[:end]), tuple(self.mask[:end]), tuple(self.logprobs[:end]), tuple(self.versions[:end])
        return Row(self.prompt_ids, *columns, turns, processed)


def _build_turn(turn: TurnBuilder, end: int) -> Turn:
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
        turn.started_s,
    )


class SessionRecord:
    """A session's state as its worker reads it; agent loops never see it."""

    def __init__(self, session: "Session") -> None:
        self._session = session

    @property
    def state(self) -> SessionState:
        return self._session._state

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self.state.conversation)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Schemas of the tools that the model was shown."""
        return self._session.tools

    @property
    def generates(self) -> bool:
        """Whether a row waits for an engine."""
        return any(row.is_generating for row in self._session._rows)

    def rows(self) -> tuple[Row, ...]:
        """The rows as they stand; a fork that never sampled teaches nothing and is left out."""
        return tuple(builder.close() for builder in self._kept_builders())

    def _kept_builders(self) -> list[RowBuilder]:
        builders = self._session._rows
        is_first_kept = builders[0].kept_end is None
        return [item for at, item in enumerate(builders) if item.num_kept or (at == 0 and is_first_kept)]

    def extra(self) -> Mapping[str, Any]:
        state = self.state
        notes = {name: value for name, value in state.extra.items() if name not in OWN_NAMES}
        seats = [builder.seat for builder in self._kept_builders()]
        if any(seat is not None for seat in seats):
            notes["seats"] = seats
        if state.turn_rewards:
            notes["turn_rewards"] = tuple(state.turn_rewards)
        if state.prompt_tokens_cut:
            notes["prompt_tokens_cut"] = state.prompt_tokens_cut
        if state.preemptions:
            notes["engine_preemptions"] = state.preemptions
        return notes or NOTHING
