"""LoRA over ranks against one device: real processes, gloo between them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.policies import save_tiny_model
from tests.sharded import EPOCHS, alone, gaps, largest_gap, load, make_batch, make_spec, ragged, start
from treadle.algorithm.advantage_inputs import rows_of
from treadle.config.training import LoraConfig, OptimConfig
from treadle.errors import ConfigError, RunError
from treadle.model.checksum import checksum
from treadle.policy.rank import FSDPRank
from treadle.policy.rank_calls import ShardedReference
from treadle.policy.rank_group import RankGroup

LORA = LoraConfig(r=3, alpha=5.0)  # fewer rows of the first factor than divide evenly
FAST = OptimConfig(lr=1e-2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def pair(directory: Path) -> Iterator[RankGroup]:
    ranks = start(make_spec(directory), 2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    "sharding", [{}, {"reshard_after_forward": False}, {"fsdp_size": 1}, {"forward_prefetch": True}], ids=str
)
@pytest.mark.parametrize("recompute", [False, True])
def test_two_ranks_train_as_one_device(
    pair: RankGroup, directory: Path, sharding: dict[str, Any], recompute: bool
) -> None:
    spec = make_spec(
        directory, recompute=recompute, sharding=sharding, lora=LORA, optim=FAST, use_kl_loss=True, **EPOCHS
    )
    many, one = load(pair, spec), alone(spec)
    reference, frozen = ShardedReference(pair), one.frozen_reference(spec.ref) if spec.ref else None
    assert frozen is not None
    for seed in range(3):
        rows = rows_of(ragged(seed))
        expected = frozen.logprobs(rows)
        torch.testing.assert_close(reference.logprobs(rows), expected, rtol=1e-5, atol=1e-5)
        batch = make_batch(ragged(seed), ref_logprobs_T=expected)
        mine, theirs = many.train(batch), one.train(batch)
        assert max(gaps(mine, theirs).values()) < 1e-4
    assert largest_gap(many.tensors(), one.tensors()) < 1e-5
    rows = rows_of(ragged(7))
    torch.testing.assert_close(many.logprobs(rows), one.logprobs(rows), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(many.frozen_logprobs(rows), one.frozen_logprobs(rows), rtol=1e-5, atol=1e-5)


def test_the_reference_holds_no_weights(pair: RankGroup, directory: Path) -> None:
    load(pair, make_spec(directory, lora=LORA))
    assert pair.run("asking", _kinds) == ["FrozenReference", "FrozenReference"]


def _kinds(rank: FSDPRank) -> str:
    return type(rank.reference).__name__


def test_a_checkpoint_goes_on_bit_for_bit_and_on_another_number_of_ranks(
    pair: RankGroup, directory: Path, tmp_path: Path
) -> None:
    spec = make_spec(directory, lora=LORA, optim=FAST)
    many = load(pair, spec)
    many.train(make_batch(ragged(0)))
    many.save(tmp_path / "checkpoint")
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [
        *("adapter_config.json", "adapter_model.safetensors", "training"),
    ]
    many.train(make_batch(ragged(1)))
    expected = dict(many.tensors())
    again = load(pair, spec)
    again.restore(tmp_path / "checkpoint")
    assert again.version == 1
    again.train(make_batch(ragged(1)))
    assert checksum(again.tensors()) == checksum(expected)
    single = alone(spec)
    single.restore(tmp_path / "checkpoint")
    single.train(make_batch(ragged(1)))
    assert largest_gap(dict(single.tensors()), expected) < 1e-5
    single.save(tmp_path / "single")
    again.restore(tmp_path / "single")
    assert largest_gap(dict(single.tensors()), again.tensors()) < 1e-6


def test_ranks_refuse_alike_and_stay_usable(pair: RankGroup, directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no linear module of this name"):
        load(pair, make_spec(directory, lora=LoraConfig(r=2, target_modules=("nothing",))))
    policy = load(pair, make_spec(directory, lora=LORA))
    alone(make_spec(directory, lora=LoraConfig(r=5))).save(tmp_path / "other")
    with pytest.raises(RunError, match="LoraSettings"):
        policy.restore(tmp_path / "other")
    policy.train(make_batch(ragged(0)))
    policy.export(tmp_path / "model")
    from transformers import AutoModelForCausalLM

    merged = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert all(torch.equal(tensor, merged[name]) for name, tensor in policy.tensors().items())
