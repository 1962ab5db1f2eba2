"""What every policy, reference and critic promises, on one device or over ranks.

To add an implementation, add a `Stage` to `STAGES`: how to open one, and how to put fresh networks on it.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.policies import CPU, make_groups, save_tiny_model
from treadle.algorithm.advantage_inputs import rows_of
from treadle.config.rollout import ModelConfig
from treadle.config.training import (
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPRefConfig,
    OptimConfig,
    RolloutCorrectionConfig,
)
from treadle.errors import ConfigError, MisuseError, RunError
from treadle.model.checksum import checksum
from treadle.policy.critic import SingleCritic
from treadle.policy.local_ranks import LocalRanks
from treadle.policy.policy import Sampling, SinglePolicy
from treadle.policy.protocol import Critic, Policy, Reference, TrainBatch, group_and_trajectory_ids
from treadle.policy.rank import FSDPRank, NetworksSpec
from treadle.policy.rank_calls import ShardedCritic, ShardedPolicy, ShardedReference
from treadle.policy.rank_group import RankGroup
from treadle.policy.reference import SingleReference
from treadle.types import Row


@dataclass(frozen=True, slots=True)
class Networks:
    """Fresh ones, as a spec asks."""

    policy: Policy
    reference: Reference
    critic: Critic


Load = Callable[[NetworksSpec], Networks]


@contextmanager
def one_device(spec: NetworksSpec) -> Iterator[Load]:
    yield load_single


def load_single(spec: NetworksSpec) -> Networks:
    assert spec.ref is not None and spec.critic is not None
    common: dict[str, Any] = {"model": spec.model, "device": CPU}
    policy = SinglePolicy.create(
        actor=spec.actor,
        rollout_correction=spec.rollout_correction,
        sampling=spec.sampling,
        total_steps=spec.total_steps,
        **common,
    )
    critic = SingleCritic.create(
        critic=spec.critic, actor=spec.actor, response_length=16, total_steps=spec.total_steps, **common
    )
    reference = SingleReference.create(ref=spec.ref, temperature=spec.sampling.temperature, **common)
    return Networks(policy, reference, critic)


@contextmanager
def two_ranks(spec: NetworksSpec) -> Iterator[Load]:
    """Two processes with gloo between them; each test has networks of its own on them."""
    ranks = RankGroup(LocalRanks.start(spec, ["cpu", "cpu"], launch_timeout_s=120, timeout_s=60), 60)

    def load(wanted: NetworksSpec) -> Networks:
        ranks.run("loading", FSDPRank.load, wanted)
        return Networks(ShardedPolicy(ranks), ShardedReference(ranks), ShardedCritic(ranks))

    try:
        yield load
    finally:
        ranks.close()
        ranks.close()  # harmless


STAGES: Mapping[str, Callable[[NetworksSpec], AbstractContextManager[Load]]] = {
    "one device": one_device,
    "two ranks": two_ranks,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


def make_spec(directory: Path, **keys: Any) -> NetworksSpec:
    """`keys` are the actor's."""
    actor = {"dtype": "fp32", "optim": OptimConfig(lr=1e-3), "ppo_max_token_len_per_gpu": 60} | keys
    return NetworksSpec(
        ModelConfig(path=str(directory)),
        FSDPActorConfig(**actor),
        RolloutCorrectionConfig(),
        Sampling(1.0, response_length=16),
        total_steps=10,
        ref=FSDPRefConfig(dtype="fp32"),
        critic=FSDPCriticConfig(dtype="fp32", optim=OptimConfig(lr=1e-2)),
    )


@pytest.fixture(scope="module", params=STAGES)
def load(request: pytest.FixtureRequest, directory: Path) -> Iterator[Load]:
    with STAGES[request.param](make_spec(directory)) as load:
        yield load


@pytest.fixture
def networks(load: Load, directory: Path) -> Networks:
    return load(make_spec(directory))


def make_batch(seed: int = 1, **changes: Any) -> TrainBatch:
    groups, rng = make_groups(seed, forks=2), random.Random(seed)
    rows = rows_of(groups)
    advantages = [value for row in rows for value in [rng.gauss(0, 1)] * len(row.ids)]
    return replace(TrainBatch(rows, *group_and_trajectory_ids(groups), torch.tensor(advantages)), **changes)


