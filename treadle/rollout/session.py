"""Session: one attempt at a task, and the only way from an agent loop to tokens.

Owns the token rows of a trajectory and its budgets. An agent loop calls `generate`, `observe`, `call_tools` and `fork`;
it never holds a token list, so what is trained is what was sampled, whatever the loop does.
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
from treadle.engine.requests import trim_at_stop
from treadle.errors import ConfigError, EngineFailure, MisuseError, PromptFailure, nearest
from treadle.observe import Wait
from treadle.rollout.protocol import Services, SessionToolCalls
from treadle.rollout.trajectory_builder import RowBuilder, SessionState, TurnBuilder
from treadle.types import (
    Completion,
    Message,
    Request,
    SamplingParams,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    ToolStatus,
)

T = TypeVar("T")


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
        self._row = RowBuilder(prompt_ids, len(self._rows))
        self._rows.append(self._row)
        self._messages: list[Message] = list(task.messages if messages is None else messages)
        self._clock = asyncio.get_running_loop().time
        if parent is None:
            self._state.since = self._clock()
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

    async def generate(self, *, max_tokens: int | None = None, **sampling: Any) -> Completion:
        """Sample one assistant turn. It goes on with the new weights when an update interrupts it.

        `max_tokens` bounds this turn, within what is left of the budget; a turn that it ends has stop reason LENGTH and
        the session goes on. `sampling` replaces the run's settings for this turn: temperature, top_p, top_k, min_p,
        repetition_penalty, presence_penalty, frequency_penalty, and `stop`, texts that end it.
        """
        params = _turn_sampling(self._sampling, max_tokens, sampling)
        if self.done:
            raise MisuseError(
                f"session {self.task.uid}/{self.sample} is over ({self._state.ended}): check session.done"
            )
        state, row = self._state, self._row
        if row.is_generating:
            raise MisuseError(
                f"session {self.task.uid}/{self.sample} generates already: fork it for each draft that runs beside it"
            )
        row.has_begun = row.is_generating = True
        start, began = len(row.ids), self._enter("generate")
        try:
            part = await self._sample_part(params, start)
            while part.stop is StopReason.ABORT:
                state.last_event = f"interrupted after {len(row.ids) - start} tokens"
                part = await self._sample_part(params, start)
        finally:
            row.is_generating = False
        took = self._clock() - began
        state.generate_s += took
        state.assistant_turns += 1
        row.turns.append(TurnBuilder(start, len(row.ids), part.stop, took, part.replica))
        completion = self._whole_turn(part, start, params.stop)
        self._messages.append(_assistant_message(completion))
        state.conversation = self._messages
        if part.stop is StopReason.LENGTH and (max_tokens is None or len(row.ids) - start < max_tokens):
            self.end(StopReason.LENGTH)
        self._enter("loop", f"turn {state.assistant_turns}: {len(row.ids) - start} tokens, {part.stop}")
        return completion

    async def _sample_part(self, params: SamplingParams, start: int) -> Completion:
        """One request: up to the end of the turn, to an interruption, or to the end of what was reserved for it."""
        row, state = self._row, self._state
        wanted = min(self._room, params.max_tokens - (len(row.ids) - start))
        granted = 0
        if wanted > 0:
            granted = await state.reserve(self._services.rollout.response_length, wanted, self._sharers())
        if not granted:
            return Completion((), (), (), StopReason.LENGTH)
        count = 0
        try:
            part = await self._services.engine.generate(self._request(replace(params, max_tokens=granted), start))
            _check_lengths(part, granted)
            count = len(part.ids)
        finally:
            state.release(granted, count)
        row.add_sampled(part)
        state.preemptions += part.preemptions
        state.queue_s += part.queue_s
        state.server = part.replica
        if part.stop is StopReason.LENGTH and count == granted < wanted:
            return replace(part, stop=StopReason.ABORT)  # there may be more to reserve by now
        return part

    def _request(self, params: SamplingParams, start: int) -> Request:
        row = self._row
        return Request(
            uid=self.task.uid,
            sample=self.sample,
            ids=(*row.prompt_ids, *row.ids),
            sampling=params,
            position=row.num_sampled,
            messages=tuple(self._messages),
            tools=self._schemas,
            row=row.number,
            attempt=self._attempt,
            said=len(row.ids) - start,
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
        ids = self._close_turn() + self._services.renderer.observation(new_messages, self._schemas)
        if len(ids) >= min(self._room, self._services.rollout.response_length - state.sampled):
            return self.end(StopReason.LENGTH)
        self._row.add_observed(ids)
        self._messages += new_messages
        return None

    def _close_turn(self) -> tuple[int, ...]:
        """The end-of-turn token, where the turn ended without one: at a stop string, or at its own `max_tokens`."""
        row, stops = self._row, self._services.renderer.stop_token_ids
        return stops[:1] if row.ids and row.mask[-1] and row.ids[-1] not in stops else ()

    def parse(self, completion: Completion) -> tuple[ToolCall, ...]:
        """The tool calls in a completion; malformed ones carry their problem."""
        calls: tuple[ToolCall, ...] = completion.calls or self._services.parser.parse(completion.text).calls
        return calls

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

    def score_turn(self, reward: float | None) -> None:
        """Note what an environment gave for the last turn."""
        if reward is not None:
            self._row.turns[-1].reward = reward
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
