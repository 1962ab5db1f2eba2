"""Attention over a prefix tree against each sequence alone; on a GPU, where there is one, with flash attention."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from treadle.model.attention import AttentionOptions, PackedMetadata
from treadle.model.prefix_attention import PrefixTree, PrefixTreeMetadata

TREE = PrefixTree((40, 9, 33, 17, 5, 21, 70), (-1, 0, 0, 2, 2, -1, 0))
LEAVES = (1, 3, 4, 5, 6)
WHERE = [
    ("cpu", torch.float64),
    pytest.param(
        "cuda",
        torch.float32,
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ),
    pytest.param(
        "cuda",
        torch.bfloat16,
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ),
]
OPTIONS = {
    "causal": AttentionOptions(0.3),
    "window": AttentionOptions(0.3, window=13),
    "soft cap": AttentionOptions(0.3, softcap=20.0),
    "sinks": AttentionOptions(0.3, window=13, sinks=torch.tensor([0.5, -1.0, 0.0, 2.0])),
}


def attend(
    metadata: PackedMetadata | PrefixTreeMetadata, heads: tuple[Tensor, ...], options: AttentionOptions
) -> Tensor:
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.to(heads[0]))
    query, key, value = (tensor.unsqueeze(0).transpose(1, 2) for tensor in heads)
    return metadata.attend(nn.Identity(), query, key, value, options)[0]


def make_heads(device: str, dtype: torch.dtype, key_heads: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(TREE.lengths), heads, 16) for heads in (4, key_heads, key_heads)]
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for shape in shapes
    )


def test_positions_continue_those_of_the_parent() -> None:
    tree = PrefixTree((3, 2, 2, 1), (-1, 0, 1, 0))
    assert PrefixTreeMetadata(tree).positions().tolist() == [0, 1, 2, 3, 4, 5, 6, 3]


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(("device", "dtype"), WHERE)
def test_attention_and_gradients_are_those_of_whole_sequences(
    device: str, dtype: torch.dtype, kind: str, key_heads: int
) -> None:
    heads, options = make_heads(device, dtype, key_heads), OPTIONS[kind]
    weights_T = torch.randn(sum(TREE.lengths), 4, 16, generator=torch.Generator().manual_seed(2)).to(device)
    out_T = attend(PrefixTreeMetadata(TREE, device), heads, options)
    found = torch.autograd.grad((out_T * weights_T).sum(), heads)

    wide = tuple(tensor.detach().double().requires_grad_() for tensor in heads)
    expected_T = torch.zeros_like(out_T, dtype=torch.float64)
    for leaf in LEAVES:  # each whole sequence alone, exactly
        path = TREE.paths()[leaf].to(device)
        alone = attend(PackedMetadata([len(path)], "cpu"), tuple(tensor[path].cpu() for tensor in wide), options)
        expected_T = expected_T.index_copy(0, path, alone.to(device))
    wanted = torch.autograd.grad((expected_T * weights_T).sum(), wide)

    tolerance = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    assert float((out_T.detach() - expected_T.detach()).norm() / expected_T.detach().norm()) < tolerance
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < tolerance
