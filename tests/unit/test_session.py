"""A session only appends: what was sampled is what is recorded, and every limit has its own reason."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import virtual_time
from tests.rollouts import rollout, task
from treadle.config import LimitsConfig, RolloutConfig
from treadle.engine import rng
from treadle.errors import EngineFailure, MisuseError, RowFull
from treadle.rollout.parsers import parser
from treadle.rollout.protocol import Services
from treadle.rollout.session import Session
from treadle.rollout.trajectory_builder import SessionRecord
from treadle.types import Completion, Request, Row, SamplingParams, StopReason, ToolCall, ToolResult, ToolStatus

PROMPT = (1, 2, 3)


class Codec:
    """Observations are as many ids as their text has characters."""

    stop_token_ids = (9,)

    def prompt(self, messages, tools=()):
        return tuple(range(100, 100 + sum(len(message["content"]) for message in messages)))

    def observation(self, messages, tools=()):
        return tuple(7 for message in messages for _ in message["content"])

    def decode(self, ids):
        return "".join(chr(at) for at in ids)


@dataclass
class Canned:
    """Answers in a row; remembers what it was asked."""

    answers: list[Completion]
    asked: list[Request] = field(default_factory=list)

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        answer = self.answers.pop(0)
        ids = answer.ids[: request.sampling.max_tokens]
        stop = answer.stop if len(ids) == len(answer.ids) else StopReason.LENGTH
        logprobs, versions = answer.logprobs[: len(ids)], answer.versions[: len(ids)]
        return Completion(ids, logprobs, versions, stop, preemptions=answer.preemptions)


class Tools:
    def __init__(self, *statuses: ToolStatus) -> None:
        self.statuses = list(statuses)

    async def call_many(self, calls, max_parallel):
        return [ToolResult("ok", self.statuses.pop(0) if self.statuses else ToolStatus.OK) for _ in calls]


def said(*ids: int, stop: StopReason = StopReason.STOP, version: int = 0) -> Completion:
    return Completion(ids, tuple(-0.1 * at for at in ids), (version,) * len(ids), stop)


def with_session(config: RolloutConfig, answers: list[Completion], use, tools: Tools | None = None) -> Row:
    """Run `use(session, engine)`; the rows it left."""

    async def run() -> tuple[Row, ...]:
        engine = Canned(answers)
        services = Services(config, engine, Codec(), parser("hermes"))
        session = Session(task(), 0, services, tools or Tools(), (), SamplingParams(10_000), PROMPT)
        await use(session, engine)
        return SessionRecord(session).rows()

    return asyncio.run(run())


def test_sampled_ids_are_recorded_with_mask_logprob_and_version():
    async def use(session: Session, engine: Canned) -> None:
        await session.generate()
        await session.observe("abc")
        await session.generate()

    (row,) = with_session(rollout(), [said(5, 9, version=3), said(6, 9, version=4)], use)
    assert row.prompt_ids == PROMPT
    assert row.ids == (5, 9, 7, 7, 7, 6, 9)
    assert row.mask == (1, 1, 0, 0, 0, 1, 1)
    assert row.logprobs == (-0.5, -0.9, 0.0, 0.0, 0.0, -0.6000000000000001, -0.9)
    assert row.versions == (3, 3, -1, -1, -1, 4, 4)
    assert [(turn.start, turn.sampled_end, turn.end) for turn in row.turns] == [(0, 2, 5), (5, 7, 7)]


def test_a_session_tells_how_often_the_engine_had_no_room_for_it():
    async def use(session: Session, engine: Canned) -> None:
        for _ in range(2):
            await session.generate()
            await session.observe("abc")
        notes.append(SessionRecord(session).extra())

    notes: list[Mapping[str, Any]] = []
    with_session(rollout(), [replace(said(5, 9), preemptions=2), replace(said(6, 9), preemptions=1)], use)
    with_session(rollout(), [said(5, 9), said(6, 9)], use)
    assert notes == [{"engine_preemptions": 3}, {}]


def test_the_engine_is_asked_with_every_id_so_far_and_history_is_never_rendered_again():
    async def use(session: Session, engine: Canned) -> None:
        await session.generate()
        await session.observe("xy")
        await session.generate()
        assert engine.asked[1].ids == (*PROMPT, 5, 9, 7, 7)
        assert engine.asked[1].position == 2

    with_session(rollout(), [said(5, 9), said(6, 9)], use)


def test_an_interrupted_turn_goes_on_from_its_tokens_with_the_new_weights():
    async def use(session: Session, engine: Canned) -> None:
        completion = await session.generate()
        assert completion.ids == (5, 6, 7, 9)
        assert completion.text == "\x05\x06\x07\x09"
        assert engine.asked[1].ids == (*PROMPT, 5, 6)
        assert engine.asked[1].position == 2

    answers = [said(5, 6, stop=StopReason.ABORT, version=1), said(7, 9, version=2)]
    (row,) = with_session(rollout(), answers, use)
    assert row.versions == (1, 1, 2, 2)
    assert len(row.turns) == 1


def test_sampled_tokens_over_all_turns_never_exceed_response_length():
    async def use(session: Session, engine: Canned) -> None:
        await session.generate()
        await session.observe("abc")
        completion = await session.generate()
        assert completion.stop is StopReason.LENGTH
        assert session.done

    (row,) = with_session(rollout(response_length=8), [said(1, 1, 1, 9), said(*range(50))], use)
    assert len(row.ids) == 8


def test_an_observation_that_leaves_no_room_to_answer_ends_the_session_and_is_not_kept():
    async def use(session: Session, engine: Canned) -> None:
        await session.generate()
        await session.observe("a" * 6)
        assert session.done

    (row,) = with_session(rollout(response_length=8), [said(1, 9)], use)
    assert row.ids == (1, 9)


def test_generating_after_the_end_is_refused():
    async def use(session: Session, engine: Canned) -> None:
        session.end(StopReason.TURN_LIMIT)
        with pytest.raises(MisuseError, match=r"check session\.done"):
            await session.generate()

    with_session(rollout(), [], use)


def test_the_turn_limit_ends_a_session_that_wants_another_turn():
    async def use(session: Session, engine: Canned) -> None:
        await session.generate()
        await session.observe("more")
        assert SessionRecord(session).state.ended is StopReason.TURN_LIMIT

    with_session(rollout(max_assistant_turns=1), [said(1, 9)], use)


def test_the_user_turn_limit_counts_user_messages_only():
    async def use(session: Session, engine: Canned) -> None:
        await session.generate()
        await session.observe({"role": "tool", "content": "t"})
        await session.generate()
        await session.observe("u")
        await session.generate()
        await session.observe("u")
        assert SessionRecord(session).state.ended is StopReason.TURN_LIMIT

    with_session(rollout(max_user_turns=1), [said(1, 9)] * 3, use)


def test_invalid_calls_in_a_row_end_the_session_and_a_good_one_starts_the_count_anew():
    async def use(session: Session, engine: Canned) -> None:
        call = ToolCall("x", {})
        await session.generate()
        await session.call_tools([call, call, call])  # invalid, ok, invalid
        assert not session.done
        await session.call_tools([call])
        assert SessionRecord(session).state.ended is StopReason.INVALID_CALLS

    bad, good = ToolStatus.INVALID, ToolStatus.OK
    with_session(rollout(max_invalid_calls=2), [said(1, 9)], use, Tools(bad, good, bad, bad))


def test_tool_time_is_a_budget_of_the_whole_session():
    class Slow(Tools):
        async def call_many(self, calls, max_parallel):
            await asyncio.sleep(0.03)
            return await super().call_many(calls, max_parallel)

    async def use(session: Session, engine: Canned) -> None:
        await session.generate()
        await session.call_tools([ToolCall("x", {})])
        assert SessionRecord(session).state.ended is StopReason.TOOL_TIME

    config = rollout(limits=LimitsConfig(session_tool_time_s=0.02))
    with_session(config, [said(1, 9)], use, Slow())


def test_an_engine_that_returns_unequal_lengths_fails_and_nothing_is_appended():
    async def use(session: Session, engine: Canned) -> None:
        with pytest.raises(EngineFailure, match="2 ids, 1 logprobs"):
            await session.generate()

    (row,) = with_session(rollout(), [Completion((1, 9), (0.0,), (0, 0), StopReason.STOP)], use)
    assert row.ids == ()


def test_a_fork_is_a_row_of_its_own_that_shares_budgets_and_the_last_word():
    async def use(session: Session, engine: Canned) -> None:
        await session.generate()
        shorter = session.fork([{"role": "user", "content": "summary"}])
        await shorter.generate()
        assert shorter.num_turns == 2
        assert SessionRecord(session).messages[0]["content"] == "summary"

    first, second = with_session(rollout(), [said(1, 9), said(2, 9)], use)
    assert first.ids == (1, 9)
    assert (len(second.prompt_ids), second.ids) == (7, (2, 9))


def test_a_fork_cannot_sample_more_than_what_is_left_of_the_budget():
    async def use(session: Session, engine: Canned) -> None:
        await session.generate()
        fork = session.fork([{"role": "user", "content": "s"}])
        assert fork.tokens_left == 4

    with_session(rollout(response_length=6), [said(1, 9)], use)


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 12), st.integers(0, 6), st.sampled_from([StopReason.STOP, StopReason.ABORT])),
        min_size=1,
        max_size=12,
    ),
    length=st.integers(1, 60),
)
def test_whatever_a_loop_does_rows_stay_whole_and_within_bounds(steps, length):
    answers = [said(*range(20, 20 + size), stop=stop, version=at) for at, (size, _, stop) in enumerate(steps)]
    answers.append(said(9))
    sampled = []

    async def use(session: Session, engine: Canned) -> None:
        for _, words, _ in steps:
            if session.done or not engine.answers:
                break
            sampled.extend((await session.generate()).ids)
            if not session.done:
                await session.observe("x" * words)

    (row,) = with_session(rollout(response_length=length), answers, use)
    assert len(row.ids) == len(row.mask) == len(row.logprobs) == len(row.versions) <= length
    assert [at for at, bit in zip(row.ids, row.mask, strict=True) if bit] == sampled
    assert all((version == -1) == (bit == 0) for version, bit in zip(row.versions, row.mask, strict=True))
    assert all(turn.start <= turn.sampled_end <= turn.end for turn in row.turns)


class Slow:
    """Draws ids by the noise of each request, one for every second, and never stops by itself."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        await asyncio.sleep(request.sampling.max_tokens)
        ids = tuple(10 + rng.bits_at(rng.stream_of(request), request.position + at) % 50 for at in range(1000))
        ids = ids[: request.sampling.max_tokens]
        return Completion(ids, (-1.0,) * len(ids), (0,) * len(ids), StopReason.LENGTH)


