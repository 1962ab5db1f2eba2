"""A sharded network on one GPU: dtypes and offloading, against the same network unsharded."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.policies import save_tiny_model
from tests.sharded import EPOCHS, alone, gaps, load, make_batch, make_spec, ragged, start
from treadle.config.training import FSDPCriticConfig, OptimConfig
from treadle.model.checksum import checksum
from treadle.policy.rank import FSDPRank
from treadle.policy.rank_calls import ShardedCritic
from treadle.policy.rank_group import RankGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OFFLOADS = ("param_offload", "optimizer_offload", "offload_policy")


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough to be seen in a GPU's memory: 27 million parameters."""
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    return save_tiny_model(tmp_path_factory.mktemp("larger"), **sizes, initializer_range=0.02, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def gpu(larger: Path) -> Iterator[RankGroup]:
    ranks = start(make_spec(larger), 1, device="cuda:0")
    yield ranks
    ranks.close()


def gpu_bytes(rank: FSDPRank) -> int:
    import gc

    gc.collect()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("offload", ["none", *OFFLOADS])
def test_on_a_gpu_offloading_frees_memory_and_changes_nothing(
    gpu: RankGroup, larger: Path, offload: str, tmp_path: Path
) -> None:
    sharding = {} if offload == "none" else {offload: True}
    slow = OptimConfig(lr=1e-5)
    spec = replace(make_spec(larger, recompute=True, sharding=sharding, optim=slow, **EPOCHS), ref=None, critic=None)
    policy = load(gpu, spec)
    single = alone(spec, torch.device("cuda"))
    for seed in range(3):
        batch = make_batch(ragged(seed))
        mine, theirs = policy.train(batch), single.train(batch)
        assert max(gaps(mine, theirs).values()) < 1e-4, gaps(mine, theirs)
    weights = sum(tensor.nbytes for tensor in single.tensors().values())
    held = gpu.run("asking", gpu_bytes)[0] / weights
    expected = {"none": 3, "param_offload": 2, "optimizer_offload": 1, "offload_policy": 0}[offload]
    assert expected <= held < expected + 0.8, "in units of the weights: they themselves, two moments, and workspaces"
    policy.save(tmp_path)
    assert checksum(dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())) == checksum(
        policy.tensors()
    )
    again = load(gpu, spec)
    again.restore(tmp_path)
    batch = make_batch(ragged(9))
    assert gaps(again.train(batch), single.train(batch))["actor/pg_loss"] < 1e-4
    torch.testing.assert_close(again.logprobs(batch.rows), single.logprobs(batch.rows), atol=2e-3, rtol=0)


def test_on_a_gpu_bf16_computes_as_on_one_device(gpu: RankGroup, larger: Path) -> None:
    spec = make_spec(larger, dtype="bf16", sharding={"forward_prefetch": True})
    assert spec.critic is not None
    slow = FSDPCriticConfig(optim=OptimConfig(lr=1e-4), cliprange_value=10.0)
    spec = replace(spec, critic=slow)
    policy = load(gpu, spec)
    single = alone(spec, torch.device("cuda"))
    batch = make_batch(ragged(1))
    torch.testing.assert_close(policy.logprobs(batch.rows), single.logprobs(batch.rows), atol=0.02, rtol=0)
    assert policy.train(batch)["actor/grad_norm"] == pytest.approx(single.train(batch)["actor/grad_norm"], rel=0.02)
    critic, rows = ShardedCritic(gpu), batch.rows
    assert not critic.values(rows).any()
    returns_T = torch.full_like(batch.advantages_T, 0.3)
    losses = [
        critic.train(replace(batch, values_T=critic.values(rows), returns_T=returns_T))["critic/vf_loss"]
        for _ in range(4)
    ]
    assert losses[-1] < losses[0]
