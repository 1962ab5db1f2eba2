"""Min-p, top-k, top-p and the penalties against the logits processors of transformers, which are independent code."""

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from treadle.engine.native.sampler import Penalties, SamplingMetadata, apply_top_k_top_p, sample

ROWS, WORDS = 64, 200


def logits(seed: int = 0) -> Tensor:
    return 3 * torch.randn(ROWS, WORDS, generator=torch.Generator().manual_seed(seed))


def controls(*, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0) -> SamplingMetadata:
    return SamplingMetadata(
        torch.full((ROWS,), temperature),
        torch.full((ROWS,), top_p),
        torch.full((ROWS,), top_k),
        torch.full((ROWS,), 99),
        torch.arange(ROWS),
        torch.full((ROWS,), min_p),
    )


@pytest.mark.parametrize(
    ("settings", "processors"),
    [
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"min_p": 0.9}, [MinPLogitsWarper(0.9)]),
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"min_p": 0.02, "top_k": 9}, [MinPLogitsWarper(0.02), TopKLogitsWarper(9)]),
        ({"min_p": 0.05, "top_p": 0.8}, [MinPLogitsWarper(0.05), TopPLogitsWarper(0.8)]),
        ({"top_k": 20, "top_p": 0.8}, [TopKLogitsWarper(20), TopPLogitsWarper(0.8)]),
    ],
)
def test_the_distribution_sampled_from_is_that_of_transformers(settings: dict, processors: list) -> None:
    temperature = 0.8
    given = controls(temperature=temperature, **settings)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature), *processors])
    expected = warpers(torch.zeros(ROWS, 1, dtype=torch.long), logits()).softmax(-1)
    kept = apply_top_k_top_p((logits() / temperature).softmax(-1), given.top_k, given.top_p, given.min_p)
    assert torch.allclose(kept / kept.sum(-1, keepdim=True), expected, atol=1e-6)
    drawn = sample(logits(), given, filtered=True)
    at = drawn.ids.unsqueeze(1)
    assert torch.allclose(drawn.processed, expected.gather(1, at).squeeze(1).log(), atol=1e-5)
    whole = (logits() / temperature).log_softmax(-1).gather(1, at).squeeze(1)
    assert torch.allclose(drawn.logprobs, whole, atol=1e-5)
    assert (drawn.processed > drawn.logprobs + 1e-3).any(), "the settings leave something out"


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    seen = torch.randint(0, WORDS, (ROWS, 12), generator=torch.Generator().manual_seed(1))
    penalties = Penalties(ROWS, WORDS, torch.device("cpu"))
    for row, ids in enumerate(seen.tolist()):
        penalties.start(row, ids[:5], ids[5:], (1.3, 0.0, 0.0, 1.0))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(seen, logits())
    assert torch.allclose(penalties.apply(logits()), expected, atol=1e-6)


def test_presence_and_frequency_count_the_answer_alone() -> None:
    """OpenAI's formula: mu[j] - c[j] * frequency - (c[j] > 0) * presence, spelled out token by token."""
    prompt, answer = [1, 2, 2], [2, 3, 3, 3]
    penalties = Penalties(ROWS, WORDS, torch.device("cpu"))
    penalties.start(0, prompt, answer, (1.0, 0.7, 0.2, 1.0))
    penalties.count(torch.full((1,), 5), torch.ones(1, dtype=torch.bool))
    expected = logits()[0].tolist()
    for token in {*answer, 5}:
        expected[token] -= 0.2 * [*answer, 5].count(token) + 0.7
    assert penalties.apply(logits())[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(penalties.apply(logits())[1:], logits()[1:]), "rows without a penalty keep their bits"


def test_penalised_rows_report_the_logprob_of_the_model_and_that_of_the_draw() -> None:
    penalties = Penalties(ROWS, WORDS, torch.device("cpu"))
    for row in range(ROWS):
        penalties.start(row, [1, 2, 3], [4, 4], (1.5, 0.5, 0.3, 1.0))
    found = sample(logits(), controls(temperature=0.9), filtered=False, penalized=penalties.apply(logits()))
    at = found.ids.unsqueeze(1)
    drawn = (penalties.apply(logits()) / 0.9).log_softmax(-1).gather(1, at).squeeze(1)
    whole = (logits() / 0.9).log_softmax(-1).gather(1, at).squeeze(1)
    assert torch.allclose(found.processed, drawn, atol=1e-5)
    assert torch.allclose(found.logprobs, whole, atol=1e-5)
