"""Sharded training against one device, with real processes and real collectives: gloo on this machine's CPU."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from socket import inet_aton
from typing import Any

import pytest
import torch
from torch.distributed import get_rank
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from tests.golden.test_shared_prefix import make_batch as make_prefix_batch
from tests.golden.test_shared_prefix import make_rows as make_prefix_rows
from tests.policies import make_groups, save_tiny_model
from tests.sharded import (
    EPOCHS,
    alone,
    critic_alone,
    gaps,
    largest_gap,
    load,
    make_batch,
    make_spec,
    ragged,
    reference_alone,
    start,
)
from tests.tiny import FAMILIES, tiny
from treadle.algorithm.advantage_inputs import rows_of
from treadle.checkpoint import Checkpoints
from treadle.config.rollout import ModelConfig
from treadle.config.training import POLICY_LOSSES, AlgorithmConfig, CheckpointConfig, PolicyLossConfig, TrainerConfig
from treadle.errors import ConfigError, RunError
from treadle.model.checksum import checksum
from treadle.model.lora import LoraSettings
from treadle.model.peft_files import StoredAdapter, write_adapter
from treadle.policy.hf_model import scatter_weights
from treadle.policy.protocol import TrainBatch
from treadle.policy.rank import FSDPRank
from treadle.policy.rank_calls import ShardedCritic, ShardedNetworks, ShardedReference
from treadle.policy.rank_group import RankGroup
from treadle.trainer.step import StepParts, train_step


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def pair(directory: Path) -> Iterator[RankGroup]:
    ranks = start(make_spec(directory), 2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(directory: Path) -> Iterator[RankGroup]:
    ranks = start(make_spec(directory), 4)
    yield ranks
    ranks.close()


def listening(rank: FSDPRank) -> set[str]:
    """The addresses at which the process of a rank listens, as the kernel spells them."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def interface(rank: FSDPRank) -> str | None:
    return os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are read from Linux's /proc")
def test_ranks_of_one_machine_listen_on_the_loopback_alone(pair: RankGroup) -> None:
    """Where the host's name is an address of the network, gloo would listen there: it is told the interface."""
    loopback = inet_aton("127.0.0.1")[::-1].hex().upper()
    assert pair.run("its sockets", listening) == [{loopback}, {loopback}]
    assert pair.run("its environment", interface) == ["lo", "lo"]


SHARDINGS: dict[str, dict[str, Any]] = {
    "kept small": {},
    "kept gathered": {"reshard_after_forward": False, "forward_prefetch": True},
}


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("model", ["directory", "tied"])
def test_ten_steps_equal_those_of_one_device(
    pair: RankGroup, model: str, sharding: str, request: pytest.FixtureRequest
) -> None:
    """Several epochs and mini batches, many micro batches, ragged groups, KL to a reference, recomputed activations."""
    spec = make_spec(
        request.getfixturevalue(model),
        recompute=model == "tied",
        sharding=SHARDINGS[sharding],
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_coeff=0.01,
        **EPOCHS,
    )
    policy, single = load(pair, spec), alone(spec)
    sharded_reference, reference = ShardedReference(pair), reference_alone(spec)
    for seed in range(10):
        batch = make_batch(ragged(seed))
        mine = policy.train(replace(batch, ref_logprobs_T=sharded_reference.logprobs(batch.rows)))
        theirs = single.train(replace(batch, ref_logprobs_T=reference.logprobs(batch.rows)))
        assert max(gaps(mine, theirs).values()) < 1e-5, gaps(mine, theirs)
        assert mine["actor/tokens"] == theirs["actor/tokens"]
        assert mine.keys() == theirs.keys() | {"actor/ranks"} and mine["actor/ranks"] == 2
    assert mine["actor/micro_batches"] > mine["actor/optimizer_steps"]
    assert largest_gap(policy.tensors(), single.tensors()) < 1e-5
    torch.testing.assert_close(policy.logprobs(batch.rows), single.logprobs(batch.rows), atol=1e-5, rtol=0)


