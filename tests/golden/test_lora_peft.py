"""LoRA against the peft package: forward, gradients, merged weights, and adapters in both directions."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.policies import CPU, make_policy, make_row, save_tiny_model
from tests.sharded import make_batch, ragged
from tests.tiny import FAMILIES, tiny
from treadle.algorithm.logprobs import logprobs_and_entropy
from treadle.config.rollout import ModelConfig
from treadle.config.training import LoraConfig, OptimConfig
from treadle.model.attention import PackedMetadata
from treadle.model.causal_lm import hidden_states, output_weight, prepare_module, recomputing
from treadle.model.fused_layers import find_fused
from treadle.model.load import load_causal_model
from treadle.model.lora import LoraSettings, attach, find_targets, merge_factors
from treadle.model.peft_files import StoredAdapter, read_adapter, write_adapter

peft = pytest.importorskip("peft")

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def randomized(module: Any) -> dict[str, Tensor]:
    """The factors of a peft model, all of them given values, by the names of the modules."""
    torch.manual_seed(3)
    factors = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.1
            factors[name.removeprefix("base_model.model.").replace(".default", "")] = parameter
    return factors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use_rslora", [False, True])
def test_forward_gradients_and_merged_weights_are_pefts(family: str, use_rslora: bool) -> None:
    lora = LoraConfig(r=3, alpha=5.0, use_rslora=use_rslora)
    mine = prepare_module(tiny(family)).requires_grad_(False)
    settings = LoraSettings.of(lora)
    adapters = attach(find_targets(mine, lora), settings, CPU)
    wanted = peft.LoraConfig(
        r=3, lora_alpha=5.0, use_rslora=use_rslora, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    eager = tiny(family)
    eager.set_attn_implementation("eager")
    theirs = peft.get_peft_model(eager, wanted)
    factors = randomized(theirs)
    assert {name.partition(".lora_")[0] for name in factors} == adapters.keys()
    with torch.no_grad():
        for name, adapter in adapters.items():
            adapter.down.copy_(factors[f"{name}.lora_A.weight"])
            adapter.up.copy_(factors[f"{name}.lora_B.weight"])
            weight = adapter.module.weight
            weight.copy_(merge_factors(weight, adapter.down, adapter.up, settings.scale))
    ids = torch.randint(4, 90, (29,), generator=torch.Generator().manual_seed(1))
    metadata = PackedMetadata([29])
    with recomputing(mine, True):
        hidden = hidden_states(mine, ids, metadata.positions(), metadata)
        softcap = getattr(mine.config, "final_logit_softcapping", None)
        found = logprobs_and_entropy(hidden[:-1], output_weight(mine), ids[1:], softcap=softcap).logprobs_T
        found.mean().backward()
    logits = theirs(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    expected = logits[:-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    expected.mean().backward()
    torch.testing.assert_close(found, expected, **CLOSE)
    for name, adapter in adapters.items():
        torch.testing.assert_close(adapter.down.grad, factors[f"{name}.lora_A.weight"].grad, **CLOSE)
        torch.testing.assert_close(adapter.up.grad, factors[f"{name}.lora_B.weight"].grad, **CLOSE)
    merged = dict(theirs.merge_and_unload().named_parameters())
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(parameter, merged[name], **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_take_adapters_and_give_the_same_gradients(family: str) -> None:
    ids = torch.randint(4, 90, (29,), generator=torch.Generator().manual_seed(1))
    metadata, found = PackedMetadata([29]), []
    for fused in (False, True):
        module = prepare_module(tiny(family)).requires_grad_(False)
        adapters = attach(find_targets(module, LoraConfig(r=3)), LoraSettings(3, 6.0), CPU)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for adapter in adapters.values():
                adapter.down.normal_(generator=generator)
                adapter.up.normal_(generator=generator)
        if fused:
            forwards = find_fused(module, plain=True)
            assert len(forwards) == 2
            for forward in forwards:
                forward.parts.layer.forward = forward
        with recomputing(module, True):
            hidden = hidden_states(module, ids, metadata.positions(), metadata)
            hidden.square().mean().backward()
        found.append([hidden.detach(), *(factor.grad for one in adapters.values() for factor in (one.down, one.up))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_trained_adapter_loads_in_peft_and_gives_the_same_weights(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base")
    policy = make_policy(base, lora=LoraConfig(r=4, target_modules=("q_proj", "down_proj")), optim=OptimConfig(lr=1e-2))
    policy.train(make_batch(ragged(1)))
    policy.save(tmp_path / "checkpoint")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "checkpoint")
    assert model.peft_config["default"].target_modules == {"q_proj", "down_proj"}
    merged = dict(model.merge_and_unload().named_parameters())
    start = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    for name, tensor in policy.tensors().items():
        torch.testing.assert_close(tensor, merged[name].detach(), **CLOSE)
        assert (not torch.equal(tensor, start[name])) == ("q_proj" in name or "down_proj" in name)


def test_an_adapter_of_peft_is_trained_further(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base")
    wanted = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["v_proj", "up_proj"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), wanted)
    randomized(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    model = ModelConfig(path=str(base), adapter=str(tmp_path / "adapter"))
    loaded = load_causal_model(model, dtype=torch.float32, device=CPU)
    merged = dict(theirs.merge_and_unload().named_parameters())
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter, merged[name], **CLOSE)


def test_files_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    module = tiny("qwen3")
    names = list(find_targets(module, LoraConfig(r=2)))[:5]
    sizes = {name: module.get_submodule(name) for name in names}
    factors = {
        name: (torch.randn(2, linear.in_features), torch.randn(linear.out_features, 2))
        for name, linear in sizes.items()
    }
    write_adapter(tmp_path, module, StoredAdapter(LoraSettings(2, 3.5), factors, "a/b"))
    found = read_adapter(str(tmp_path))
    assert (found.settings, found.base, list(found.factors)) == (LoraSettings(2, 3.5), "a/b", sorted(names))
    for name, (down, up) in factors.items():
        assert torch.equal(found.factors[name][0], down) and torch.equal(found.factors[name][1], up)


def test_a_row_has_the_same_logprobs_in_peft(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base")
    policy = make_policy(base, lora=LoraConfig(r=4), optim=OptimConfig(lr=1e-2))
    policy.train(make_batch(ragged(2)))
    policy.save(tmp_path / "checkpoint")
    row = make_row(random.Random(5), turns=2)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "checkpoint")
    ids = torch.tensor([*row.prompt_ids, *row.ids])
    with torch.no_grad():
        logits = model(input_ids=ids.unsqueeze(0)).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[len(row.prompt_ids) - 1 :, 0]
    torch.testing.assert_close(policy.logprobs([row]), expected * torch.tensor(row.mask), **CLOSE)