def slow_session(length: int, *, attempt: int = 0) -> tuple[Session, Slow]:
    engine = Slow()
    services = Services(rollout(response_length=length), engine, Codec(), parser("hermes"))
    return Session(task(), 0, services, Tools(), (), SamplingParams(10_000), PROMPT, attempt=attempt), engine


def test_parallel_drafts_draw_noise_of_their_own_and_stay_within_the_budget_together():
    async def main() -> None:
        session, engine = slow_session(12)
        drafts = [session.fork([{"role": "user", "content": "draft"}]) for _ in range(4)]
        said = await asyncio.gather(*(draft.generate() for draft in drafts))
        assert len({completion.ids for completion in said}) == 4
        assert sum(len(completion.ids) for completion in said) == 12
        assert {request.row for request in engine.asked} == {1, 2, 3, 4}
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)  # side by side, three tokens each
        assert session.tokens_left == 0 and session.done

    virtual_time.run(main())


def test_a_turn_tells_when_it_began():
    async def main() -> None:
        await asyncio.sleep(5.0)
        session, _ = slow_session(12)
        await asyncio.sleep(1.5)
        await session.generate(max_tokens=4)  # a second for each token
        await asyncio.sleep(2.0)  # whatever a loop does between its turns
        await session.generate(max_tokens=3)
        (row,) = SessionRecord(session).rows()
        assert [turn.started_s for turn in row.turns] == pytest.approx([1.5, 7.5])

    virtual_time.run(main())


