"""With few pages, rows wait for each other, and every answer is the one that ample memory gives (CPU, float32)."""

import logging
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_native_determinism import ROLLOUT, Talk, alone
from tests.unit.test_native_scheduler import Lagging, Watched, sequence
from treadle.config import RolloutConfig
from treadle.engine.native.kv_cache_manager import LOOKAHEAD_STEPS, PageSchedule
from treadle.engine.native.prefix_cache import SwapSpace
from treadle.engine.native.sequence import SequenceResult, SequenceState
from treadle.types import Completion, Request, SamplingParams, StopReason

PAGE = 16
LONGEST = -(-ROLLOUT.sequence_length() // PAGE)
"""Pages of the longest sequence."""

LONG = SamplingParams(40, temperature=0.9)


class Tight(Watched):
    """A stand with few pages, which are counted after every step."""

    def __init__(self, pages: int, **keys: object) -> None:
        super().__init__(page=PAGE, pages=pages, **keys)
        step = self.scheduler.step

        def watch_step() -> None:
            step()
            self.count_pages()

        self.scheduler.step = watch_step  # type: ignore[method-assign]

    def count_pages(self) -> None:
        """Every page is free, or counted once for each sequence and each prefix-cache entry that has it."""
        manager, users = self.scheduler._kv_manager, [0] * len(self.scheduler._kv_manager.pages._users)
        held = [
            *(one.pages for one in self.scheduler._admitted),
            *(one.pages for one in manager.prefix_cache._cached.values()),
        ]
        for page in (page for pages in held for page in pages):
            users[page] += 1
        assert users == manager.pages._users
        assert len(manager.pages.free) == users.count(0) - (len(users) > self.runner.cache.num_pages)
        assert len(self.scheduler._admitted) + len(manager.free_rows) == manager.num_rows

    def check_empty(self) -> None:
        """Nothing is left of requests that are over, once sessions are forgotten."""
        assert not self.scheduler.busy and self.swap_space.reserved_bytes == 0
        self.scheduler._kv_manager.prefix_cache.clear()
        self.count_pages()
        assert len(self.scheduler._kv_manager.pages.free) == self.runner.cache.num_pages

    @property
    def swap_space(self) -> SwapSpace:
        return self.scheduler._kv_manager._swap_space


def check(stand: Tight, crowd: list[Talk]) -> None:
    stand.run(crowd)
    for talk in crowd:
        assert talk.heard == alone(talk.task, talk.sample, len(talk.pauses), talk.sampling, 32)
    stand.check_empty()


talks = st.builds(
    Talk,
    task=st.integers(0, 5),
    sample=st.integers(0, 2),
    pauses=st.lists(st.integers(0, 12), min_size=1, max_size=2).map(tuple),
    aborts=st.lists(st.integers(0, 25), max_size=2).map(tuple),
    sampling=st.sampled_from([LONG, SamplingParams(12, temperature=1.3, top_p=0.8, stop_token_ids=(5,))]),
)
crowds = st.lists(talks, min_size=2, max_size=12, unique_by=lambda talk: talk.session)


@settings(max_examples=15, deadline=None)
@given(crowds, st.integers(LONGEST, 3 * LONGEST), st.booleans())
def test_few_pages_change_no_answer_and_none_is_lost(crowd: list[Talk], pages: int, lagging: bool) -> None:
    stand = Tight(pages)
    if lagging:
        stand.runner.__class__ = Lagging
    check(stand, crowd)


def test_sessions_between_turns_keep_their_pages_as_long_as_the_budget_allows() -> None:
    """Forty sessions on sixteen rows: pages are added, and nothing is evicted, swapped out or computed twice."""
    rollout = RolloutConfig(prompt_length=40, response_length=60, max_num_seqs=16, max_num_batched_tokens=48)
    stand = Tight(40 * LONGEST, rollout=rollout)
    first = stand.runner.cache.num_pages
    crowd = [Talk(task, 0, (0, 60), sampling=SamplingParams(12, temperature=0.9)) for task in range(40)]
    check(stand, crowd)
    counters = stand.scheduler.cache_counters
    assert first == 16 * LONGEST < stand.runner.cache.num_pages
    assert counters.evicted_rows == counters.swapped_out_bytes == 0
    assert stand.scheduler.release()
    assert stand.runner.cache.num_pages == first == len(stand.scheduler._kv_manager.pages.free)


@settings(max_examples=8, deadline=None)
@given(crowds, st.lists(st.integers(0, 60), min_size=1, max_size=3))
def test_new_weights_change_no_answer_of_one_turn_if_they_are_the_old_ones(crowd: list[Talk], when: list[int]) -> None:
    crowd = [Talk(talk.task, talk.sample, talk.pauses[:1], sampling=talk.sampling) for talk in crowd]
    stand, turns = Tight(LONGEST + 2), 0
    step = stand.scheduler.step

    def turn_and_change() -> None:
        nonlocal turns
        step()
        turns += 1
        for version in (number for number, at in enumerate(sorted(when)) if at == turns):
            stand.scheduler.change_weights(version + 1, lambda: None)
            stand.count_pages()

    stand.scheduler.step = turn_and_change  # type: ignore[method-assign]
    check(stand, crowd)


def test_the_row_that_was_admitted_last_gives_way_and_goes_on_where_it_was(caplog: pytest.LogCaptureFixture) -> None:
    stand = Tight(LONGEST)
    crowd = [Talk(task, 0, (0,), sampling=LONG) for task in (1, 2, 3, 4)]
    ends: list[str] = []
    waits: list[int] = []
    answer = stand.scheduler._on_result

    def watch_answer(one: SequenceState, done: SequenceResult) -> None:
        assert isinstance(done, Completion)
        ends.append(one.request.uid)
        waits.append(done.preemptions)
        answer(one, done)

    stand.scheduler._on_result = watch_answer
    with caplog.at_level(logging.WARNING):
        check(stand, crowd)
    assert stand.scheduler.preemptions > 1 and sum(waits) == stand.scheduler.preemptions
    assert ends == ["task1", "task2", "task3", "task4"], "whoever came first is never held up by others"
    assert len(caplog.records) == 1 and "rollout.gpu_memory_utilization" in caplog.text
    prompts = sum(len(Talk(task, 0, ()).ids) - 1 for task in (1, 2, 3, 4))
    assert stand.tokens == prompts, "nothing is computed twice"


def preempted(tokens: int = 60) -> tuple[Tight, int]:
    """A stand in which one of two long answers waits for its pages, and how many tokens it has."""
    stand = Tight(LONGEST)
    for uid in "ab":
        stand.scheduler.add(sequence(uid, tokens, ids=tuple(range(5, 25))))
    for _ in range(tokens):
        if not stand.scheduler.preemptions:
            stand.scheduler.step()
    (waiting,) = stand.scheduler._waiting
    assert waiting.request.uid == "b" and waiting.swapped is not None
    return stand, len(waiting.sampled.ids)


def finish(stand: Tight) -> None:
    for _ in range(200):
        stand.scheduler.step()


def test_an_abort_of_a_preempted_row_keeps_its_tokens_and_what_was_computed() -> None:
    stand, tokens = preempted()
    stand.scheduler.abort(lambda one: one.request.uid == "b")
    answer = stand.answers.pop("b/0")
    assert isinstance(answer, Completion) and len(answer.ids) == tokens > 0 and answer.stop is StopReason.ABORT
    computed = stand.tokens
    rest = Request("b", 0, (*range(5, 25), *answer.ids), SamplingParams(60 - tokens), tokens)
    stand.scheduler.add(SequenceState(rest, lambda answer: None, 100))
    finish(stand)
    more, whole = stand.answers["b/0"], Watched()
    whole.scheduler.add(sequence("b", 60, ids=tuple(range(5, 25))))
    for _ in range(70):
        whole.scheduler.step()
    expected = whole.answers["b/0"]
    assert isinstance(more, Completion) and isinstance(expected, Completion)
    assert answer.ids + more.ids == expected.ids and answer.logprobs + more.logprobs == expected.logprobs
    assert stand.tokens == computed, "it went on from what it had"
    stand.check_empty()


def test_new_weights_find_a_preempted_row_between_two_tokens() -> None:
    stand, tokens = preempted()
    stand.scheduler.change_weights(3, lambda: None)
    finish(stand)
    answer = stand.answers["b/0"]
    assert isinstance(answer, Completion) and answer.versions == (0,) * tokens + (3,) * (60 - tokens)
    stand.check_empty()


def test_new_weights_begin_a_prefill_again_in_pages_that_no_row_of_old_ones_has() -> None:
    rollout, prompt = RolloutConfig(**{**ROLLOUT.values(), "max_num_batched_tokens": 4}), tuple(range(5, 46))
    stand = Tight(3 * LONGEST, rollout=rollout)
    for sample, tokens in ((0, 40), (1, 3)):
        stand.scheduler.add(
            SequenceState(Request("a", sample, prompt, SamplingParams(tokens)), lambda answer: None, 100)
        )
    for _ in range(16):
        stand.scheduler.step()
    first = stand.answers.pop("a/1")
    assert isinstance(first, Completion)
    again = SequenceState(
        Request("a", 1, (*prompt, *first.ids, *range(17)), SamplingParams(3)), lambda answer: None, 100
    )
    stand.scheduler.add(again)
    stand.scheduler.step()
    (running,) = stand.scheduler._running.values()
    assert set(again.pages) & set(running.pages), "both have the prompt"
    stand.scheduler.change_weights(1, lambda: None)
    before = stand.tokens
    stand.scheduler.step()
    assert again.pages and not set(again.pages) & set(running.pages)
    finish(stand)
    assert stand.tokens == before + len(prompt) + 19, "all of it, by the new weights"
    stand.check_empty()


def test_without_room_in_host_memory_a_preempted_row_is_computed_again_up_to_rounding() -> None:
    stand = Tight(LONGEST, parked_bytes=0)
    crowd = [Talk(task, 0, (0,), sampling=LONG) for task in (1, 2, 3)]
    stand.run(crowd)
    assert stand.scheduler.preemptions
    for talk in crowd:
        expected = alone(talk.task, 0, 1, talk.sampling, 32)
        assert [at for at, _ in talk.heard] == [at for at, _ in expected]
        assert [logprob for _, logprob in talk.heard] == pytest.approx([at for _, at in expected], abs=1e-5)
    stand.check_empty()


def test_siblings_share_the_full_pages_of_their_prompt() -> None:
    stand, prompt = Tight(3 * LONGEST), tuple(range(5, 46))
    for sample in range(6):
        request = Request("a", sample, prompt, SamplingParams(5))
        stand.scheduler.add(SequenceState(request, lambda answer: None, 100))
    stand.scheduler.step()
    used = stand.runner.cache.num_pages - len(stand.scheduler._kv_manager.pages.free)
    assert used == 2 + 6, "40 tokens: two full pages for all, and one for each"
    assert [stand.scheduler._kv_manager.pages.users(page) for page in range(2)] == [7, 7], "six rows, and the prompt"
    for _ in range(6):
        stand.scheduler.step()
    stand.check_empty()


def test_more_run_at_once_than_memory_holds_of_the_longest() -> None:
    stand = Tight(2 * LONGEST)
    crowd = [Talk(1, sample, (0,), sampling=SamplingParams(6)) for sample in range(12)]
    check(stand, crowd)
    assert stand.scheduler._steps == 6 and stand.scheduler.preemptions == 0


def test_a_session_that_goes_back_into_a_shared_page_leaves_it_to_the_others() -> None:
    stand, prompt = Tight(3 * LONGEST), tuple(range(5, 33))

    def ask(uid: str, sample: int, ids: tuple[int, ...]) -> Completion:
        stand.scheduler.add(SequenceState(Request(uid, sample, ids, SamplingParams(5)), lambda answer: None, 100))
        for _ in range(7):
            stand.scheduler.step()
        answer = stand.answers.pop(f"{uid}/{sample}")
        assert isinstance(answer, Completion)
        return answer

    first = ask("a", 0, prompt)
    ask("a", 0, (*prompt[:20], 90))
    stand.scheduler.forget("a/0")
    assert ask("a", 0, prompt) == first, "the prompt is still what it was"
    stand.check_empty()


def test_rows_are_told_of_once_and_before_they_need_a_page() -> None:
    growth, first, second = PageSchedule(), sequence("a"), sequence("b")
    assert growth.next(0) == []
    growth.add(first, LOOKAHEAD_STEPS + 3)
    growth.add(second, 3 * LOOKAHEAD_STEPS)
    due = {step: growth.next(step) for step in range(1, 2 * LOOKAHEAD_STEPS)}
    assert {step for step, found in due.items() if found} == {LOOKAHEAD_STEPS} and due[LOOKAHEAD_STEPS] == [first]
    growth.add(first, 3 * LOOKAHEAD_STEPS + 1)
    growth.drop(second)
    growth.next(2 * LOOKAHEAD_STEPS)
    assert growth.next(3 * LOOKAHEAD_STEPS) == [first]


def test_prefill_gives_way_as_well_and_keeps_what_its_session_had() -> None:
    rollout = RolloutConfig(prompt_length=80, response_length=60, max_num_seqs=16, max_num_batched_tokens=1)

    def second_turn(crowded: bool) -> Completion:
        stand = Tight(9, rollout=rollout)
        stand.scheduler.add(sequence("b", 5, ids=tuple(range(5, 15))))
        finish(stand)
        first = stand.answers.pop("b/0")
        assert isinstance(first, Completion)
        for uid in "ac" if crowded else "":
            stand.scheduler.add(sequence(uid, 60))
        stand.scheduler.add(sequence("b", 5, ids=(*range(5, 15), *first.ids, *range(60))))
        for _ in range(60 if crowded else 0):
            stand.scheduler.step()
            if stand.scheduler.preemptions:
                break
        waiting = [len(one.swapped.ids) if one.swapped else 0 for one in stand.scheduler._waiting]
        assert not crowded or 14 < waiting[0] < 74, "in the middle of its prefill"
        finish(stand)
        stand.check_empty()
        second = stand.answers["b/0"]
        assert isinstance(second, Completion) and len(second.ids) == 5
        return replace(second, preemptions=0)

    assert second_turn(crowded=True) == second_turn(crowded=False)