def mask_of(batch: TrainBatch) -> Tensor:
    return torch.tensor([flag for row in batch.rows for flag in row.mask], dtype=torch.bool)


def test_each_training_is_one_version(networks: Networks) -> None:
    assert networks.policy.version == 0
    before = {name: tensor.clone() for name, tensor in networks.policy.tensors().items()}
    for version in (1, 2):
        metrics = networks.policy.train(make_batch(version))
        assert networks.policy.version == version
    assert all(not torch.equal(before[name], tensor) for name, tensor in networks.policy.tensors().items())
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/lr"] == pytest.approx(1e-3)


def test_logprobs_have_a_value_for_each_response_token(networks: Networks) -> None:
    batch = make_batch()
    for found_T in (networks.policy.logprobs(batch.rows), networks.reference.logprobs(batch.rows)):
        assert found_T.device == CPU and found_T.shape == mask_of(batch).shape
        assert torch.equal(found_T < 0, mask_of(batch))


def test_gradient_norms_are_those_of_the_model_by_its_logits(networks: Networks, directory: Path) -> None:
    batch = make_batch()
    module = AutoModelForCausalLM.from_pretrained(directory).double()
    expected = []
    for row in batch.rows:
        ids = torch.tensor([[*row.prompt_ids, *row.ids]])
        logits = module(ids).logits[0, len(row.prompt_ids) - 1 : -1].detach().requires_grad_()
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(row.ids)[:, None]).sum()
        (slope,) = torch.autograd.grad(chosen, logits)
        expected.append(slope.square().sum(-1) * torch.tensor(row.mask))
    found_T = networks.policy.gradient_norms(batch.rows)
    assert found_T.device == CPU
    torch.testing.assert_close(found_T.double(), torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_annotations_are_of_each_sampled_token_before_it_trained(networks: Networks) -> None:
    batch = make_batch(annotate=True)
    before_T = networks.policy.logprobs(batch.rows)
    networks.policy.train(batch)
    notes = networks.policy.annotations()
    assert notes is not None and notes.shape == (5, int(mask_of(batch).sum()))
    torch.testing.assert_close(notes[0], before_T[mask_of(batch)], atol=1e-4, rtol=1e-4)
    networks.policy.train(make_batch())
    assert networks.policy.annotations() is None


def test_rows_without_sampled_tokens_have_no_logprobs(networks: Networks) -> None:
    is_dummy = Row((5, 6), (7, 8), (0, 0), (0.0, 0.0), (-1, -1))
    assert torch.equal(networks.policy.logprobs([is_dummy]), torch.zeros(2))


def test_weights_are_those_of_the_model_and_plain(networks: Networks, directory: Path) -> None:
    plain = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
    assert checksum(networks.policy.tensors()) == checksum(plain)


def test_good_tokens_become_likelier(networks: Networks) -> None:
    batch = make_batch()
    before = networks.policy.logprobs(batch.rows)
    networks.policy.train(batch)
    assert ((networks.policy.logprobs(batch.rows) - before) * batch.advantages_T).sum() > 0


def test_the_same_batches_give_the_same_bits(load: Load, directory: Path) -> None:
    def run() -> str:
        policy = load(make_spec(directory, ppo_epochs=2, ppo_mini_batch_size=2, shuffle=True)).policy
        for seed in (1, 2):
            policy.train(make_batch(seed))
        return checksum(policy.tensors())

    assert run() == run()


def test_a_saved_policy_is_a_model_that_others_load(networks: Networks, tmp_path: Path) -> None:
    networks.policy.train(make_batch())
    networks.policy.save(tmp_path / "saved")
    networks.policy.export(tmp_path / "exported")
    for path in (tmp_path / "saved", tmp_path / "exported"):
        loaded = AutoModelForCausalLM.from_pretrained(path)
        assert checksum(dict(loaded.named_parameters())) == checksum(networks.policy.tensors())
        assert loaded.config.architectures == ["LlamaForCausalLM"] and loaded.dtype == torch.float32
    assert not (tmp_path / "exported" / "training").exists()


def test_a_restored_policy_goes_on_as_if_it_had_not_stopped(load: Load, directory: Path, tmp_path: Path) -> None:
    spec = make_spec(directory, ppo_epochs=2, optim=OptimConfig(lr=1e-3, lr_warmup_steps=4))
    policy = load(spec).policy
    policy.train(make_batch(1))
    policy.save(tmp_path)
    metrics = policy.train(make_batch(2))
    straight = checksum(policy.tensors())
    again = load(spec).policy
    again.restore(tmp_path)
    assert again.version == 1
    assert again.train(make_batch(2))["actor/lr"] == metrics["actor/lr"] == pytest.approx(5e-4)
    assert checksum(again.tensors()) == straight and again.version == 2


def test_restored_weights_are_those_that_compute(networks: Networks, tmp_path: Path) -> None:
    policy, rows = networks.policy, make_batch().rows
    policy.save(tmp_path)
    before = policy.logprobs(rows)
    policy.train(make_batch())
    after = policy.logprobs(rows)
    policy.restore(tmp_path)
    assert torch.equal(policy.logprobs(rows), before) and not torch.equal(after, before)


def test_a_model_of_another_shape_is_not_restored(networks: Networks, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, intermediate_size=64, tie_word_embeddings=True)
    with pytest.raises(RunError, match=r"is of another model: model[.]layers[.]0[.]mlp"):
        networks.policy.restore(tmp_path)


def test_updates_with_a_gradient_that_is_not_finite_are_skipped_and_counted(load: Load, directory: Path) -> None:
    policy, batch = load(make_spec(directory, ppo_epochs=2)).policy, make_batch()
    spoilt = replace(batch, advantages_T=batch.advantages_T * torch.inf)
    before = checksum(policy.tensors())
    metrics = policy.train(spoilt)
    assert metrics["actor/skipped_steps"] == 2 and metrics["actor/optimizer_steps"] == 0
    assert checksum(policy.tensors()) == before and policy.version == 1
    metrics = policy.train(batch)
    assert metrics["actor/skipped_steps"] == 0 and metrics["actor/grad_norm"] > 0
    assert checksum(policy.tensors()) != before
    policy.train(spoilt)  # the update in between was whole, so counting starts again


def test_too_many_skipped_updates_in_a_row_end_the_run_with_their_cause(load: Load, directory: Path) -> None:
    policy, batch = load(make_spec(directory, optim=OptimConfig(lr=1e-3, max_nonfinite_steps=2))).policy, make_batch()
    before = checksum(policy.tensors())
    spoilt = replace(batch, advantages_T=batch.advantages_T * torch.inf)
    policy.train(spoilt)
    with pytest.raises(RunError, match=r"actor: the gradient of training step 2 is nan \(first in .*\), and 2 updates"):
        policy.train(spoilt)
    assert checksum(policy.tensors()) == before and policy.version == 1


def test_a_skipped_update_leaves_the_moments_alone(load: Load, directory: Path) -> None:
    """So the next update is the one that would have followed anyway."""
    spec, batch = make_spec(directory, optim=OptimConfig(lr=1e-3, weight_decay=0)), make_batch()
    ends = []
    for between in ((), (replace(batch, advantages_T=batch.advantages_T * torch.inf),)):
        policy = load(spec).policy
        for part in (batch, *between, batch):
            policy.train(part)
        ends.append(checksum(policy.tensors()))
    assert ends[0] == ends[1]


def test_a_row_over_the_budget_names_the_key(load: Load, directory: Path) -> None:
    policy = load(make_spec(directory, ppo_max_token_len_per_gpu=5)).policy
    with pytest.raises(ConfigError, match=r"actor\.ppo_max_token_len_per_gpu: 5 tokens hold no row"):
        policy.train(make_batch())


def test_a_reference_never_changes(networks: Networks) -> None:
    batch = make_batch()
    before = networks.reference.logprobs(batch.rows)
    torch.testing.assert_close(before, networks.policy.logprobs(batch.rows), atol=1e-5, rtol=0)
    networks.policy.train(batch)
    assert torch.equal(networks.reference.logprobs(batch.rows), before)
    networks.reference.close()


def following(directory: Path, freq: int, mix: float) -> NetworksSpec:
    return replace(make_spec(directory), ref=FSDPRefConfig(dtype="fp32", sync_freq=freq, sync_mix=mix))


def test_a_reference_follows_the_policy_as_often_and_as_far_as_asked(load: Load, directory: Path) -> None:
    """Against the same mix, written out here, of the weights that a model was before and after."""
    networks, batch = load(following(directory, freq=2, mix=0.6)), make_batch()
    start = load_weights(directory)
    networks.policy.train(batch)
    before = networks.reference.logprobs(batch.rows)
    assert networks.reference.follow(networks.policy, 1) is False
    assert torch.equal(networks.reference.logprobs(batch.rows), before)
    assert networks.reference.follow(networks.policy, 2) is True
    policy = networks.policy.tensors()
    mixed = {name: 0.4 * weight + 0.6 * policy[name] for name, weight in start.items()}
    expected = logprobs_of(directory, mixed, batch.rows)
    torch.testing.assert_close(networks.reference.logprobs(batch.rows), expected, atol=2e-5, rtol=0)
    assert (expected - before).abs().max() > 1e-3


def test_a_reference_that_takes_over_everything_is_the_policy(load: Load, directory: Path) -> None:
    networks, batch = load(following(directory, freq=1, mix=1.0)), make_batch()
    networks.policy.train(batch)
    networks.reference.follow(networks.policy, 1)
    torch.testing.assert_close(
        networks.reference.logprobs(batch.rows), networks.policy.logprobs(batch.rows), atol=1e-5, rtol=0
    )


def test_a_reference_that_followed_is_saved_and_restored(load: Load, directory: Path, tmp_path: Path) -> None:
    spec, batch = following(directory, freq=1, mix=0.5), make_batch()
    networks = load(spec)
    networks.policy.train(batch)
    networks.reference.save(tmp_path / "before")
    assert not (tmp_path / "before" / "training").exists(), "it is still the model"
    networks.reference.follow(networks.policy, 1)
    followed = networks.reference.logprobs(batch.rows)
    networks.reference.save(tmp_path / "after")
    again = load(spec).reference
    again.restore(tmp_path / "before")
    assert not torch.equal(again.logprobs(batch.rows), followed)
    again.restore(tmp_path / "after")
    assert torch.equal(again.logprobs(batch.rows), followed)
    again.save(tmp_path / "once more")
    assert (tmp_path / "once more" / "training" / "reference").is_dir()


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    module = AutoModelForCausalLM.from_pretrained(directory)
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def logprobs_of(directory: Path, weights: Mapping[str, torch.Tensor], rows: Any) -> torch.Tensor:
    """By transformers' own forward, row by row; 0 where nothing was sampled."""
    module = AutoModelForCausalLM.from_pretrained(directory).eval()
    for name, weight in module.named_parameters():
        weight.data = weights[name]
    found = []
    for row in rows:
        ids = torch.tensor([*row.prompt_ids, *row.ids])
        with torch.no_grad():
            logprobs = module(ids[None]).logits[0].log_softmax(-1)
        ends = range(len(row.prompt_ids), len(ids))
        found += [logprobs[at - 1, ids[at]].item() * flag for at, flag in zip(ends, row.mask, strict=True)]
    return torch.tensor(found)


def with_returns(critic: Critic, seed: int = 1) -> TrainBatch:
    batch = make_batch(seed)
    values_T = critic.values(batch.rows)
    return replace(batch, values_T=values_T, returns_T=torch.full_like(values_T, 0.3))


def test_a_critic_expects_nothing_and_learns_to(networks: Networks) -> None:
    critic = networks.critic
    assert not critic.values(make_batch().rows).any()
    losses = [critic.train(with_returns(critic))["critic/vf_loss"] for _ in range(6)]
    assert losses[0] == pytest.approx(0.045) and losses[-1] < losses[0] / 3


def test_a_restored_critic_goes_on_as_if_it_had_not_stopped(load: Load, directory: Path, tmp_path: Path) -> None:
    critic = load(make_spec(directory)).critic
    critic.train(with_returns(critic, 1))
    critic.save(tmp_path)
    critic.train(with_returns(critic, 2))
    rows = make_batch(3).rows
    straight = critic.values(rows)
    again = load(make_spec(directory)).critic
    again.restore(tmp_path)
    again.train(with_returns(again, 2))
    assert torch.equal(again.values(rows), straight)


def test_a_critic_needs_returns(networks: Networks) -> None:
    with pytest.raises(MisuseError, match="returns"):
        networks.critic.train(make_batch())
