"""Which layers are taken apart, and which are left alone because something in them is of another kind."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import FAMILIES, tiny
from treadle.model.causal_lm import prepare_module
from treadle.model.layer_parts import find_norm, find_parts, trace_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_the_known_families_are_recognised(family: str) -> None:
    module = prepare_module(tiny(family))
    layers = list(module.model.layers)
    parts = [find_parts(layer) for layer in layers]
    assert all(parts)
    gemma = family == "gemma2"
    for part in parts:
        assert part is not None and part.before_mlp.offset is gemma and part.activation == (1 if gemma else 0)
        assert (part.after_attention is not None) == gemma and (part.query is not None) == (family == "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_layer_tells_its_attention_is_noted_while_it_runs(family: str) -> None:
    module = prepare_module(tiny(family))
    layers = list(module.model.layers)
    seen = trace_layers(module, layers)
    assert all(note.hidden is not None and note.out is not None for note in seen)
    assert torch.equal(seen[0].out, seen[1].hidden), "one layer's output is the next one's input"
    expected = (12, 4.0) if family == "gemma2" else (None, None)
    assert seen[0].options is not None and (seen[0].options.window, seen[0].options.softcap) == expected
    assert seen[1].options is not None and seen[1].options.window is None
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)


class Centered(nn.Module):
    """A norm that also takes the mean away."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, None, self.eps)


def put(path: str, part: object) -> Callable[[nn.Module], None]:
    def change(layer: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(layer.get_submodule(owner), name, part)

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("mlp.act_fn", nn.ReLU()),
        put("input_layernorm", Centered(32)),
        put("self_attn.q_proj", nn.Sequential(nn.Linear(32, 64, bias=False))),
        put("self_attn.gate", nn.Linear(32, 64)),
        put("mlp.router", nn.Linear(32, 4)),
        put("self_attn.q_norm", nn.Identity()),
        put("mlp", nn.Identity()),
    ],
)
def test_a_layer_with_any_other_part_is_left_alone(change: Callable[[nn.Module], None]) -> None:
    layer = tiny().model.layers[0]
    assert find_parts(layer) is not None
    change(layer)
    assert find_parts(layer) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_told_apart_by_what_they_compute(dtype: torch.dtype) -> None:
    llama, gemma = (tiny(family).model.norm.to(dtype) for family in ("llama", "gemma2"))
    with torch.no_grad():
        for norm in (llama, gemma):
            norm.weight += torch.randn(32, generator=torch.Generator().manual_seed(0)).to(dtype) * 0.1
    found = find_norm(llama), find_norm(gemma)
    assert [norm and norm.offset for norm in found] == [False, True]