def test_a_row_that_reserved_too_little_goes_on_with_what_others_left():
    async def main() -> None:
        session, engine = slow_session(40)
        long, short = (session.fork([{"role": "user", "content": "draft"}]) for _ in range(2))

        async def stop_early(request: Request, real=engine.generate) -> Completion:
            answer = await real(request)
            if request.row != short._row.number:
                return answer
            return Completion(answer.ids[:5], answer.logprobs[:5], answer.versions[:5], StopReason.STOP)

        engine.generate = stop_early
        first, second = await asyncio.gather(long.generate(), short.generate())
        assert (len(first.ids), len(second.ids)) == (35, 5)
        stream = rng.stream_of(engine.asked[0])
        assert list(first.ids) == [10 + rng.bits_at(stream, at) % 50 for at in range(35)]

    virtual_time.run(main())


def test_position_counts_the_tokens_of_its_row():
    async def use(session: Session, engine: Canned) -> None:
        await session.generate()
        fork = session.fork([{"role": "user", "content": "s"}])
        await fork.generate()
        await session.generate()
        assert [(request.row, request.position) for request in engine.asked] == [(0, 0), (1, 0), (0, 2)]

    with_session(rollout(), [said(1, 9), said(2, 3, 9), said(4, 9)], use)


def test_another_attempt_is_in_the_key_of_every_row():
    async def main(attempt: int) -> list[tuple[int, ...]]:
        session, _ = slow_session(20, attempt=attempt)
        fork = session.fork([{"role": "user", "content": "s"}])
        return [(await fork.generate()).ids]

    first, again, other = (virtual_time.run(main(attempt)) for attempt in (0, 0, 1))
    assert first == again != other


