from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.algorithm import logprobs
from treadle.algorithm.logprobs import TokenLogprobs, gradient_norms, logprobs_and_entropy

T, D, V = 13, 8, 50

over_tiles = pytest.mark.parametrize("words", [2048, 16, 1], indirect=True)


@pytest.fixture
def words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of so many words."""
    monkeypatch.setattr(logprobs, "CPU_VOCAB_TILE", request.param)


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, D, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(V, (T,), generator=random)


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float, softcap: float | None
) -> TokenLogprobs:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return TokenLogprobs(logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1))


def gradients(found: TokenLogprobs, *of: Tensor) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(T, generator=random).to(found.logprobs_T.dtype) for _ in range(2)]
    return torch.autograd.grad((weights[0] * found.logprobs_T + weights[1] * found.entropy_T).sum(), of)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_gradient_norms_are_those_that_autograd_finds(chunk: int, temperature: float, softcap: float | None) -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    keys = {"chunk": chunk, "temperature": temperature, "softcap": softcap}
    found = gradient_norms(hidden, weight, targets, bias_V=bias, **keys)
    logits = (hidden.double() @ weight.double().T + bias.double()).detach()
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    logits.requires_grad_()
    (slope,) = torch.autograd.grad(logits.log_softmax(-1).gather(1, targets[:, None]).sum(), logits)
    torch.testing.assert_close(found.double(), slope.square().sum(-1), atol=1e-6, rtol=1e-5)
    assert not found.requires_grad


def test_the_gradient_norm_of_a_certain_token_is_exactly_nothing() -> None:
    hidden, weight = torch.tensor([[1000.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    assert gradient_norms(hidden, weight, torch.tensor([0])).tolist() == [0.0]


@over_tiles
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 5, 13, 100])
def test_values_and_gradients_equal_a_plain_log_softmax(
    chunk: int, temperature: float, softcap: float | None, words: None
) -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    keys = {"chunk": chunk, "temperature": temperature, "softcap": softcap}
    found = logprobs_and_entropy(hidden, weight, targets, bias_V=bias, **keys)
    wide = [part.detach().double().requires_grad_() for part in (hidden, weight, bias)]
    expected = plain(wide[0], wide[1], targets, wide[2], temperature, softcap)
    torch.testing.assert_close(found.logprobs_T.double(), expected.logprobs_T, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.entropy_T.double(), expected.entropy_T, atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(gradients(found, hidden, weight, bias), gradients(expected, *wide), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=1e-5)


@over_tiles
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [2, 100])
def test_gradients_pass_gradcheck(chunk: int, softcap: float | None, words: None) -> None:
    random = torch.Generator().manual_seed(2)
    parts = tuple(torch.randn(*size, generator=random, dtype=torch.float64) for size in ((5, 3), (6, 3), (6,)))
    targets = torch.randint(6, (5,), generator=random)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        found = logprobs_and_entropy(
            hidden, weight, targets, chunk=chunk, temperature=0.7, bias_V=bias, softcap=softcap
        )
        return found.logprobs_T, found.entropy_T

    assert torch.autograd.gradcheck(function, [part.requires_grad_() for part in parts], check_undefined_grad=False)


@over_tiles
@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("name", ["logprobs_T", "entropy_T"])
def test_either_output_alone_can_be_trained(name: str, chunk: int, words: None) -> None:
    hidden, weight, _, targets = inputs(torch.float64)
    ours = getattr(logprobs_and_entropy(hidden, weight, targets, chunk=chunk), name).sum()
    theirs = getattr(plain(hidden, weight, targets, None, 1.0, None), name).sum()
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(theirs, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(a, b)


@over_tiles
def test_a_frozen_head_gets_no_gradient(words: None) -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    found = logprobs_and_entropy(hidden, weight.detach(), targets, chunk=4)
    found.logprobs_T.sum().backward()
    assert hidden.grad is not None and weight.grad is None


@over_tiles
def test_backward_may_run_twice(words: None) -> None:
    hidden, weight, _, targets = inputs(torch.float64)
    for chunk in (4, 100):
        loss = logprobs_and_entropy(hidden, weight, targets, chunk=chunk).logprobs_T.sum()
        first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
        torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], first, rtol=0, atol=0)


@over_tiles
@pytest.mark.parametrize("chunk", [4, 100])
def test_half_precision_inputs_lose_nothing_after_them(chunk: int, words: None) -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16)
    found = logprobs_and_entropy(hidden, weight, targets, chunk=chunk)
    wide = [part.detach().double().requires_grad_() for part in (hidden, weight)]
    expected = plain(wide[0], wide[1], targets, None, 1.0, None)
    assert found.logprobs_T.dtype is torch.float32
    torch.testing.assert_close(found.logprobs_T.double(), expected.logprobs_T, atol=1e-5, rtol=1e-5)
    found.logprobs_T.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype is torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype is torch.bfloat16
    expected.logprobs_T.sum().backward()
    for part, exact in zip((hidden, weight), wide, strict=True):  # rounded once, at the end
        torch.testing.assert_close(part.grad.double(), exact.grad, atol=1e-6, rtol=2**-8)


def test_autocast_changes_nothing() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    expected = logprobs_and_entropy(hidden, weight, targets, chunk=4).logprobs_T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert logprobs_and_entropy(hidden, weight, targets, chunk=4).logprobs_T.equal(expected)


@over_tiles
def test_large_logits_stay_finite(words: None) -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    found = logprobs_and_entropy(hidden * 1e4, weight, targets)
    assert found.logprobs_T.isfinite().all() and found.entropy_T.isfinite().all()
    assert (found.entropy_T >= 0).all()


@over_tiles
def test_no_tokens_at_all(words: None) -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    found = logprobs_and_entropy(hidden[:0], weight, targets[:0])
    found.logprobs_T.sum().backward()
    assert len(found.entropy_T) == 0 and weight.grad is not None and not weight.grad.any()


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else (out,):
            if isinstance(item, Tensor):
                self.largest = max(self.largest, item.numel())
        return out


def test_no_tensor_is_larger_than_one_chunk_of_logits() -> None:
    tokens, vocabulary, chunk = 64, 1000, 8
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    with LargestTensor() as seen:
        found = logprobs_and_entropy(hidden, weight, torch.zeros(tokens, dtype=torch.int64), chunk=chunk)
        (found.logprobs_T.sum() + found.entropy_T.sum()).backward()
    assert seen.largest == chunk * vocabulary


def test_tiles_of_fewer_words_hold_more_tokens_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CPU_VOCAB_TILE", 100)
    hidden, weight = torch.randn(300, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with LargestTensor() as seen:
        found = logprobs_and_entropy(hidden, weight, torch.zeros(300, dtype=torch.int64), chunk=20)
        (found.logprobs_T.sum() + found.entropy_T.sum()).backward()
    assert seen.largest == 200 * 100
