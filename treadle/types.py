"""Records that cross folder borders: what a task is, what came of it, and how it ended.

Owns no behaviour beyond small derived values, and imports nothing heavy: no torch, no ray.
Invariant: records are frozen; `ids`, `mask`, `logprobs` and `versions` of one row always have the same length.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn

from treadle.errors import Boundary, Failure

Message = Mapping[str, Any]
"""A chat message in OpenAI's shape: role, content, and where they apply tool_calls, tool_call_id and name."""


class _Nothing(dict[str, Any]):
    """An empty map that stays empty, and stays itself when it is pickled."""

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        raise TypeError("records are frozen")

    def __hash__(self) -> int:  # type: ignore[override]
        return 0

    def __reduce__(self) -> str:
        return "NOTHING"


NOTHING: Mapping[str, Any] = _Nothing()


@dataclass(frozen=True, slots=True)
class Task:
    """One row of data."""

    uid: str
    messages: tuple[Message, ...]
    ground_truth: Any = None
    data_source: str = ""
    agent: str | None = None
    """Agent loop by name or import path; None for the configured default."""
    n: int | None = None
    """Samples to draw; None for `rollout.n`."""
    tools: tuple[str, ...] | None = None
    """Names of the tools this task may use; None for all."""
    tool_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments for tools, by tool name; the model never sees them."""
    environment_kwargs: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Every other field of the row, for reward functions and loops."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Fields of the row that `data` names otherwise, such as {"solution": "answer"}."""


class StopReason(StrEnum):
    """Why a completion or a trajectory ended. An engine reports the first three only."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TURN_LIMIT = "turn_limit"
    INVALID_CALLS = "invalid_calls"
    TOOL_TIME = "tool_time"
    DEADLINE = "deadline"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the most likely one's probability."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Penalties lower the logits of tokens that came before; repetition also of those in the prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer. The ids keep the tokens that wrote one; the text ends before it."""
    model_temperature: float | None = None
    """The temperature at which `Completion.logprobs` are taken, where one turn is sampled at another than its run."""

    def limited_to(self, max_tokens: int) -> "SamplingParams":
        """The same with another limit; once a request, so without the cost of `replace`."""
        return SamplingParams(
            max_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            self.stop_token_ids,
            self.seed,
            self.min_p,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.stop,
            self.model_temperature,
        )

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens are left out of the draw."""
        return self.own_temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def own_temperature(self) -> float:
        """The temperature of the whole softmax."""
        return self.temperature if self.model_temperature is None else self.model_temperature

    @property
    def penalties(self) -> tuple[float, float, float, float]:
        """Repetition, presence, frequency, and the factor of a turn's own temperature: greedy is very cold."""
        scale = self.own_temperature / max(self.temperature, 1e-4) if self.own_temperature != self.temperature else 1.0
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty, scale

    @property
    def is_penalized(self) -> bool:
        """Whether logits are changed before the draw."""
        return self.penalties != (1.0, 0.0, 0.0, 1.0)

    @property
    def is_processed(self) -> bool:
        """Whether tokens are drawn from another distribution than the whole softmax at the temperature."""
        return self.is_filtered or self.is_penalized


OnTokens = Callable[[int, tuple[int, ...]], None]
"""Called with tokens as they are sampled: how many of the same answer come before them, and their ids."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a session asks of an engine. The same (seed, uid, sample, row, attempt, position) draws the same noise."""

    uid: str
    sample: int
    ids: tuple[int, ...]
    sampling: SamplingParams
    position: int = 0
    """Tokens of this row sampled before this request."""
    messages: tuple[Message, ...] = ()
    """The conversation behind `ids`, for engines that only take text."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools on offer, for the same engines."""
    row: int = 0
    """Which row of the trajectory: 0 is the main one, forks follow in the order they were made."""
    attempt: int = 0
    """Attempts at this sample that failed by a tool, environment, loop or reward: each draws other noise.

    The failure of an engine does not count, so that its tokens are drawn again as they were."""
    num_begun: int = 0
    """How many of the last ids were sampled for this very answer, before an interruption."""
    opponent: str = ""
    """The model that answers, one of `rollout.multi_turn.opponents`; empty for the policy."""
    on_tokens: OnTokens | None = field(default=None, compare=False, repr=False)
    """Called on the event loop by engines that can tell, while they sample; what `generate` returns has all tokens.

    A request that is sampled again, at another replica for instance, tells its tokens again from the first."""

    @property
    def session(self) -> str:
        return f"{self.uid}/{self.sample}"

    @property
    def session_row(self) -> tuple[str, int]:
        """The conversation that the request goes on with: one row of the session."""
        return self.session, self.row


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returned: one logprob and one policy version for each sampled id."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop: StopReason
    text: str = ""
    replica: str = ""
    calls: tuple["ToolCall", ...] = ()
    """Tool calls, from engines that parse them themselves."""
    preemptions: int = 0
    """How often it had to wait in the middle, because the engine's KV cache was full."""
    processed_logprobs: tuple[float, ...] = ()
    """Of the distribution that was sampled from: after penalties, min-p, top-k and top-p. Empty where none of these was
    asked for: then `logprobs`, of the whole softmax, are the same numbers."""
    queue_s: float = field(default=0.0, compare=False)
    """Seconds it waited for a place in the engine's running batch; 0 from engines that do not tell."""