def test_generating_twice_at_once_on_one_row_is_refused():
    async def main() -> None:
        session, _ = slow_session(12)
        first = asyncio.ensure_future(session.generate())
        await asyncio.sleep(0)
        with pytest.raises(MisuseError, match="fork it for each draft"):
            await session.generate()
        assert len((await first).ids) == 12

    virtual_time.run(main())


def test_a_request_that_fails_gives_its_tokens_back():
    async def use(session: Session, engine: Canned) -> None:
        with pytest.raises(EngineFailure):
            await session.generate()
        assert session.tokens_left == 8

    with_session(rollout(response_length=8), [Completion((1, 9), (0.0,), (0, 0), StopReason.STOP)], use)


def test_a_turn_may_have_sampling_of_its_own_within_the_budget():
    async def use(session: Session, engine: Canned) -> None:
        completion = await session.generate(max_tokens=2, temperature=0.5, stop="x")
        assert completion.stop is StopReason.LENGTH and not session.done
        first = engine.asked[0].sampling
        assert (first.max_tokens, first.temperature, first.stop, first.model_temperature) == (2, 0.5, ("x",), 1.0)
        await session.observe("ab")
        await session.generate()
        assert (engine.asked[1].sampling.temperature, engine.asked[1].sampling.stop) == (1.0, ())

    (row,) = with_session(rollout(), [said(5, 6, 7), said(6, 9)], use)
    assert row.ids == (5, 6, 9, 7, 7, 6, 9), "the turn is closed before the next message"
    assert row.mask == (1, 1, 0, 0, 0, 1, 1)


def test_a_turn_that_asks_for_more_than_the_budget_ends_the_session():
    async def use(session: Session, engine: Canned) -> None:
        await session.generate(max_tokens=100)
        assert session.done

    (row,) = with_session(rollout(response_length=4), [said(1, 2, 3, 4, 5, 6)], use)
    assert len(row.ids) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temprature": 1.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"max_tokens": 0}, "at least 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_a_turns_sampling_is_checked_as_the_configs_is(given, message):
    async def use(session: Session, engine: Canned) -> None:
        with pytest.raises(MisuseError, match=message):
            await session.generate(**given)
        assert not engine.asked

    with_session(rollout(), [said(1, 9)], use)


def test_an_interrupted_turn_tells_how_much_of_it_was_said_and_its_text_ends_before_the_stop_string():
    async def use(session: Session, engine: Canned) -> None:
        completion = await session.generate(stop=["lo"])
        assert completion.text == "hel"
        assert [request.num_begun for request in engine.asked] == [0, 2]

    with_session(rollout(), [said(*map(ord, "he"), stop=StopReason.ABORT), said(*map(ord, "llo"))], use)