def test_an_adapter_of_a_tied_output_layer_is_merged_as_on_one_device(
    pair: RankGroup, tied: Path, tmp_path: Path
) -> None:
    """Merged, the output layer has a weight of its own: in training, in the reference, in a checkpoint and after it."""
    module = AutoModelForCausalLM.from_pretrained(tied)
    generator = torch.Generator().manual_seed(3)
    factors = {
        name: (
            torch.randn(2, part.in_features, generator=generator),
            torch.randn(part.out_features, 2, generator=generator),
        )
        for name, part in (
            ("lm_head", module.lm_head),
            ("model.layers.0.mlp.up_proj", module.model.layers[0].mlp.up_proj),
        )
    }
    write_adapter(tmp_path / "adapter", module, StoredAdapter(LoraSettings(2, 1.0), factors, None))
    model = ModelConfig(path=str(tied), adapter=str(tmp_path / "adapter"))
    spec = replace(make_spec(tied), model=model)
    policy, single, batch = load(pair, spec), alone(spec), make_batch(ragged(1))
    assert not torch.equal(single.tensors()["lm_head.weight"], single.tensors()["model.embed_tokens.weight"])
    assert largest_gap(policy.tensors(), single.tensors()) == 0
    torch.testing.assert_close(
        ShardedReference(pair).logprobs(batch.rows), reference_alone(spec).logprobs(batch.rows), atol=1e-5, rtol=0
    )
    policy.train(batch), single.train(batch)
    assert largest_gap(policy.tensors(), single.tensors()) < 1e-5
    trained = policy.tensors()
    policy.save(tmp_path / "checkpoint")
    policy.train(batch)
    policy.restore(tmp_path / "checkpoint")
    assert largest_gap(policy.tensors(), trained) == 0


def scatter_more_than_fits(rank: FSDPRank) -> None:
    source = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) if get_rank() == 0 else None
    mesh = init_device_mesh("cpu", (2,))
    scatter_weights(source, torch.nn.Sequential(torch.nn.Linear(2, 2)), mesh, torch.device("cpu"))


def test_weights_that_the_sharded_model_has_no_place_for_are_refused(pair: RankGroup) -> None:
    with pytest.raises(RunError, match=r"only one of the two models has 1\.bias"):
        pair.run("scattering", scatter_more_than_fits)


def test_ten_steps_with_a_critic_equal_those_of_one_device(pair: RankGroup, directory: Path) -> None:
    spec = make_spec(directory, ppo_mini_batch_size=2)
    algorithm = AlgorithmConfig(adv_estimator="gae", use_kl_in_reward=True, gamma=0.99, lam=0.9)
    many = StepParts(
        load(pair, spec), spec.actor, algorithm, TrainerConfig(), ShardedReference(pair), ShardedCritic(pair)
    )
    one = StepParts(alone(spec), spec.actor, algorithm, TrainerConfig(), reference_alone(spec), critic_alone(spec))
    for step in range(1, 11):
        mine, theirs = (train_step(parts, ragged(step), step=step).metrics for parts in (many, one))
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "reward/kl"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-5), name
    assert largest_gap(many.policy.tensors(), one.policy.tensors()) < 1e-5


@pytest.mark.parametrize("recompute", [False, True])
def test_prefixes_that_rows_share_are_read_once_on_ranks_as_well(
    pair: RankGroup, directory: Path, recompute: bool
) -> None:
    """Each rank has whole trees or parts of one; the one device beside them reads every row by itself."""
    spec = make_spec(directory, recompute=recompute, ppo_max_token_len_per_gpu=120, ppo_mini_batch_size=2)
    policy, single = load(pair, spec), alone(spec)
    single._network.shares_prefixes = False
    for seed in range(3):
        batch = make_prefix_batch(make_prefix_rows(seed))
        mine, theirs = policy.train(batch), single.train(batch)
        assert max(gaps(mine, theirs).values()) < 1e-5
        assert mine["actor/tokens"] + mine["actor/shared_prefix_tokens"] == theirs["actor/tokens"]
        assert mine["actor/shared_prefix_tokens"] > 100
    assert largest_gap(policy.tensors(), single.tensors()) < 1e-5
    reference, reference_beside = ShardedReference(pair), reference_alone(spec)
    reference_beside._network.shares_prefixes = False
    torch.testing.assert_close(
        reference.logprobs(batch.rows), reference_beside.logprobs(batch.rows), atol=1e-5, rtol=1e-5
    )
    critic, critic_beside = ShardedCritic(pair), critic_alone(spec)
    critic_beside._network.shares_prefixes = False
    given = replace(batch, values_T=critic.values(batch.rows), returns_T=batch.advantages_T)
    for _ in range(2):
        mine, theirs = critic.train(given), critic_beside.train(given)
        assert mine["critic/vf_loss"] == pytest.approx(theirs["critic/vf_loss"], rel=1e-5)
        assert mine["critic/grad_norm"] == pytest.approx(theirs["critic/grad_norm"], rel=1e-4)
        assert mine["critic/tokens"] < theirs["critic/tokens"]


