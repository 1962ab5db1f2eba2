"""Training by the Tinker API against independent torch code: Hugging Face's own forward, eager attention, autograd.

The reference computes with weights `base + 32/rank * up @ down` as a differentiable expression, so its gradients of the
factors come from autograd alone; losses are written out again, and AdamW is torch's.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from tests.tiny import tiny
from treadle.config import ModelConfig
from treadle.model.load import load_causal_model
from treadle.policy.network import DecoderNetwork
from treadle.tinker.adapters import ALPHA, AdapterBase, AdapterShape
from treadle.tinker.protobuf import Datum
from treadle.tinker.refusals import RequestFailed
from treadle.tinker.trained_model import AdamParams, TrainedModel

RANK = 4


def datum(seed: int, length: int = 9, **changes: Tensor) -> Datum:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 96, (length,), generator=generator)
    inputs = {
        "target_tokens": torch.randint(0, 96, (length,), generator=generator),
        "weights": torch.rand(length, generator=generator),
        "logprobs": -4 - torch.rand(length, generator=generator),
        "advantages": torch.randn(length, generator=generator),
        "sequence_ratio_mask": (torch.arange(length) > 2).float(),
    }
    return Datum(ids, inputs | changes)


def cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return -(inputs["weights"] * logprobs).sum()


def importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return -((logprobs - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def ppo(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    ratio, advantage = (logprobs - inputs["logprobs"]).exp(), inputs["advantages"]
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.where(ratio * advantage < clipped * advantage, ratio, clipped).mul(advantage).sum()


def cispo(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    ratio = (logprobs - inputs["logprobs"]).exp().clamp(0.5, 2.0).detach()
    return -(ratio * logprobs * inputs["advantages"]).sum()


def gspo(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    counted = inputs["sequence_ratio_mask"].bool()
    total = 0.0
    mean = sum((logprobs - inputs["logprobs"]).detach()[counted].tolist()) / int(counted.sum())
    for at, advantage in enumerate(inputs["advantages"].tolist()):
        ratio = torch.tensor(mean).exp() * (logprobs[at] - logprobs[at].detach()).exp()
        total -= torch.minimum(ratio * advantage, ratio.clamp(0.1, 1.1) * advantage)
    return total  # type: ignore[return-value]


def dro(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    distance = (logprobs - inputs["logprobs"]) ** 2
    return (-inputs["advantages"] * logprobs + 0.05 / 2 * distance).sum()


CASES: list[tuple[Callable[[Tensor, Mapping[str, Tensor]], Tensor], dict[str, float]]] = [
    (cross_entropy, {}),
    (importance_sampling, {}),
    (ppo, {}),
    (cispo, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
    (gspo, {"clip_low_threshold": 0.1, "clip_high_threshold": 1.1}),
    (dro, {"beta": 0.05}),
]


class Pair:
    """A model of treadle's and its reference, with the same factors."""

    def __init__(self, directory: Path, *, tied: bool, shape: AdapterShape) -> None:
        tiny("qwen3", tie_word_embeddings=tied).save_pretrained(directory)
        config = ModelConfig(path=str(directory))
        module = load_causal_model(config, dtype=torch.float32, device=torch.device("cpu"), longest=64)
        self.base = AdapterBase(module)
        self.model = TrainedModel(self.base, DecoderNetwork(module), shape, seed=3)
        self.reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
        with torch.no_grad():  # an adapter with an effect
            for number, adapter in enumerate(self.model._adapters.values()):
                adapter.up.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))
        self.model._weights = None
        self.base.merge(self.model.weights)
        self.factors = {
            name: tuple(part.clone().requires_grad_() for part in pair)
            for name, pair in self.model.weights.factors.items()
        }

    def reference_logprobs(self, item: Datum) -> Tensor:
        weights = {name: value.detach() for name, value in self.reference.named_parameters()}
        weights["lm_head.weight"] = self.reference.get_output_embeddings().weight.detach()
        for name, (down, up) in self.factors.items():
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + ALPHA / self.model.shape.rank * up @ down
        args = (item.ids.unsqueeze(0),)
        logits = functional_call(self.reference, weights, args, {"use_cache": False}, tie_weights=False).logits[0]
        targets = item.inputs["target_tokens"]
        every = log_softmax(logits.float(), -1)
        return every.gather(1, targets.view(len(targets), -1)).view(targets.shape)

    def forward(self, data: list[Datum], loss_fn: str, config: Mapping[str, float], backward: bool = True):
        return self.model.forward(data, loss_fn, config, longest=64, backward=backward, recompute=False)

    def compare_gradients(self) -> None:
        assert self.model._adapters.keys() == self.factors.keys()
        for name, adapter in self.model._adapters.items():
            for mine, theirs in zip((adapter.down, adapter.up), self.factors[name], strict=True):
                assert mine.grad is not None and theirs.grad is not None, name
                largest = float(theirs.grad.abs().max())
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5 * max(1.0, largest))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("formula", "config"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_loss_and_gradients_are_those_of_plain_torch(formula, config, tied: bool, tmp_path: Path) -> None:
    pair = Pair(tmp_path, tied=tied, shape=AdapterShape(RANK))
    data = [datum(1), datum(2, length=5), datum(3, length=17)]
    found = pair.forward(data, formula.__name__, config)
    expected = torch.zeros(())
    for item, output in zip(data, found.outputs, strict=True):
        logprobs = pair.reference_logprobs(item)
        torch.testing.assert_close(output["logprobs"], logprobs.detach(), rtol=1e-5, atol=1e-5)
        expected = expected + formula(logprobs, item.inputs)
    expected.backward()
    assert found.metrics["loss:sum"] == pytest.approx(float(expected.detach()), rel=1e-5)
    pair.compare_gradients()


def test_gradients_add_up_over_requests(tmp_path: Path) -> None:
    pair = Pair(tmp_path, tied=True, shape=AdapterShape(RANK))
    for seed in (1, 2):
        item = datum(seed)
        pair.forward([item], "cross_entropy", {})
        cross_entropy(pair.reference_logprobs(item), item.inputs).backward()
    pair.compare_gradients()


def test_several_targets_of_a_position_train_like_a_distribution(tmp_path: Path) -> None:
    pair = Pair(tmp_path, tied=True, shape=AdapterShape(RANK))
    wide = {"target_tokens": torch.randint(0, 96, (9, 3)), "weights": torch.rand(9, 3)}
    item = datum(1, **wide)
    found = pair.forward([datum(2, length=4), item], "cross_entropy", {})
    assert found.outputs[1]["logprobs"].shape == (9, 3)
    other = datum(2, length=4)
    loss = cross_entropy(pair.reference_logprobs(item), item.inputs)
    (loss + cross_entropy(pair.reference_logprobs(other), other.inputs)).backward()
    pair.compare_gradients()


@pytest.mark.parametrize("kind", ["attn", "mlp", "unembed"])
def test_only_the_chosen_modules_train(kind: str, tmp_path: Path) -> None:
    chosen = {f"train_{name}": name == kind for name in ("attn", "mlp", "unembed")}
    pair = Pair(tmp_path, tied=True, shape=AdapterShape(RANK, **chosen))
    names = pair.model.weights.factors.keys()
    words = {"attn": "self_attn", "mlp": "mlp", "unembed": "lm_head"}
    assert names and all(words[kind] in name for name in names)
    item = datum(1)
    pair.forward([item], "cross_entropy", {})
    cross_entropy(pair.reference_logprobs(item), item.inputs).backward()
    pair.compare_gradients()


def test_steps_are_those_of_adamw(tmp_path: Path) -> None:
    pair = Pair(tmp_path, tied=True, shape=AdapterShape(RANK))
    parameters = [part for factors in pair.factors.values() for part in factors]
    params = AdamParams(1e-2, 0.8, 0.9, 1e-6, weight_decay=0.1, grad_clip_norm=0.5)
    adamw = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for seed in range(3):
        item = datum(seed)
        pair.base.merge(pair.model.weights)
        pair.forward([item], "cross_entropy", {})
        found = pair.model.step(params)
        adamw.zero_grad()
        cross_entropy(pair.reference_logprobs(item), item.inputs).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        adamw.step()
        assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, factors in pair.model.weights.factors.items():
        for mine, theirs in zip(factors, pair.factors[name], strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-3, atol=1e-4)


def test_merging_another_adapter_and_back_changes_no_bit(tmp_path: Path) -> None:
    pair = Pair(tmp_path, tied=True, shape=AdapterShape(RANK))
    other = TrainedModel(pair.base, DecoderNetwork(pair.base.module), AdapterShape(2, train_mlp=False), seed=1)
    mine = pair.model.weights
    before = {name: part.weight.clone() for name, part in pair.base.linears.items()}
    pair.base.merge(None)
    base = {name: part.weight.clone() for name, part in pair.base.linears.items()}
    assert any(not torch.equal(before[name], base[name]) for name in before)
    pair.base.merge(other.weights)
    pair.base.merge(mine)
    assert all(torch.equal(before[name], part.weight) for name, part in pair.base.linears.items())


def test_a_gradient_that_is_not_finite_moves_nothing(tmp_path: Path) -> None:
    pair = Pair(tmp_path, tied=True, shape=AdapterShape(RANK))
    before = pair.model.weights
    item = datum(1, logprobs=torch.full((9,), -1e4))
    pair.forward([item], "importance_sampling", {})
    with pytest.raises(RequestFailed, match="nothing was moved"):
        pair.model.step(AdamParams())
    assert pair.model.weights is before
    with pytest.raises(RequestFailed, match="no gradients"):
        pair.model.step(AdamParams())
