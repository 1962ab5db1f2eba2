"""Loading decoders, packed attention, and the checksum of weights."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import FAMILIES, VOCABULARY, tiny
from treadle.config import ModelConfig
from treadle.errors import ConfigError
from treadle.model.attention import PackedMetadata
from treadle.model.causal_lm import compute_logits, hidden_states, output_weight, prepare_module
from treadle.model.checksum import RunningChecksum, checksum
from treadle.model.load import load_causal_model
from treadle.policy.hf_model import build_meta_model

CPU = torch.device("cpu")


def load(path: Path, **keys: object) -> torch.nn.Module:
    return load_causal_model(ModelConfig(path=str(path), **keys), dtype=torch.float32, device=CPU)


def test_a_saved_model_loads_with_the_same_weights(tmp_path: Path) -> None:
    module = tiny(tie_word_embeddings=True)
    module.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert checksum(dict(loaded.named_parameters())) == checksum(dict(module.named_parameters()))
    assert loaded.config._attn_implementation == "treadle" and not loaded.training
    assert output_weight(loaded).shape == (VOCABULARY, 32)


def test_missing_weights_are_a_mistake_in_the_path(tmp_path: Path) -> None:
    module = tiny()
    state = {name: tensor for name, tensor in module.state_dict().items() if "layers.1.mlp" not in name}
    module.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"model\.path.*lacks 3 weights"):
        load(tmp_path)


def test_a_directory_without_weights_is_a_mistake_in_the_path(tmp_path: Path) -> None:
    tiny().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path.*no weights"):
        load(tmp_path)


def test_models_that_are_no_decoders_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}')
    with pytest.raises(ConfigError, match=r"model\.path.*T5Config is an encoder and decoder"):
        load(tmp_path)


def test_models_of_several_modalities_are_refused_by_name(tmp_path: Path) -> None:
    for kind in ("qwen2_5_vl", "gemma3"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ConfigError, match=r"model\.path.*Config is a model of several modalities"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("method", "fix"),
    [
        ("mxfp4", r"Mxfp4Config\(dequantize=True\)\)\.save_pretrained"),
        ("fp8", r"FineGrainedFP8Config\(dequantize=True\)"),
        ("awq", r"give the model that was quantized.*rollout\.name=vllm"),
        (None, "give the model that was quantized"),
    ],
)
def test_quantized_weights_are_refused_with_what_to_do(tmp_path: Path, method: str | None, fix: str) -> None:
    """Also where `model.override_config` hides that they are: their scales would be left out."""
    tiny().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    key = "compression_config" if method is None else "quantization_config"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: {"quant_method": method} if method else {"a": 1}}))
    for overridden in ({}, {"quantization_config": None} if method else {}):
        with pytest.raises(ConfigError, match=rf"model\.path.*are quantized \({method or 'of an'}(.|\n)*{fix}"):
            load(tmp_path, override_config=overridden)
    with pytest.raises(ConfigError, match="are quantized"):
        build_meta_model(ModelConfig(path=str(tmp_path)), torch.float32)


def test_override_config_changes_the_model_or_names_the_wrong_key(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    assert load(tmp_path, override_config={"rms_norm_eps": 0.5}).config.rms_norm_eps == 0.5
    with pytest.raises(ConfigError, match=r"model\.override_config\.rms_norm_epss.*\n.*rms_norm_eps"):
        load(tmp_path, override_config={"rms_norm_epss": 0.5})


def test_dropout_is_gone_in_training_too() -> None:
    module = prepare_module(tiny(attention_dropout=0.5)).train()
    ids, metadata = torch.arange(9), PackedMetadata([4, 5])
    first, second = (hidden_states(module, ids, metadata.positions(), metadata) for _ in range(2))
    assert torch.equal(first, second)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(FAMILIES), st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_packed_sequences_are_computed_as_if_alone(family: str, lengths: list[int]) -> None:
    module = tiny(family)
    rows = [torch.arange(length).mul(7).add(length) % VOCABULARY for length in lengths]
    module.set_attn_implementation("eager")
    with torch.no_grad():
        expected = torch.cat([module(row[None]).logits[0] for row in rows])
    prepare_module(module)
    metadata = PackedMetadata(lengths)
    found = compute_logits(module, hidden_states(module, torch.cat(rows), metadata.positions(), metadata))
    assert torch.allclose(found, expected, atol=1e-4)
    found.sum().backward()
    assert all(weight.grad is not None for weight in module.parameters())


def test_a_checksum_tells_any_change_of_bits_names_and_places() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(7, 5, generator=generator) for name in "abc"}
    known = checksum(weights)
    assert checksum(dict(reversed(weights.items()))) == known
    assert checksum({name: tensor.clone() for name, tensor in weights.items()}) == known
    swapped = weights | {"a": weights["b"], "b": weights["a"]}
    bit = weights["c"].clone()
    bit.view(torch.int32)[6, 4] ^= 1
    others = [
        swapped,
        weights | {"a": weights["a"].flip(0)},
        weights | {"a": weights["a"].reshape(5, 7)},
        weights | {"c": bit},
        weights | {"c": weights["c"].bfloat16()},
        {("x" if name == "a" else name): tensor for name, tensor in weights.items()},
    ]
    assert len({known, *(checksum(other) for other in others)}) == 1 + len(others)


def test_a_name_counts_once() -> None:
    tally = RunningChecksum()
    tally.add("a", torch.ones(3))
    with pytest.raises(AssertionError, match="each name counts once"):
        tally.add("a", torch.ones(3))


def test_a_checksum_looks_at_values_not_at_memory() -> None:
    wide = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    assert checksum({"a": wide[:, 1:6]}) == checksum({"a": wide[:, 1:6].clone()})
    assert checksum({"a": wide.T}) == checksum({"a": wide.T.contiguous()})