@pytest.mark.parametrize("loss_mode", POLICY_LOSSES)
def test_every_loss_is_that_of_one_device_though_ranks_have_nothing_to_do(
    four: RankGroup, directory: Path, loss_mode: str
) -> None:
    """Three rows over four ranks: one computes without being counted, in every optimizer step."""
    loss = PolicyLossConfig(loss_mode=loss_mode, kl_cov_ratio=0.1, clip_cov_ratio=0.1, clip_cov_lb=-5)
    spec = make_spec(directory, ppo_epochs=2, policy_loss=loss, loss_agg_mode="seq-mean-token-mean")
    policy, single = load(four, spec), alone(spec)
    batch = make_batch(make_groups(3, num_groups=1, n=3))
    mine, theirs = policy.train(batch), single.train(batch)
    assert max(gaps(mine, theirs).values()) < 1e-5, gaps(mine, theirs)
    assert mine["rollout_corr/logprob_abs_diff"] == pytest.approx(theirs["rollout_corr/logprob_abs_diff"], abs=1e-5)
    torch.testing.assert_close(policy.logprobs(batch.rows), single.logprobs(batch.rows), atol=1e-4, rtol=0)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_copies_of_a_sharded_model_equal_one_device(four: RankGroup, tied: Path, sharding: str) -> None:
    """Two copies, each cut over two ranks."""
    spec = make_spec(tied, sharding={"fsdp_size": 2} | SHARDINGS[sharding], ppo_max_token_len_per_gpu=40, **EPOCHS)
    policy, single = load(four, spec), alone(spec)
    for seed in range(3):
        batch = make_batch(ragged(seed))
        mine, theirs = policy.train(batch), single.train(batch)
        assert max(gaps(mine, theirs).values()) < 1e-5, gaps(mine, theirs)
    assert largest_gap(policy.tensors(), single.tensors()) < 1e-5