def test_a_branch_begins_with_the_ids_of_its_row_verbatim_and_trains_none_of_them() -> None:
    async def use(session: Session, engine: Canned) -> None:
        await session.generate()
        mark = session.mark()
        await session.observe("ab")
        await session.generate()
        branch = session.branch(mark, [{"role": "user", "content": "xyz"}])
        assert [message["content"] for message in branch.messages[-2:]] == ["\x04\t", "xyz"]
        await branch.generate()

    first, second = with_session(rollout(), [said(4, 9), said(5, 9), said(6, 9)], use)
    assert first.ids == (4, 9, 7, 7, 5, 9) and first.mask == (1, 1, 0, 0, 1, 1)
    assert second.prompt_ids == (*PROMPT, 4, 9, 7, 7, 7) and second.ids == (6, 9) and second.mask == (1, 1)


def test_a_branch_from_a_turn_that_was_cut_short_closes_it() -> None:
    async def use(session: Session, engine: Canned) -> None:
        await session.generate(max_tokens=1)
        await session.branch(session.mark(), [{"role": "user", "content": "x"}]).generate()

    _, second = with_session(rollout(), [said(4, 9), said(6, 9)], use)
    assert second.prompt_ids == (*PROMPT, 4, 9, 7)


def test_a_root_takes_the_place_of_a_prompt_that_nothing_was_generated_from() -> None:
    async def use(session: Session, engine: Canned) -> None:
        one = session.root([{"role": "user", "content": "abc"}], ())
        other = session.root([{"role": "user", "content": "ab"}], ())
        await one.generate()
        await other.generate()

    rows = with_session(rollout(), [said(4, 9), said(5, 9)], use)
    assert [(row.prompt_ids, row.ids) for row in rows] == [((100, 101, 102), (4, 9)), ((100, 101), (5, 9))]


def test_messages_that_leave_no_room_change_nothing() -> None:
    async def use(session: Session, engine: Canned) -> None:
        row = session.root([{"role": "user", "content": "abc"}], ())
        await row.generate()
        for attempt in (
            lambda: row.extend([{"role": "user", "content": "x" * 50}]),
            lambda: row.branch(row.mark(), [{"role": "user", "content": "x" * 50}]),
            lambda: session.root([{"role": "user", "content": "x" * 50}], ()),
        ):
            with pytest.raises(RowFull):
                attempt()
        assert not session.done

    (row,) = with_session(rollout(prompt_length=20, response_length=20), [said(4, 9)], use)
    assert row.ids == (4, 9)


def test_what_is_not_kept_is_left_out_of_the_trajectory() -> None:
    async def use(session: Session, engine: Canned) -> None:
        await session.generate()
        mark = session.mark()
        await session.observe("ab")
        await session.generate()
        session.score_turn(0.5, mark)
        session.keep_until(mark)

    (row,) = with_session(rollout(), [said(4, 9), said(5, 9)], use)
    assert row.ids == (4, 9) and len(row.turns) == 1 and row.turns[0].reward == 0.5


def test_a_turn_that_an_engine_broke_off_goes_on_where_it_stopped() -> None:
    class Breaking(Canned):
        async def generate(self, request: Request) -> Completion:
            if not self.answers[0].ids:
                self.answers.pop(0)
                raise EngineFailure("gone")
            return await super().generate(request)

    async def run() -> tuple[Row, ...]:
        engine = Breaking([said(4, 5, stop=StopReason.ABORT), said(), said(6, 9)])
        services = Services(rollout(), engine, Codec(), parser("hermes"))
        session = Session(task(), 0, services, Tools(), (), SamplingParams(10_000), PROMPT)
        with pytest.raises(EngineFailure):
            await session.generate()
        assert (await session.generate()).ids == (4, 5, 6, 9)
        return SessionRecord(session).rows()

    (row,) = asyncio.run(run())
    assert row.ids == (4, 5, 6, 9) and len(row.turns) == 1