@dataclass(frozen=True, slots=True)
class RecordedCompletion:
    """One answer of an engine to a session that is still open: what a later start of the run can go on from."""

    uid: str
    sample: int
    number: int
    """Which request of its row it answers, counted from 0 in the order they were asked."""
    asked: int
    """How many ids the request had."""
    digest: int
    """Of those ids; the same in every process."""
    completion: Completion
    row: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model asked for. `problem` says why it cannot be made, if it cannot."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    problem: str | None = None


class ToolStatus(StrEnum):
    """How a tool call ended, as the model is told."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered: the text the model reads, and what only the reward sees."""

    text: str
    status: ToolStatus = ToolStatus.OK
    reward: float | None = None
    extra: Mapping[str, Any] = NOTHING
    seconds: float = 0.0
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion plus the observation that follows it, as spans of its row's response."""

    start: int
    sampled_end: int
    end: int
    stop: StopReason
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    generate_s: float = 0.0
    tool_s: float = 0.0
    replica: str = ""
    reward: float | None = None
    """What an environment gave for this turn."""
    started_s: float | None = None
    """When its request was made, in seconds after the session began; None in journals that do not have it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence: prompt, then response with a mask that is 1 exactly on sampled tokens."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """Policy version per token; -1 on tokens that were not sampled."""
    turns: tuple[Turn, ...] = ()
    processed_logprobs: tuple[float, ...] = ()
    """As in `Completion`, 0.0 on tokens that were not sampled; empty where every token has the same as `logprobs`."""

    @property
    def num_sampled(self) -> int:
        return sum(self.mask)


class Status(StrEnum):
    """The three ways a trajectory can end."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trajectory ended: on its own, at a limit, or by a failure at one boundary."""

    status: Status
    reason: StopReason
    boundary: Boundary | None = None
    detail: str = ""

    @classmethod
    def ended(cls, reason: StopReason) -> "Outcome":
        return cls(Status.COMPLETED if reason is StopReason.STOP else Status.TRUNCATED, reason)

    @classmethod
    def failed(cls, failure: Failure) -> "Outcome":
        return cls(Status.FAILED, StopReason.FAILURE, failure.boundary, str(failure))

    @property
    def ok(self) -> bool:
        return self.status is not Status.FAILED


@dataclass(frozen=True, slots=True)
class Score:
    """A reward: the weighted sum, its parts by function, and whatever else the functions reported."""

    value: float
    parts: Mapping[str, float] = NOTHING
    extra: Mapping[str, Any] = NOTHING


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of a trajectory went, in seconds."""

    started_at: float = 0.0
    total_s: float = 0.0
    generate_s: float = 0.0
    tool_s: float = 0.0
    score_s: float = 0.0
    queue_s: float = 0.0
    """For a place among the open sessions, while sessions were held back for new weights, and in the queues of engines
    that tell; the last is not in `generate_s`."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a trajectory and its score were made from, as digests: all four equal, and so is the result."""

    sampling: str = ""
    """Of what decides the tokens of every task: weights, sampling parameters, tools, agent loops, engine."""
    prompt: str = ""
    """Of what the task adds to that: its messages, tools and arguments."""
    scoring: str = ""
    """Of the reward functions and models: their source and their settings."""
    row: str = ""
    """Of the whole task, as a reward function sees it."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The finished record of a session. The first row is the main one; forks add rows that share the reward."""

    uid: str
    sample: int
    rows: tuple[Row, ...]
    outcome: Outcome
    reward: Score | None = None
    messages: tuple[Message, ...] = ()
    """The conversation as text, for people and reward functions; training reads the rows."""
    timing: Timing = Timing()
    attempt: int = 0
    data_source: str = ""
    extra: Mapping[str, Any] = NOTHING
    """What the loop wants to be known about this trajectory."""
    provenance: Provenance = Provenance()
    """Empty where it is unknown what it was made from; such a trajectory is never reused."""

    @property
    def num_sampled(self) -> int:
        return sum(row.num_sampled for row in self.rows)

    @property
    def seats(self) -> tuple[int, ...]:
        """The seat of each row, in an episode of several agents; empty in any other."""
        return tuple(self.extra.get("seats", ()))

    @property
    def policy_seats(self) -> "Mapping[int, tuple[Row, ...]]":
        """The rows of each seat that the policy played, by the number of the seat."""
        rows: dict[int, tuple[Row, ...]] = {}
        for seat, row in zip(self.seats, self.rows, strict=True):
            rows[seat] = (*rows.get(seat, ()), row)
        return {seat: own for seat, own in rows.items() if any(row.num_sampled for row in own)}

    @property
    def num_turns(self) -> int:
        return sum(len(row.turns) for row in self.rows)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def response_text(self) -> str:
        """What the model said last."""
        spoken = (message["content"] for message in reversed(self.messages) if message["role"] == "assistant")
        return next(spoken, None) or ""


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task."""

    task: Task
    trajectories: tuple[Trajectory, ...]

    @property
    def survivors(self) -> tuple[Trajectory, ...]:
        return tuple(trajectory for trajectory in self.trajectories if trajectory.outcome.ok)


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rollout returned: groups in the order of their tasks, and the tasks that were dropped."""

    groups: tuple[Group, ...]
    dropped: tuple[str, ...] = ()
    """uids whose prompts were too long, where `rollout.overlong_prompts` is drop."""

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(trajectory for group in self.groups for trajectory in group.trajectories)
