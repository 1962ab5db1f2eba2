"""Who gets a row when, what is computed once, and what is kept."""

from collections.abc import Sequence

import pytest
import torch

from tests.unit.test_native_determinism import PLAIN, Stand, Talk, alone
from treadle.config import RolloutConfig
from treadle.engine.native.attention_metadata import PrefillChunk
from treadle.engine.native.model_runner import ModelRunner
from treadle.engine.native.prefix_cache import SwappedTokens, SwapSpace
from treadle.engine.native.sequence import SequenceState
from treadle.errors import EngineFailure
from treadle.types import Completion, Request, SamplingParams, StopReason


class Watched(Stand):
    """A stand that notes what is prefilled and how many rows each step computes."""

    def __init__(self, **keys: object) -> None:
        super().__init__(**keys)  # type: ignore[arg-type]
        self.prefilled: list[PrefillChunk] = []
        self.rows: list[int] = []
        prefill, advance = self.runner.prefill, self.runner.advance

        def watch_prefill(chunks: Sequence[PrefillChunk]) -> None:
            self.prefilled += chunks
            prefill(chunks)

        def watch_advance(count: int, span: int, *filters: bool) -> torch.Tensor:
            self.rows.append(count)
            return advance(count, span, *filters)

        self.runner.prefill, self.runner.advance = watch_prefill, watch_advance  # type: ignore[method-assign]

    @property
    def tokens(self) -> int:
        return sum(len(chunk.ids) for chunk in self.prefilled)


def test_samples_of_one_prompt_share_its_prefill() -> None:
    stand = Watched()
    talks = [Talk(4, sample, (0,)) for sample in range(8)]
    prompt = len(talks[0].ids)
    stand.run(talks)
    assert stand.tokens == prompt - 1


def test_a_sample_that_comes_late_shares_it_too() -> None:
    stand = Watched()
    talks = [Talk(4, sample, (9 * sample,)) for sample in range(3)]
    prompt = len(talks[0].ids)
    stand.run(talks)
    assert stand.tokens == prompt - 1


def test_a_turn_computes_only_what_is_new() -> None:
    stand, talk = Watched(), Talk(4, 0, (0, 0, 0))
    prompt = len(talk.ids)
    stand.run([talk])
    first, *later = stand.prefilled
    assert len(first.ids) == prompt - 1
    assert [len(chunk.ids) for chunk in later] == [2, 3], "the last sampled token and the observation, less one"


def test_without_prefix_caching_everything_is_computed_again() -> None:
    rollout = RolloutConfig(prompt_length=40, response_length=60, max_num_seqs=16, enable_prefix_caching=False)
    stand, talk = Watched(rollout=rollout), Talk(4, 0, (0, 0))
    stand.run([talk])
    assert all(chunk.start == 0 for chunk in stand.prefilled) and len(stand.prefilled) == 2


def test_a_long_prompt_is_prefilled_in_pieces_that_fit_the_budget() -> None:
    rollout = RolloutConfig(prompt_length=40, response_length=60, max_num_seqs=16, max_num_batched_tokens=10)
    stand, talk = Watched(rollout=rollout), Talk(4, 0, (0,))
    prompt = len(talk.ids)
    stand.run([talk])
    assert [chunk.start for chunk in stand.prefilled] == list(range(0, prompt - 1, 10))
    assert max(len(chunk.ids) for chunk in stand.prefilled) == 10


def steps_until(stand: Stand, session: str) -> int:
    for step in range(1, 200):
        stand.scheduler.step()
        if session in stand.answers:
            return step
    raise AssertionError(f"{session} does not end")


NARROW = RolloutConfig(prompt_length=600, response_length=60, max_num_seqs=16, max_num_batched_tokens=32)
LONG = tuple(at % 90 for at in range(500))
"""A prompt of sixteen chunks."""


def long_sequence(uid: str, ids: tuple[int, ...] = LONG, tokens: int = 2) -> SequenceState:
    return SequenceState(Request(uid, 0, ids, SamplingParams(tokens)), lambda answer: None, 660)


def test_a_long_prompt_does_not_hold_up_a_request_that_is_cached_as_a_whole() -> None:
    stand = Watched(rollout=NARROW)
    stand.scheduler.add(sequence("kept"))
    while "kept/0" not in stand.answers:
        stand.scheduler.step()
    stand.scheduler.add(long_sequence("long-a"))
    stand.scheduler.add(long_sequence("long-b", tuple(reversed(LONG))))
    stand.scheduler.step()
    stand.scheduler.add(sequence("again", 2))
    assert steps_until(stand, "again/0") == 2, "two tokens, and no wait for chunks of others"
    assert {"long-a/0", "long-b/0"}.isdisjoint(stand.answers)


