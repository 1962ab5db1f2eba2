"""Session: one attempt at a task, and the only way from an agent loop to tokens.

Owns the token rows of a trajectory and its budgets. An agent loop calls `generate`, `observe`, `call_tools`, `fork` and
`branch`; it never holds a token list, so what is trained is what was sampled, whatever the loop does.
Invariant: rows only grow; the mask is 1 exactly on sampled ids, each with its logprob and policy version; no row is
longer than `rollout.response_length`, nor are all sampled ids together. Each row draws noise of its own, whatever else
is generated meanwhile.
"""

import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from treadle.config.rollout import SamplingConfig
from treadle.data.chat_template import CHANNELS
from treadle.engine.protocol import ABORTED
from treadle.engine.requests import trim_at_stop
from treadle.errors import ConfigError, EngineFailure, LoopFailure, MisuseError, PromptFailure, nearest
from treadle.observe import Wait
from treadle.rollout.parsers import PARSERS, Parsed
from treadle.rollout.protocol import CallParser
from treadle.rollout.session_row import SessionRow
from treadle.rollout.trajectory_builder import RowMark, TurnBuilder
from treadle.rollout.trajectory_checks import finite_reward
from treadle.types import (
    Completion,
    Message,
    OnTokens,
    Request,
    SamplingParams,
    StopReason,
    ToolCall,
    ToolResult,
    ToolStatus,
)

T = TypeVar("T")


class Session(SessionRow):
    """One attempt at a task, as an agent loop sees it."""

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

    def call_opening(self, name: str = "") -> str:
        """What a turn that calls a tool begins with in the run's format; empty where that is unknown."""
        return self._services.parser.opening(name)

    @property
    def call_starts(self) -> tuple[str, ...]:
        """What tool calls begin with in the run's format; empty where that is unknown."""
        return self._services.parser.starts

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

    def score_turn(self, reward: float | None, at: RowMark | None = None) -> None:
        """Note what an environment gave for the last turn, or for the one that ended at a mark."""
        if reward is not None:
            turns = self._row.turns
            turn = turns[-1] if at is None else next(turn for turn in turns if turn.sampled_end == at.num_ids)
            turn.reward = finite_reward(reward, LoopFailure, "the reward of a turn")
            self._state.turn_rewards.append(turn.reward)

    def add_turn_reward(self, reward: float) -> None:
        """Add to what the last turn of this row was given."""
        turn = self._row.turns[-1]
        given = finite_reward(reward, LoopFailure, "the reward of a turn")
        turn.reward = finite_reward((turn.reward or 0.0) + given, LoopFailure, "the reward of a turn")
        self._state.turn_rewards.append(given)

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
