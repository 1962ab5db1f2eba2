"""Temperature, top-k, top-p and the draw, row by row."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.engine.native.sampler import SamplingMetadata, apply_top_k_top_p, sample, units_at
from treadle.engine.rng import stream_of, unit_at
from treadle.types import Request, SamplingParams


def controls(
    rows: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = -1,
    stream: int = 1234567,
    first: int = 0,
    min_p: float = 0.0,
) -> SamplingMetadata:
    return SamplingMetadata(
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k),
        torch.full((rows,), stream),
        torch.arange(first, first + rows),
        torch.full((rows,), min_p),
    )


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_the_vectorised_noise_is_the_noise_of_all_engines(stream: int, position: int) -> None:
    signed = stream - (1 << 64) if stream >> 63 else stream
    found = units_at(torch.tensor([signed]), torch.tensor([position])).item()
    assert found == math.floor(unit_at(stream, position) * 2**24) / 2**24


def test_noise_differs_by_seed_task_sample_and_position() -> None:
    requests = [
        Request(uid, sample, (1,), SamplingParams(1, seed=seed)) for uid in "ab" for sample in (0, 1) for seed in (0, 1)
    ]
    drawn = {unit_at(stream_of(request), position) for request in requests for position in range(3)}
    assert len(drawn) == len(requests) * 3


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(20_000, 4)
    drawn = sample(logits, controls(20_000, temperature=0.7), filtered=False).ids
    expected = (logits[0] / 0.7).softmax(-1)
    found = torch.bincount(drawn, minlength=4) / 20_000
    assert found.tolist() == pytest.approx(expected.tolist(), abs=0.01)


def test_logprobs_are_those_of_the_whole_vocabulary_at_the_temperature() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    found = sample(logits, controls(64, temperature=0.5, top_k=3), filtered=True)
    table = (logits / 0.5).log_softmax(-1)
    assert torch.allclose(found.logprobs, table.gather(1, found.ids[:, None])[:, 0])


def test_greedy_takes_the_most_likely_and_reports_temperature_one() -> None:
    logits = torch.randn(32, 50, generator=torch.Generator().manual_seed(0))
    found = sample(logits, controls(32, temperature=0.0), filtered=False)
    assert torch.equal(found.ids, logits.argmax(-1))
    assert torch.allclose(found.logprobs, logits.log_softmax(-1).max(-1).values)


def test_top_k_and_top_p_keep_the_likely_ones_only() -> None:
    weights = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    whole, none, off = torch.tensor([1.0]), torch.tensor([-1]), torch.tensor([0.0])
    assert apply_top_k_top_p(weights, torch.tensor([2]), whole, off)[0].tolist() == pytest.approx([0, 0.4, 0, 0.3])
    assert apply_top_k_top_p(weights, none, torch.tensor([0.6]), off)[0].tolist() == pytest.approx([0, 0.4, 0, 0.3])
    assert apply_top_k_top_p(weights, none, torch.tensor([0.01]), off)[0].tolist() == pytest.approx([0, 0.4, 0, 0])
    assert apply_top_k_top_p(weights, none, whole, off)[0].tolist() == pytest.approx(weights[0].tolist())


def test_top_k_keeps_exactly_k_of_equals() -> None:
    kept = apply_top_k_top_p(torch.full((1, 8), 0.125), torch.tensor([3]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert (kept > 0).sum() == 3


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((4096, 6), float("-inf"))
    logits[:, 2], logits[:, 4] = 0.0, 1.0
    drawn = sample(logits, controls(4096), filtered=False).ids
    assert set(drawn.tolist()) == {2, 4}


def test_rows_with_and_without_a_filter_do_not_disturb_each_other() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    plain = sample(logits, controls(2), filtered=False).ids
    mixed = SamplingMetadata(torch.ones(2), torch.tensor([1.0, 0.5]), torch.tensor([-1, 4]), *controls(2)[3:])
    assert sample(logits, mixed, filtered=True).ids[0] == plain[0]