def test_a_short_prompt_takes_turns_with_a_long_one() -> None:
    stand = Watched(rollout=NARROW)
    stand.scheduler.add(long_sequence("long"))
    stand.scheduler.step()
    stand.scheduler.add(sequence("short", 2))
    stand.scheduler.add(sequence("other", 2, ids=(9, 8, 7)))
    assert steps_until(stand, "short/0") <= 4 and "other/0" in stand.answers
    steps_until(stand, "long/0")
    starts = [chunk.start for chunk in stand.prefilled if len(chunk.ids) > 3]
    assert starts == list(range(0, len(LONG) - 1, 32)), "its own chunks are as ever"


def test_samples_of_a_long_prompt_join_it_however_late_they_come() -> None:
    stand = Watched(rollout=NARROW)
    for sample in range(4):
        request = Request("long", sample, LONG, SamplingParams(2))
        stand.scheduler.add(SequenceState(request, lambda answer: None, 660))
        stand.scheduler.step()
    assert steps_until(stand, "long/0") < 20
    assert len(stand.answers) == 4 and stand.tokens == len(LONG) - 1


def test_chunks_of_long_prompts_side_by_side_give_the_bits_of_each_alone() -> None:
    prompts = [tuple((7 * task + 3 * at) % 90 for at in range(90 + 40 * task)) for task in range(4)]

    def sample(chosen: list[int]) -> dict[str, object]:
        stand = Stand(rollout=NARROW)
        for task in chosen:
            stand.scheduler.add(long_sequence(f"p{task}", prompts[task], tokens=6))
        while stand.scheduler.busy:
            stand.scheduler.step()
        return {
            session: (answer.ids, answer.logprobs)
            for session, answer in stand.answers.items()
            if isinstance(answer, Completion)
        }

    together = sample([0, 1, 2, 3])
    assert together == {**sample([0]), **sample([1]), **sample([2]), **sample([3])}


def test_rows_move_together_when_most_have_ended() -> None:
    stand = Watched(rollout=RolloutConfig(prompt_length=40, response_length=60, max_num_seqs=40))
    crowd = [Talk(task, sample, (0,), sampling=SamplingParams(1)) for task in range(9) for sample in range(4)]
    last = Talk(10, 0, (0,), sampling=SamplingParams(12))
    stand.run([*crowd, last])
    assert stand.rows[0] == 48 and set(stand.rows[1:]) == {16}
    assert last.heard == alone(10, 0, 1, last.sampling, 32)


class Lagging(ModelRunner):
    """Tells what ended one step late, as a GPU does."""

    behind: list[int] | None = None

    def step(self, count: int, longest: int, *, filtered: bool, penalized: bool = False) -> list[int]:
        before = self.behind
        self.behind = super().step(count, longest, filtered=filtered)
        return before or []

    def drain(self) -> list[int]:
        before, self.behind = self.behind, None
        return before or []


def test_hearing_of_the_end_one_step_late_changes_nothing() -> None:
    stand = Stand()
    stand.runner.__class__ = Lagging
    crowd = [Talk(task, sample, (task % 3, 1), (task,)) for task in range(12) for sample in range(4)]
    stand.run(crowd)
    for talk in crowd:
        assert talk.heard == alone(talk.task, talk.sample, 2, PLAIN, 32)


def test_a_late_report_does_not_end_the_next_one_in_the_same_row() -> None:
    stand = Stand()
    stand.runner.__class__ = Lagging
    stand.scheduler.add(sequence("a", 1))
    stand.scheduler.step()
    stand.scheduler.abort(lambda other: other.request.uid == "a")
    first = stand.answers["a/0"]
    assert isinstance(first, Completion) and first.stop is StopReason.LENGTH
    stand.scheduler.add(sequence("b", 5))
    for _ in range(8):
        stand.scheduler.step()
    second = stand.answers["b/0"]
    assert isinstance(second, Completion) and len(second.ids) == 5


