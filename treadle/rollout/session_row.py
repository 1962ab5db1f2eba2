"""Row of a session: where its prompt comes from, what is added to it, and which rows begin at its places.

Owns the tokens of one row and the budget that it shares with the others; refuses to know how turns are sampled and what
tools are. Invariant: a row only grows, and is never longer than `rollout.response_length`; a branch takes over the ids
of its row up to a mark verbatim, sampled ones among them.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from treadle.data.chat_template import ReasoningTags
from treadle.engine.protocol import Decode
from treadle.errors import MisuseError, PromptFailure, RowFull
from treadle.rollout.protocol import Services, SessionToolCalls
from treadle.rollout.trajectory_builder import RowBuilder, RowMark, SessionState, fit_prompt
from treadle.types import Completion, Message, SamplingParams, StopReason, Task

_TAIL_IDS = 12
"""Ids that a tag and the white space after it may take."""


class SessionRow:
    """One row of an attempt: a conversation as tokens. The rows of an attempt share its state."""

    def __init__(
        self,
        task: Task,
        sample: int,
        services: Services,
        tools: SessionToolCalls,
        schemas: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        prompt_ids: tuple[int, ...],
        *,
        parent: "SessionRow | None" = None,
        messages: Sequence[Message] | None = None,
        attempt: int = 0,
        ends_when_full: bool = True,
        opponent: str = "",
    ) -> None:
        self.task = task
        self.sample = sample
        self._services = services
        self._tools = tools
        self._schemas = tuple(schemas)
        self._sampling = sampling
        self._state: SessionState = parent._state if parent else SessionState()
        self._rows: list[RowBuilder] = parent._rows if parent else []
        self._attempt = attempt
        self._ends_when_full = ends_when_full
        self._opponent = opponent
        self._idle_stage = "loop" if ends_when_full else "agent"
        self._row = RowBuilder(prompt_ids, len(self._rows))
        self._rows.append(self._row)
        self._messages: list[Message] = list(task.messages if messages is None else messages)
        self._clock = asyncio.get_running_loop().time
        if parent is None:
            self._state.since = self._state.opened = self._clock()
            self._state.conversation = self._messages

    @property
    def done(self) -> bool:
        """Whether a limit has ended this session; `generate` is refused from then on."""
        return self._state.ended is not None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, as text."""
        return tuple(self._messages)

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Schemas of the tools this session may call."""
        return self._schemas

    @property
    def num_turns(self) -> int:
        """Assistant turns so far, forks included."""
        return self._state.assistant_turns

    @property
    def length(self) -> int:
        """Tokens of this row, its prompt included."""
        return len(self._row.prompt_ids) + len(self._row.ids)

    @property
    def ended(self) -> StopReason | None:
        """The limit that has ended this session, if one has."""
        return self._state.ended

    @property
    def tokens_left(self) -> int:
        """How many more tokens this row may grow by; what forks are sampling right now is set aside for them."""
        state = self._state
        return min(self._room, self._services.rollout.response_length - state.sampled - state.reserved)

    @property
    def _room(self) -> int:
        """How many more tokens fit this row, whatever the others sample."""
        rollout, row = self._services.rollout, self._row
        length = rollout.sequence_length() - len(row.prompt_ids)
        return min(rollout.response_length, length) - len(row.ids)

    @property
    def extra(self) -> dict[str, Any]:
        """Extra fields of the trajectory, for reward functions and readers."""
        return self._state.extra

    def begin(self, messages: Sequence[Message] | None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Replace the task's prompt before the first turn, and show further tools, whose calls are the caller's to run.

        `rollout.prompt_length` and `rollout.overlong_prompts` hold for it, too. None: the task's own messages.
        """
        if self._row.has_begun or len(self._rows) > 1:
            raise MisuseError(f"session {self.task.uid}/{self.sample} has begun: its prompt can no longer be replaced")
        self.add_tools(tools)
        new_messages = list(self._messages if messages is None else messages)
        ids = self._services.renderer.prompt(new_messages, self._schemas)
        fitted = fit_prompt(ids, self._services.rollout)
        self._state.prompt_tokens_cut = len(ids) - len(fitted)
        self._row = self._rows[0] = RowBuilder(fitted, 0)
        self._messages[:] = new_messages

    def add_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Show further tools to rows that begin after this; their calls are the caller's to run."""
        self._tools.add_schemas(tools)
        self._schemas = (*self._schemas, *tools)

    def _last_sampled(self) -> int | None:
        """The last id of this row, if it was sampled."""
        row = self._row
        return row.ids[-1] if row.ids and row.mask[-1] else None

    def _observed_ids(self, messages: Sequence[Message], sampled: int | None) -> tuple[int, ...]:
        """The ids that follow a turn, whose last token is `sampled`; None where no turn is before them.

        A turn that ended without its end-of-turn token, at a stop string or at its own `max_tokens`, is closed first.
        """
        renderer = self._services.renderer
        stops = renderer.stop_token_ids
        close = stops[:1] if sampled is not None and sampled not in stops else ()
        return close + renderer.observation(messages, self._schemas)

    @property
    def reasoning_tags(self) -> ReasoningTags:
        """What reasoning stands between in the text of a turn."""
        return self._services.renderer.reasoning_tags

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The run's own."""
        return self._sampling.stop

    def render_root(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The ids of a prompt of these messages."""
        ids: tuple[int, ...] = self._services.renderer.prompt(messages, tools)
        return ids

    def render_after(self, mark: RowMark, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids that messages add to this row after a mark."""
        row = self._row
        is_turn = mark.num_ids > 0 and row.mask[mark.num_ids - 1]
        return self._observed_ids(messages, row.ids[mark.num_ids - 1] if is_turn else None)

    def check_texts(self, texts: Iterable[str]) -> None:
        """RowFull where texts are too long for any row; encodes nothing, so that it takes no time."""
        least, longest = self._services.renderer.least_tokens(texts), self._services.rollout.sequence_length()
        if least >= longest:
            raise RowFull(least, longest)

    @property
    def decode(self) -> Decode:
        """Ids to the text that parsers see."""
        return self._services.renderer.decode

    def decode_token(self, token: int) -> str:
        """The text of one token; empty for one that ends a turn."""
        return self._services.renderer.decode((token,))

    def ends_with(self, tag: str) -> bool:
        """Whether the row ends with a text, white space aside: whether a prompt has opened the reasoning, say."""
        last = (*self._row.prompt_ids[-_TAIL_IDS:], *self._row.ids[-_TAIL_IDS:])[-_TAIL_IDS:]
        return self._services.renderer.decode(last).rstrip().endswith(tag)

    def drops_reasoning(self, *, has_calls: bool, user_follows: bool) -> bool:
        """Whether the chat template leaves out the reasoning of an earlier turn."""
        return self._services.renderer.drops_reasoning(has_calls=has_calls, user_follows=user_follows)

    def stop_string_of(self, completion: Completion, stops: Sequence[str]) -> str:
        """The stop string that ended a completion; empty where none did."""
        if completion.stop is not StopReason.STOP:
            return ""
        written = self._services.renderer.decode(completion.ids)
        return next((stop for stop in stops if stop in written), "")

    def fork(self, messages: Iterable[Message]) -> Self:
        """A new row that starts from `messages`: for compaction and sub-agents. It shares budgets and the reward."""
        new_messages = tuple(messages)
        ids = self._services.renderer.prompt(new_messages, self._schemas)
        longest = self._services.rollout.sequence_length()
        if len(ids) >= longest:
            raise PromptFailure(f"a fork's prompt has {len(ids)} tokens; rollout.max_model_len leaves {longest - 1}")
        return self._new_row(ids, new_messages, self._schemas, ends_when_full=True)

    def mark(self) -> RowMark:
        """Where this row ends now: a place that a branch can begin at."""
        return RowMark(self._row.number, len(self._row.ids), len(self._messages))

    def length_at(self, mark: RowMark) -> int:
        """Tokens of this row up to a mark, its prompt included."""
        return len(self._row.prompt_ids) + mark.num_ids

    def root(
        self,
        messages: Iterable[Message],
        tools: Sequence[Mapping[str, Any]],
        rendered: tuple[int, ...] | None = None,
    ) -> Self:
        """A row of its own that starts from `messages` and shows `tools`; RowFull where they leave no room for a token.

        The first one takes the place of the task's own prompt, if nothing was generated from that. `rendered`, here and
        below: the ids, where they were rendered before, by `render_root` and `render_after`.
        """
        new_messages = tuple(messages)
        ids = self.render_root(new_messages, tools) if rendered is None else rendered
        self._check_prompt(ids)
        self._drop_unused_prompt()
        return self._new_row(ids, new_messages, tools)

    def text_root(self, prompt: str | Sequence[int]) -> Self:
        """A row of its own that goes on with a text, or with ids, without a chat template.

        RowFull where that leaves no room for a token.
        """
        is_text = isinstance(prompt, str)
        ids = tuple(self._services.renderer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        self._check_prompt(ids)
        self._drop_unused_prompt()
        text = prompt if is_text else self._services.renderer.decode(ids)
        return self._new_row(ids, ({"role": "user", "content": text},), ())

    def seat(self, number: int, messages: Iterable[Message], *, opponent: str = "") -> Self:
        """The row of one agent in an episode of several, which starts from `messages`.

        Its turns train with the rewards of its own seat. `opponent` names a model of `rollout.multi_turn.opponents`
        that plays it instead of the policy: what that samples is given, and does not train.
        """
        new_messages = tuple(messages)
        fitted = fit_prompt(self._services.renderer.prompt(new_messages, self._schemas), self._services.rollout)
        self._drop_unused_prompt()
        seat = self._new_row(fitted, new_messages, self._schemas, opponent=opponent, ends_when_full=True)
        seat._row.seat = number
        return seat

    def _drop_unused_prompt(self) -> None:
        """The task's own prompt gives its place to another row, if nothing was generated from it."""
        if self._rows[0] is self._row and not self._row.has_begun and len(self._rows) == 1:
            self._rows.clear()

    def branch(self, mark: RowMark, messages: Sequence[Message] = (), rendered: tuple[int, ...] | None = None) -> Self:
        """A row that goes on from `mark` with `messages`; RowFull where they leave no room for a token.

        Its prompt is all ids of this row up to there, sampled ones verbatim; they are trained where they were sampled.
        """
        row = self._row
        assert mark.row == row.number, "a mark belongs to the row that it was made in"
        before = (*row.prompt_ids, *row.ids[: mark.num_ids])
        if messages:
            before += self.render_after(mark, messages) if rendered is None else rendered
        self._check_prompt(before)
        return self._new_row(before, (*self._messages[: mark.num_messages], *messages), self._schemas)

    def extend(self, messages: Sequence[Message], rendered: tuple[int, ...] | None = None) -> None:
        """Add messages to this row; RowFull, and nothing is added, where they leave no room for a token.

        Unlike `observe` it ends nothing and counts no turns: for loops whose conversation is kept elsewhere.
        """
        ids = self.render_after(self.mark(), messages) if rendered is None else rendered
        if len(ids) >= self._room:
            used = len(self._row.prompt_ids) + len(self._row.ids)
            raise RowFull(used + len(ids), used + self._room)
        self._row.add_observed(ids)
        self._messages += messages

    def _check_prompt(self, ids: Sequence[int]) -> None:
        longest = self._services.rollout.sequence_length()
        if len(ids) >= longest:
            raise RowFull(len(ids), longest)

    def keep_until(self, mark: RowMark | None) -> None:
        """Leave what this row has after `mark` out of the trajectory, or all of it: tokens that nothing came of."""
        self._row.kept_end = 0 if mark is None else mark.num_ids

    def unfinished(self) -> tuple[int, str]:
        """Tokens and text of a turn that broke off, and that nothing went on with."""
        start = self._row.broken_turn
        ids = () if start is None else tuple(self._row.ids[start:])
        return len(ids), self._services.renderer.decode(ids) if ids else ""

    def show(self) -> None:
        """Make this row's conversation the one that reward functions and readers see."""
        self._state.conversation = self._messages

    def _new_row(
        self,
        ids: tuple[int, ...],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        opponent: str = "",
        ends_when_full: bool = False,
    ) -> Self:
        return type(self)(
            self.task,
            self.sample,
            self._services,
            self._tools,
            tools,
            self._sampling,
            ids,
            parent=self,
            messages=messages,
            attempt=self._attempt,
            ends_when_full=ends_when_full,
            opponent=opponent,
        )
