from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from tests.tiny import tiny
from treadle.model.checksum import checksum
from treadle.policy import hf_model
from treadle.policy.hf_model import write_model


def write(directory: Path, module: PreTrainedModel, **keys: bool) -> None:
    weights = ((name, parameter.detach()) for name, parameter in module.named_parameters())
    write_model(directory, module, weights, **{"is_writer": True, **keys})


def loads_as(directory: Path, module: PreTrainedModel) -> bool:
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    return checksum(dict(loaded.named_parameters())) == checksum(dict(module.named_parameters()))


@pytest.mark.parametrize("tied", [True, False])
def test_a_written_model_loads_as_it_was(tmp_path: Path, tied: bool) -> None:
    module = tiny("qwen3", tie_word_embeddings=tied)
    write(tmp_path, module)
    assert loads_as(tmp_path, module)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert (tmp_path / "generation_config.json").exists()


def test_files_hold_no_more_than_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_model, "FILE_BYTES", 10_000)
    module = tiny("llama")
    write(tmp_path, module)
    assert loads_as(tmp_path, module)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3 and not list(tmp_path.glob("*.partial"))


def test_a_family_with_other_files_than_parameters_is_written_as_transformers_does(tmp_path: Path) -> None:
    """Experts are many tensors in files, and one parameter in the module."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    module = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    write(tmp_path, module)
    assert loads_as(tmp_path, module)


def test_others_only_go_along(tmp_path: Path) -> None:
    module, seen = tiny("llama"), []

    def weights() -> object:
        for name, parameter in module.named_parameters():
            seen.append(name)
            yield name, parameter

    write_model(tmp_path, module, weights(), is_writer=False)
    assert seen == [name for name, _ in module.named_parameters()] and not list(tmp_path.iterdir())