def test_ranks_that_do_not_divide_into_copies_are_refused(four: RankGroup, directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.fsdp_config\.fsdp_size: 3 does not divide 4 ranks"):
        load(four, make_spec(directory, sharding={"fsdp_size": 3}))


def test_bf16_computes_as_on_one_device(pair: RankGroup, tied: Path) -> None:
    """Full weights in fp32, gathered and pushed in bf16."""
    spec = make_spec(tied, dtype="bf16")
    policy, single = load(pair, spec), alone(spec)
    batch = make_batch(ragged(1))
    torch.testing.assert_close(policy.logprobs(batch.rows), single.logprobs(batch.rows), atol=0.05, rtol=0)
    mine, theirs = policy.train(batch), single.train(batch)
    assert mine["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=0.02)
    assert {tensor.dtype for tensor in policy.tensors().values()} == {torch.bfloat16}
    assert policy.tensors().keys() == single.tensors().keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_cut_and_put_together_again(pair: RankGroup, family: str, tmp_path: Path) -> None:
    model = tiny(family, tie_word_embeddings=family == "gemma2")
    model.save_pretrained(tmp_path)
    spec = make_spec(tmp_path, ppo_max_token_len_per_gpu=120)
    policy, single, batch = load(pair, spec), alone(spec), make_batch(ragged(2))
    assert checksum(policy.tensors()) == checksum(dict(model.named_parameters()))
    torch.testing.assert_close(policy.logprobs(batch.rows), single.logprobs(batch.rows), atol=2e-5, rtol=1e-5)
    mine, theirs = policy.train(batch), single.train(batch)
    assert mine["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)


def test_a_run_goes_on_at_any_number_of_ranks(pair: RankGroup, four: RankGroup, tied: Path, tmp_path: Path) -> None:
    """One device, two ranks, two copies over two ranks each, two ranks, one device: as if it had been one all along."""
    spec, copies = make_spec(tied, **EPOCHS), make_spec(tied, sharding={"fsdp_size": 2}, **EPOCHS)
    model = ModelConfig(path=str(tied))
    straight = alone(spec)
    checkpoints = Checkpoints(tmp_path, checkpoint=CheckpointConfig(), model=model)
    opened = (
        lambda: alone(spec),
        lambda: load(pair, spec),
        lambda: load(four, copies),
        lambda: load(pair, spec),
        lambda: alone(spec),
    )
    for step, open_policy in enumerate(opened, start=1):
        policy: Any = open_policy()
        progress = checkpoints.restore(policy, None)
        assert policy.version == step - 1 == (progress.step if progress else 0)
        batch = make_batch(ragged(step))
        policy.train(batch)
        straight.train(batch)
        saved = checkpoints.save(policy, None, step, {})
    assert largest_gap(policy.tensors(), straight.tensors()) < 1e-5
    assert [path.name for path in saved.glob("training/optimizer*")] == ["optimizer.safetensors"]


def test_a_sharded_checkpoint_has_a_file_from_each_rank(four: RankGroup, tied: Path, tmp_path: Path) -> None:
    policy = load(four, make_spec(tied, sharding={"fsdp_size": 2}))
    policy.train(make_batch(ragged(1)))
    ShardedCritic(four).save(tmp_path)
    policy.save(tmp_path)
    names = sorted(path.name for path in (tmp_path / "training").glob("*.safetensors"))
    parts = [f"optimizer-0000{part}-of-00002.safetensors" for part in (1, 2)]
    assert names == [*parts, "rng.safetensors"], "copies of the same rows are written once"
    assert sorted(path.name for path in (tmp_path / "training/critic").glob("model*")) == [
        f"model-0000{part}-of-00002.safetensors" for part in (1, 2)
    ]


def test_a_critic_goes_on_at_another_number_of_ranks(pair: RankGroup, directory: Path, tmp_path: Path) -> None:
    spec = make_spec(directory)
    load(pair, spec)
    sharded, rows = ShardedCritic(pair), rows_of(ragged(1))

    def update(seed: int) -> TrainBatch:
        batch = make_batch(ragged(seed))
        zeros_T = torch.zeros_like(batch.advantages_T)
        return replace(batch, values_T=zeros_T, returns_T=zeros_T + 0.3)

    sharded.train(update(1))
    sharded.save(tmp_path / "two")
    one = critic_alone(spec)
    one.restore(tmp_path / "two")
    torch.testing.assert_close(one.values(rows), sharded.values(rows), atol=1e-6, rtol=0)
    for critic in (one, sharded):
        critic.train(update(2))
    one.save(tmp_path / "one")
    load(pair, spec)
    sharded.restore(tmp_path / "one")
    torch.testing.assert_close(sharded.values(rows), one.values(rows), atol=1e-6, rtol=0)


def use_small_files(rank: FSDPRank, num_bytes: int) -> None:
    from treadle.policy import hf_model

    hf_model.FILE_BYTES = num_bytes


def test_a_large_model_is_exported_in_several_files(pair: RankGroup, tied: Path, tmp_path: Path) -> None:
    policy = load(pair, make_spec(tied))
    policy.train(make_batch(ragged(1)))
    pair.run("setting up", use_small_files, 4096)
    try:
        policy.export(tmp_path)
    finally:
        pair.run("setting up", use_small_files, 2**32)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(path.stat().st_size < 8192 for path in tmp_path.glob("*.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert checksum(dict(loaded.named_parameters())) == checksum(policy.tensors())


def publish(rank: FSDPRank, dtype: torch.dtype) -> str | None:
    """What a publisher does: every rank goes through all weights, one writes."""
    if rank.rank_spec.rank == 0:
        return checksum(dict(rank.policy.full_tensors(dtype)))
    for _ in rank.policy.full_tensors(dtype):
        pass
    return None


def test_whole_weights_can_be_had_on_the_ranks(pair: RankGroup, tied: Path) -> None:
    policy = load(pair, make_spec(tied))
    policy.train(make_batch(ragged(1)))
    narrow = {name: tensor.bfloat16() for name, tensor in policy.tensors().items()}
    assert pair.run("a push", publish, torch.bfloat16) == [checksum(narrow), None]


def test_networks_over_ranks_are_those_of_the_spec(pair: RankGroup, directory: Path) -> None:
    spec = make_spec(directory)
    networks = ShardedNetworks.over(pair._handles, replace(spec, critic=None), 60)
    assert networks.critic is None and networks.reference is not None and networks.policy.version == 0
