"""Session: one attempt at a task, and the only way from an agent loop to tokens.

Owns the token rows of a trajectory and its budgets. An agent loop calls `generate`, `observe`, `call_tools`, `fork` and
`branch`; it never holds a token list, so what is trained is what was sampled, whatever the loop does.
Invariant: rows only grow; the mask is 1 exactly on sampled ids, each with its logprob and policy version; no row is
longer than `rollout.response_length`, nor are all sampled ids together. Each row draws noise of its own, whatever else
is generated meanwhile.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from treadle.config.rollout import SamplingConfig
from treadle.data.reasoning_tags import CHANNELS, ReasoningTags
from treadle.engine.protocol import ABORTED, Decode
from treadle.engine.requests import trim_at_stop
from treadle.errors import ConfigError, EngineFailure, MisuseError, PromptFailure, RowFull, nearest
from treadle.observe import Wait
from treadle.rollout.parsers import PARSERS, Parsed
from treadle.rollout.protocol import CallParser, Services, SessionToolCalls
from treadle.rollout.trajectory_builder import RowBuilder, RowMark, SessionState, TurnBuilder, fit_prompt
from treadle.types import (
    Completion,
    Message,
    OnTokens,
    Request,
    SamplingParams,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    ToolStatus,
)

T = TypeVar("T")

_TAIL_IDS = 12
"""Ids that a tag and the white space after it may take."""


class Session:
    """One attempt at a task, as an agent loop sees it."""

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
        parent: "Session | None" = None,
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

    async def generate(
        self, *, max_tokens: int | None = None, opening: str = "", on_tokens: OnTokens | None = None, **sampling: Any
    ) -> Completion:
        """Sample one assistant turn. It goes on with the new weights when an update interrupts it.

        `max_tokens` bounds this turn, within what is left of the budget; a turn that it ends has stop reason LENGTH and
        the session goes on. `opening` is text that the turn begins with: given, not sampled, and so not trained.
        `on_tokens` is called with sampled tokens before the turn is whole, by engines that can tell.
        `sampling` replaces the run's settings for this turn: temperature, top_p, top_k, min_p, repetition_penalty,
        presence_penalty, frequency_penalty, and `stop`, texts that end it.
        """
        params = _turn_sampling(self._sampling, max_tokens, sampling)
        self._check_ready()
        state, row = self._state, self._row
        if opening and row.broken_turn is None:
            row.add_observed(self._services.renderer.encode(opening))
        row.has_begun = row.is_generating = True
        start = row.broken_turn = len(row.ids) if row.broken_turn is None else row.broken_turn
        began, part = self._enter("generate"), ABORTED
        try:
            while part.stop is StopReason.ABORT:
                wanted = min(self._room, params.max_tokens - (len(row.ids) - start))
                granted = await self._reserve(wanted)
                if not granted:
                    part = Completion((), (), (), StopReason.LENGTH)
                    break
                count = 0
                try:
                    part = await self._services.engine.generate(self._request(params, granted, start, on_tokens))
                    _check_lengths(part, granted)
                    count = len(part.ids)
                finally:
                    state.release(granted, count)
                self._add_part(part)
                if part.stop is StopReason.LENGTH and count == granted < wanted:
                    part = replace(part, stop=StopReason.ABORT)  # there may be more to reserve by now
                if part.stop is StopReason.ABORT:
                    state.last_event = f"interrupted after {len(row.ids) - start} tokens"
        finally:
            row.is_generating = False
        row.broken_turn = None
        took = self._clock() - began
        state.generate_s += took
        state.assistant_turns += 1
        row.turns.append(TurnBuilder(start, len(row.ids), part.stop, took, part.replica, began - state.opened))
        completion = self._whole_turn(part, start, params.stop)
        if opening:
            completion = replace(completion, text=opening + completion.text)
        self._messages.append(_assistant_message(completion))
        state.conversation = self._messages
        if part.stop is StopReason.LENGTH and (max_tokens is None or len(row.ids) - start < max_tokens):
            self._end_at_length()
        self._enter(self._idle_stage, f"turn {state.assistant_turns}: {len(row.ids) - start} tokens, {part.stop}")
        return completion

    def _check_ready(self) -> None:
        """A turn may be sampled now, or an error."""
        session = f"session {self.task.uid}/{self.sample}"
        if self.done:
            raise MisuseError(f"{session} is over ({self._state.ended}): check session.done")
        if self._row.is_generating:
            raise MisuseError(f"{session} generates already: fork it for each draft that runs beside it")
        if not self._row.prompt_ids:
            raise PromptFailure("the task has no prompt, and nothing wrote one: an environment does in `reset`")

    def _end_at_length(self) -> None:
        """A row is full: the session is over, unless others of its rows may still go on."""
        if self._ends_when_full or self._state.sampled >= self._services.rollout.response_length:
            self.end(StopReason.LENGTH)

    async def _reserve(self, wanted: int) -> int:
        """How many tokens of the budget this request may sample; 0: there are none left."""
        if wanted <= 0:
            return 0
        return await self._state.reserve(self._services.rollout.response_length, wanted, self._sharers())

    def _add_part(self, part: Completion) -> None:
        state = self._state
        if self._opponent:
            self._row.add_opponent(part)
        else:
            self._row.add_sampled(part)
        state.preemptions += part.preemptions
        state.queue_s += part.queue_s
        state.server = part.replica

    def _request(self, params: SamplingParams, max_tokens: int, start: int, on_tokens: OnTokens | None) -> Request:
        row = self._row
        return Request(
            uid=self.task.uid,
            sample=self.sample,
            ids=(*row.prompt_ids, *row.ids),
            sampling=params.limited_to(max_tokens),
            position=row.num_sampled,
            messages=tuple(self._messages),
            tools=self._schemas,
            row=row.number,
            attempt=self._attempt,
            num_begun=len(row.ids) - start,
            opponent=self._opponent,
            on_tokens=on_tokens,
        )

    def _sharers(self) -> int:
        """How many rows the rest of the budget is for: forks that are about to begin, else those that generate."""
        others = [row for row in self._rows if row is not self._row]
        fresh = sum(not row.has_begun for row in others if row.number)
        return 1 + (fresh or sum(row.is_generating for row in others))

    def _whole_turn(self, last: Completion, start: int, stops: Sequence[str]) -> Completion:
        row = self._row
        if len(last.ids) == len(row.ids) - start and (last.text or last.calls):
            return last
        ids = tuple(row.ids[start:])
        text = trim_at_stop(self._services.renderer.decode(ids), stops)
        logprobs, versions = tuple(row.logprobs[start:]), tuple(row.versions[start:])
        processed = tuple(row.processed_logprobs[start:]) if row.processed else ()
        return Completion(
            ids, logprobs, versions, last.stop, text, last.replica, last.calls, processed_logprobs=processed
        )

    async def observe(self, *messages: Message | str, reward: float | None = None) -> None:
        """Add what follows the model's turn: tool results, or user messages. Text alone is a user message.

        Where no further turn can follow, because turns or tokens are spent, the session ends instead.
        """
        new_messages = [_as_message(item) for item in messages]
        state, turns = self._state, self._services.rollout.multi_turn
        self.score_turn(reward)
        if turns.max_assistant_turns is not None and state.assistant_turns >= turns.max_assistant_turns:
            return self.end(StopReason.TURN_LIMIT)
        if any(message["role"] == "user" for message in new_messages):
            if turns.max_user_turns is not None and state.user_turns >= turns.max_user_turns:
                return self.end(StopReason.TURN_LIMIT)
            state.user_turns += 1
        ids = self._observed_ids(new_messages, self._last_sampled())
        if len(ids) >= min(self._room, self._services.rollout.response_length - state.sampled):
            return self.end(StopReason.LENGTH)
        self._row.add_observed(ids)
        self._messages += new_messages
        return None

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

    def parse(self, completion: Completion) -> tuple[ToolCall, ...]:
        """The tool calls in a completion; malformed ones carry their problem."""
        calls: tuple[ToolCall, ...] = completion.calls or self._services.parser.parse(completion.text).calls
        return calls

    def split_calls(self, calls: Sequence[ToolCall]) -> tuple[tuple[ToolCall, ...], tuple[ToolCall, ...]]:
        """Calls of tools that `begin` added, with their arguments checked; and all others, for `call_tools`."""
        own: list[ToolCall] = []
        others: list[ToolCall] = []
        for call in calls:
            checked = self._tools.check_added(call)
            (others if checked is None else own).append(checked or call)
        return tuple(own), tuple(others)

    def record_calls(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        """Note calls of the last turn that were run elsewhere, and what they came to."""
        turn = self._row.turns[-1]
        turn.calls, turn.results = (*turn.calls, *calls), (*turn.results, *results)
        self._state.invalid_streak = 0

    def split(self, completion: Completion, *, may_call: bool = True) -> Parsed:
        """A turn as its tool calls, and the text around them; reasoning apart where the format frames all of a turn.

        Calls that cannot be made, or without `may_call`, leave the text as it was written.
        """
        if completion.calls:
            return Parsed(completion.text, completion.calls)
        text, framing = completion.text, self._framing_parser()
        if framing is None and not may_call:
            return Parsed(text, ())
        found: Parsed
        if framing is not None:
            found = framing.parse(text)
        else:
            thought, close, said = text.partition(self.reasoning_tags.close)
            found = self._services.parser.parse(said if close else text)  # a call that is only thought about is none
            if close:
                found = replace(found, content=f"{thought}{close}{found.content}")
        is_text = any(call.problem for call in found.calls) or (found.calls and not may_call)
        return Parsed(text, ()) if is_text else found

    def _framing_parser(self) -> CallParser | None:
        """The parser of all turns, where the model writes text in a format, too."""
        own = self._services.parser
        if own.frames_turns:
            return own
        return PARSERS["gpt-oss"] if self.reasoning_tags == CHANNELS else None

    @property
    def frames_turns(self) -> bool:
        """Whether a turn is to be parsed whole, calls or not."""
        return self._framing_parser() is not None

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

    def call_opening(self, name: str = "") -> str:
        """What a turn that calls a tool begins with in the run's format; empty where that is unknown."""
        return self._services.parser.opening(name)

    @property
    def call_starts(self) -> tuple[str, ...]:
        """What tool calls begin with in the run's format; empty where that is unknown."""
        return self._services.parser.starts

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

    async def call_tools(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        """Run the calls of a turn side by side, results in the order of the calls. Limits may end the session."""
        state, turns, limits = self._state, self._services.rollout.multi_turn, self._services.rollout.limits
        began = self._enter("tools", f"calling {', '.join(call.name for call in calls)}")
        results = await self._tools.call_many(calls, turns.max_parallel_calls)
        took = self._clock() - began
        state.tool_s += took
        turn = self._row.turns[-1]
        turn.calls, turn.results, turn.tool_s = tuple(calls), tuple(results), took
        for result in results:
            state.invalid_streak = state.invalid_streak + 1 if result.status is ToolStatus.INVALID else 0
        if state.invalid_streak >= turns.max_invalid_calls:
            self.end(StopReason.INVALID_CALLS)
        elif limits.session_tool_time_s is not None and state.tool_s > limits.session_tool_time_s:
            self.end(StopReason.TOOL_TIME)
        self._enter("loop", "tools answered")
        return results

    def fork(self, messages: Iterable[Message]) -> "Session":
        """A new row that starts from `messages`: for compaction and sub-agents. It shares budgets and the reward."""
        new_messages = tuple(messages)
        ids = self._services.renderer.prompt(new_messages, self._schemas)
        longest = self._services.rollout.sequence_length()
        if len(ids) >= longest:
            raise PromptFailure(f"a fork's prompt has {len(ids)} tokens; rollout.max_model_len leaves {longest - 1}")
        return Session(
            self.task,
            self.sample,
            self._services,
            self._tools,
            self._schemas,
            self._sampling,
            ids,
            parent=self,
            messages=new_messages,
            attempt=self._attempt,
        )

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
    ) -> "Session":
        """A row of its own that starts from `messages` and shows `tools`; RowFull where they leave no room for a token.

        The first one takes the place of the task's own prompt, if nothing was generated from that. `rendered`, here and
        below: the ids, where they were rendered before, by `render_root` and `render_after`.
        """
        new_messages = tuple(messages)
        ids = self.render_root(new_messages, tools) if rendered is None else rendered
        self._check_prompt(ids)
        if self._rows[0] is self._row and not self._row.has_begun and len(self._rows) == 1:
            self._rows.clear()
        return self._new_row(ids, new_messages, tools)

    def text_root(self, prompt: str | Sequence[int]) -> "Session":
        """A row of its own that goes on with a text, or with ids, without a chat template.

        RowFull where that leaves no room for a token.
        """
        is_text = isinstance(prompt, str)
        ids = tuple(self._services.renderer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        self._check_prompt(ids)
        if self._rows[0] is self._row and not self._row.has_begun and len(self._rows) == 1:
            self._rows.clear()
        text = prompt if is_text else self._services.renderer.decode(ids)
        return self._new_row(ids, ({"role": "user", "content": text},), ())

    def seat(self, number: int, messages: Iterable[Message], *, opponent: str = "") -> "Session":
        """The row of one agent in an episode of several, which starts from `messages`.

        Its turns train with the rewards of its own seat. `opponent` names a model of `rollout.multi_turn.opponents`
        that plays it instead of the policy: what that samples is given, and does not train.
        """
        new_messages = tuple(messages)
        fitted = fit_prompt(self._services.renderer.prompt(new_messages, self._schemas), self._services.rollout)
        if self._rows[0] is self._row and not self._row.has_begun and len(self._rows) == 1:
            self._rows.clear()
        seat = self._new_row(fitted, new_messages, self._schemas, opponent=opponent, ends_when_full=True)
        seat._row.seat = number
        return seat

    def branch(
        self, mark: RowMark, messages: Sequence[Message] = (), rendered: tuple[int, ...] | None = None
    ) -> "Session":
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
    ) -> "Session":
        return Session(
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

    def score_turn(self, reward: float | None, at: RowMark | None = None) -> None:
        """Note what an environment gave for the last turn, or for the one that ended at a mark."""
        if reward is not None:
            turns = self._row.turns
            turn = turns[-1] if at is None else next(turn for turn in turns if turn.sampled_end == at.num_ids)
            turn.reward = reward
            self._state.turn_rewards.append(reward)

    def add_turn_reward(self, reward: float) -> None:
        """Add to what the last turn of this row was given."""
        turn = self._row.turns[-1]
        turn.reward = (turn.reward or 0.0) + reward
        self._state.turn_rewards.append(reward)

    def finish(self) -> None:
        """End the session as complete."""
        self.end(StopReason.STOP)

    def end(self, reason: StopReason) -> None:
        """End the session; the first reason stays."""
        if self._state.ended is None:
            self._state.ended = reason

    async def in_thread(self, function: Callable[[], T], timeout_s: float) -> T:
        """What blocking code returns, run beside the event loop; `Expired` when it takes longer, and is left alone."""
        value: Any = await self._services.threads.run(function, timeout_s)
        return value  # type: ignore[no-any-return]

    def add_cleanup(self, work: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
        """Run `work` when the loop has ended, however it did: within a deadline, and only logged where it breaks."""
        self._state.cleanups.append((work, what))

    @contextmanager
    def at(self, stage: str, event: str) -> Iterator[None]:
        """The stage inside the block: named in stall reports, and decides the kind of failure when the block raises."""
        began = self._enter(stage, event)
        yield
        if stage == "environment":
            self._state.environment_s += self._clock() - began
        self._enter("loop", f"{stage} answered")

    def _enter(self, stage: str, event: str | None = None) -> float:
        state = self._state
        state.stage, state.since = stage, self._clock()
        if event:
            state.last_event = event
        if self._services.announce is not None and stage in ("tools", "environment"):
            self._services.announce(Wait(self.task.uid, self.sample, stage, state.since, "", state.last_event))
        return state.since


def _assistant_message(completion: Completion) -> Message:
    """A turn as a message; calls that the engine parsed itself have OpenAI's shape."""
    message: dict[str, Any] = {"role": "assistant", "content": completion.text}
    if completion.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in completion.calls
        ]
    return message


_PER_TURN = (
    *("temperature", "top_p", "top_k", "min_p", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def _turn_sampling(run: SamplingParams, max_tokens: int | None, given: Mapping[str, Any]) -> SamplingParams:
    """The run's settings with those of one turn in their place, checked as the config's are."""
    if max_tokens is not None and max_tokens < 1:
        raise MisuseError(f"generate(max_tokens={max_tokens}): ask for at least 1")
    for name in given:
        if name not in _PER_TURN:
            hint = nearest(name, _PER_TURN) or f"there are: max_tokens, {', '.join(_PER_TURN)}"
            raise MisuseError(f"generate({name}=…) is no setting of a turn; {hint}")
    if given:
        values = {**given, "stop": (given["stop"],) if isinstance(given.get("stop"), str) else given.get("stop", ())}
        try:
            SamplingConfig(**{**values, "stop": tuple(values["stop"])})
        except ConfigError as error:
            raise MisuseError(f"generate: {error}") from None
        base = run.temperature if given.get("temperature", run.temperature) != run.temperature else None
        stop = tuple(values["stop"]) if "stop" in given else run.stop
        run = replace(run, **{**values, "stop": stop, "model_temperature": base or None})
    return run if max_tokens is None else replace(run, max_tokens=min(max_tokens, run.max_tokens))


def _check_lengths(part: Completion, most: int) -> None:
    count = len(part.ids)
    uneven = len(part.logprobs) != count or len(part.versions) != count
    if uneven or count > most or len(part.processed_logprobs) not in (0, count):
        lengths = f"{count} ids, {len(part.logprobs)} logprobs, {len(part.versions)} versions, room for {most}"
        raise EngineFailure(f"{part.replica or 'engine'} returned {lengths}")


def _as_message(item: Message | str) -> Message:
    return {"role": "user", "content": item} if isinstance(item, str) else item
