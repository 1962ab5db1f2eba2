"""The same session gets the same tokens and logprobs, bit for bit, whatever else the engine does (CPU, float32)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import VOCABULARY, tiny
from treadle.config import RolloutConfig
from treadle.engine.native.kv_cache import KVCacheShape, PagedKVCache
from treadle.engine.native.model_runner import ModelRunner, find_row_step
from treadle.engine.native.prefix_cache import SwapSpace
from treadle.engine.native.scheduler import Scheduler
from treadle.engine.native.sequence import SequenceResult, SequenceState
from treadle.model.causal_lm import prepare_module
from treadle.types import Completion, Request, SamplingParams, StopReason

ROLLOUT = RolloutConfig(prompt_length=40, response_length=60, max_num_seqs=40, max_num_batched_tokens=48)

PLAIN = SamplingParams(12, temperature=0.9, stop_token_ids=(1, 2))


@dataclass
class Talk:
    """One session: some turns, each begun `pauses` steps after the one before; aborts end a turn early."""

    task: int
    sample: int
    pauses: tuple[int, ...]
    aborts: tuple[int, ...] = ()
    sampling: SamplingParams = PLAIN
    heard: list[tuple[int, float]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = [(11 * self.task + 5 * at) % VOCABULARY for at in range(1 + (7 * self.task) % 30)]

    @property
    def session(self) -> str:
        return f"task{self.task}/{self.sample}"

    def ask(self, left: int) -> Request:
        sampling = SamplingParams(
            left,
            self.sampling.temperature,
            self.sampling.top_p,
            self.sampling.top_k,
            self.sampling.stop_token_ids,
        )
        return Request(f"task{self.task}", self.sample, tuple(self.ids), sampling, len(self.heard))

    def append_output(self, completion: Completion) -> None:
        self.heard += zip(completion.ids, completion.logprobs, strict=True)
        self.ids += completion.ids


@cache
def model(hidden: int) -> torch.nn.Module:
    return prepare_module(tiny(hidden_size=hidden, intermediate_size=2 * hidden))


class Stand:
    """A scheduler without its thread: time is counted in turns."""

    def __init__(
        self,
        hidden: int = 32,
        rollout: RolloutConfig = ROLLOUT,
        parked_bytes: int = 1 << 26,
        page: int | None = None,
        pages: int | None = None,
    ) -> None:
        module = model(hidden)
        step = find_row_step(module, rollout.max_num_seqs, torch.device("cpu"))
        page_bytes = KVCacheShape.of(module).elements_per_token() * module.dtype.itemsize * (page or 0)
        budget = None if pages is None else (pages + 1) * page_bytes
        cache = PagedKVCache.create(rollout, module, torch.device("cpu"), step, page=page, budget=budget)
        self.answers: dict[str, SequenceResult] = {}
        self.room = rollout.sequence_length()
        self.runner = ModelRunner(module, cache, step)
        self.scheduler = Scheduler(
            rollout, self.runner, SwapSpace(parked_bytes), self._answer, name="native", version=0
        )

    def _answer(self, sequence: SequenceState, answer: SequenceResult) -> None:
        self.answers[sequence.request.session] = answer

    def run(self, talks: list[Talk]) -> None:
        """Let all talks happen side by side."""
        plays = {talk.session: self._play(talk) for talk in talks}
        for _ in range(2000):
            for session, play in list(plays.items()):
                if next(play, "over") == "over":
                    del plays[session]
            if not plays:
                return
            self.scheduler.step()
        raise AssertionError("the talks do not end")

    def _play(self, talk: Talk) -> Iterator[None]:
        aborts = list(talk.aborts)
        for turn, pause in enumerate(talk.pauses):
            yield from (None for _ in range(pause))
            left, stop = talk.sampling.max_tokens, StopReason.ABORT
            while stop is StopReason.ABORT:
                before = len(talk.heard)
                stop = yield from self._ask(talk, left, aborts.pop() if aborts else None)
                left -= len(talk.heard) - before
            talk.ids += [(talk.task + at) % VOCABULARY for at in range(turn + 2)]

    def _ask(self, talk: Talk, left: int, abort_after: int | None) -> Iterator[None]:
        self.scheduler.add(SequenceState(talk.ask(left), lambda answer: None, self.room))
        waited = 0
        while talk.session not in self.answers:
            if waited == abort_after:
                self.scheduler.abort(lambda sequence: sequence.request.session == talk.session)
            else:
                yield
            waited += 1
        answer = self.answers.pop(talk.session)
        assert isinstance(answer, Completion), answer
        talk.append_output(answer)
        return answer.stop


@cache
def alone(task: int, sample: int, turns: int, sampling: SamplingParams, hidden: int) -> list[tuple[int, float]]:
    talk = Talk(task, sample, (0,) * turns, sampling=sampling)
    Stand(hidden).run([talk])
    return talk.heard


samplings = st.sampled_from(
    [
        PLAIN,
        SamplingParams(9, temperature=0.0),
        SamplingParams(12, temperature=1.3, top_p=0.8, top_k=20, stop_token_ids=(5,)),
    ]
)
talks = st.builds(
    Talk,
    task=st.integers(0, 11),
    sample=st.integers(0, 3),
    pauses=st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple),
    aborts=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    sampling=samplings,
)


def check(crowd: list[Talk], hidden: int, page: int | None = None) -> None:
    Stand(hidden, page=page).run(crowd)
    for talk in crowd:
        assert talk.heard == alone(talk.task, talk.sample, len(talk.pauses), talk.sampling, hidden)


@settings(max_examples=15, deadline=None)
@given(st.lists(talks, min_size=2, max_size=60, unique_by=lambda talk: talk.session))
def test_any_arrival_any_batch_and_any_interruption_give_the_same_bits(crowd: list[Talk]) -> None:
    check(crowd, hidden=32)


@pytest.mark.parametrize(("hidden", "page"), [(64, None), (96, None), (64, 16)])
def test_many_at_once_give_the_same_bits_as_each_alone(hidden: int, page: int | None) -> None:
    check([Talk(task, sample, (task % 3, 2)) for task in range(12) for sample in range(4)], hidden, page)


def test_waiting_for_a_row_changes_nothing() -> None:
    narrow = RolloutConfig(prompt_length=40, response_length=60, max_num_seqs=3, max_num_batched_tokens=48)
    crowd = [Talk(task, sample, (0, 1)) for task in range(4) for sample in range(3)]
    Stand(rollout=narrow).run(crowd)
    for talk in crowd:
        assert talk.heard == alone(talk.task, talk.sample, 2, talk.sampling, 32)


def test_what_was_forgotten_is_computed_again_up_to_rounding() -> None:
    talk, kept = Talk(5, 0, (0, 0, 0)), Talk(5, 0, (0, 0, 0))
    Stand(parked_bytes=0).run([talk])
    Stand().run([kept])
    assert [at for at, _ in talk.heard] == [at for at, _ in kept.heard]
    assert [logprob for _, logprob in talk.heard] == pytest.approx([logprob for _, logprob in kept.heard], abs=1e-5)