def test_time_in_the_queue_is_told_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row for two requests: the second waits for every step of the first, and for none of its own."""
    now = 100.0
    monkeypatch.setattr("treadle.engine.native.sequence.monotonic", lambda: now)
    stand = Stand(rollout=RolloutConfig(prompt_length=40, response_length=60, max_num_seqs=1))
    stand.scheduler.add(sequence("a", 5))
    stand.scheduler.add(sequence("b", 5))
    stand.scheduler.add(sequence("c", 5))
    while "b/0" not in stand.answers:
        now += 1.0
        stand.scheduler.step()
    stand.scheduler.abort(lambda other: True)
    waited = [stand.answers[f"{name}/0"] for name in "abc"]
    assert [answer.queue_s for answer in waited if isinstance(answer, Completion)] == [1.0, 6.0, 10.0]


def test_steps_of_others_leave_pages_in_prefill_alone() -> None:
    rollout = RolloutConfig(prompt_length=40, response_length=60, max_num_seqs=16, max_num_batched_tokens=4)
    single, together = Talk(4, 0, (0,)), Talk(4, 0, (3,))
    Stand(rollout=rollout).run([single])
    before = [Talk(0, sample, (0,), sampling=SamplingParams(2 + sample)) for sample in range(4)]
    crowd = [*before, Talk(0, 9, (0,), sampling=SamplingParams(40)), together]
    Stand(rollout=rollout).run(crowd)
    assert together.heard == single.heard


def sequence(uid: str = "a", tokens: int = 20, ids: tuple[int, ...] = (5, 6, 7)) -> SequenceState:
    return SequenceState(Request(uid, 0, ids, SamplingParams(tokens)), lambda answer: None, 100)


def test_new_weights_end_what_was_kept_and_show_in_the_versions() -> None:
    stand = Watched()
    stand.scheduler.add(sequence("a", 6))
    stand.scheduler.step()
    stand.scheduler.step()
    stand.scheduler.change_weights(7, lambda: None)
    for _ in range(4):
        stand.scheduler.step()
    answer = stand.answers.pop("a/0")
    assert isinstance(answer, Completion) and answer.versions == (0, 0, 7, 7, 7, 7)
    computed = stand.tokens
    stand.scheduler.add(
        SequenceState(Request("a", 0, (5, 6, 7, *answer.ids), SamplingParams(2)), lambda answer: None, 100)
    )
    stand.scheduler.step()
    assert stand.tokens == computed + 8, "keys and values of mixed weights are not used again"


def test_an_abort_in_the_queue_has_no_tokens() -> None:
    stand = Stand()
    stand.scheduler.add(sequence("a"))
    stand.scheduler.abort(lambda other: True)
    answer = stand.answers["a/0"]
    assert isinstance(answer, Completion) and answer.ids == () and answer.stop is StopReason.ABORT
    assert not stand.scheduler.busy


def test_logits_that_are_no_numbers_fail_that_request_alone() -> None:
    stand = Stand()
    stand.scheduler.add(sequence("bad"))
    stand.scheduler.step()
    stand.runner.cache.kv[:, :, int(stand.runner.cache.table[0, 0]), :, :2] = float("nan")
    stand.scheduler.add(sequence("good", ids=(6, 7, 8)))
    for _ in range(22):
        stand.scheduler.step()
    assert isinstance(stand.answers["bad/0"], EngineFailure)
    assert isinstance(stand.answers["good/0"], Completion)
    assert stand.runner.cache.kv.isfinite().all()


def swapped(tokens: int) -> SwappedTokens:
    return SwappedTokens(tuple(range(tokens)), [torch.zeros(1, 2, 1, 1, tokens, 4)])


def test_the_least_recently_used_give_way() -> None:
    swap_space = SwapSpace(3 * swapped(10).size)
    for key in "abc":
        swap_space.put(key, swapped(10))
    assert swap_space.find("a")
    swap_space.put("d", swapped(10))
    assert swap_space.find("b") is None
    assert all(swap_space.find(key) for key in "acd")
    swap_space.forget("a")
    swap_space.put("e", swapped(10))
    assert len(swap_space) == 3
    swap_space.clear()
    assert len(swap_space) == 0
    swap_space.put("f", swapped(30))
    assert swap_space.find("f"), "cleared room is room again"


@pytest.mark.parametrize("tokens", [31, 1000])
def test_what_exceeds_the_budget_alone_is_not_kept(tokens: int) -> None:
    swap_space = SwapSpace(3 * swapped(10).size)
    swap_space.put("a", swapped(tokens))
    assert swap_space.find("a") is None
