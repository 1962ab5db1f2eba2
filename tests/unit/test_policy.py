import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.policies import CPU, VOCABULARY, make_groups, make_policy, make_row, save_tiny_model, weights
from treadle.algorithm.advantage_inputs import rows_of
from treadle.config.rollout import ModelConfig
from treadle.config.training import POLICY_LOSSES, OptimConfig, PolicyLossConfig, RefConfig, RolloutCorrectionConfig
from treadle.errors import ConfigError, MisuseError, RunError
from treadle.model.checksum import checksum
from treadle.policy.policy import SinglePolicy
from treadle.policy.protocol import TrainBatch, group_and_trajectory_ids
from treadle.policy.reference import SingleReference
from treadle.types import Group, Row


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def make_batch(groups: Sequence[Group], **changes: Any) -> TrainBatch:
    """A batch with made-up advantages, one for each row."""
    rows, rng = rows_of(groups), random.Random(1)
    advantages = [value for row in rows for value in [rng.gauss(0, 1)] * len(row.ids)]
    return replace(TrainBatch(rows, *group_and_trajectory_ids(groups), torch.tensor(advantages)), **changes)


def train(policy: SinglePolicy, *seeds: int, **changes: Any) -> Mapping[str, float]:
    for seed in seeds:
        metrics = policy.train(make_batch(make_groups(seed), **changes))
    return metrics


def plain_logprobs(directory: Path, row: Row, temperature: float) -> Tensor:
    """As transformers computes them, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    ids = torch.tensor([[*row.prompt_ids, *row.ids]])
    with torch.no_grad():
        table = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
    found = table.gather(1, ids[0, 1:, None])[len(row.prompt_ids) - 1 :, 0]
    return torch.where(torch.tensor(row.mask) == 1, found, 0)


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SIZES, query_pre_attn_scalar=8, final_logit_softcapping=2.0)),
    "granite": (GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=3.0)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_model_alone(family: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    kind, config = FAMILIES[family]
    kind(config).save_pretrained(tmp_path)
    rng = random.Random(5)
    rows = [make_row(rng, turns=turns) for turns in (1, 2, 3)]
    policy = make_policy(tmp_path, temperature=0.6, ppo_max_token_len_per_gpu=40)
    expected = torch.cat([plain_logprobs(tmp_path, row, 0.6) for row in rows])
    torch.testing.assert_close(policy.logprobs(rows), expected, atol=2e-5, rtol=1e-5)


def test_a_reference_scores_as_the_untrained_policy(directory: Path) -> None:
    rows = rows_of(make_groups(2))
    policy = make_policy(directory)
    reference = SingleReference.create(
        model=ModelConfig(path=str(directory)), ref=RefConfig(dtype="fp32"), temperature=1.0, device=CPU
    )
    before = policy.logprobs(rows)
    assert torch.equal(reference.logprobs(rows), before)
    train(policy, 2)
    assert torch.equal(reference.logprobs(rows), before)
    assert not torch.equal(policy.logprobs(rows), before)


def test_training_counts_versions_and_moves_weights(directory: Path) -> None:
    policy = make_policy(directory)
    before = weights(policy)
    assert policy.version == 0
    train(policy, 1, 2)
    assert policy.version == 2
    assert all(not torch.equal(before[name], tensor) for name, tensor in policy.tensors().items())


def test_good_tokens_become_likelier_and_bad_ones_less(directory: Path) -> None:
    policy, batch = make_policy(directory), make_batch(make_groups(1))
    before = policy.logprobs(batch.rows)
    policy.train(batch)
    moved_T = policy.logprobs(batch.rows) - before
    assert (moved_T * batch.advantages_T).sum() > 0


def test_one_optimizer_step_needs_no_old_logprobs(directory: Path) -> None:
    metrics = train(make_policy(directory), 1)
    assert metrics["actor/old_logprobs_computed"] == 0
    assert metrics["actor/ratio_max"] == 1 and metrics["actor/ppo_kl"] == 0


@pytest.mark.parametrize("keys", [{"ppo_epochs": 2}, {"ppo_mini_batch_size": 2}], ids=str)
def test_several_optimizer_steps_compare_with_the_policy_before_the_first(
    directory: Path, keys: dict[str, int]
) -> None:
    policy = make_policy(directory, **keys)
    metrics = train(policy, 1)
    assert policy.version == 1
    assert metrics["actor/optimizer_steps"] == 2
    assert metrics["actor/old_logprobs_computed"] == 1
    assert metrics["actor/ratio_max"] > 1.001


def test_given_old_logprobs_are_used(directory: Path) -> None:
    batch = make_batch(make_groups(1))
    computed, given = make_policy(directory, ppo_epochs=2), make_policy(directory, ppo_epochs=2)
    computed.train(batch)
    given.train(replace(batch, old_logprobs_T=given.logprobs(batch.rows)))
    assert checksum(computed.tensors()) == checksum(given.tensors())
    other = make_policy(directory, ppo_epochs=2)
    other.train(replace(batch, old_logprobs_T=other.logprobs(batch.rows) - 1))
    assert checksum(computed.tensors()) != checksum(other.tensors())


def test_the_same_batches_give_the_same_bits(directory: Path) -> None:
    def run() -> str:
        policy = make_policy(directory, ppo_epochs=2, ppo_mini_batch_size=2, shuffle=True, entropy_coeff=0.01)
        train(policy, 1, 2, 3)
        return checksum(policy.tensors())

    assert run() == run()


def test_shuffling_is_by_seed(directory: Path) -> None:
    def run(seed: int) -> str:
        policy = make_policy(directory, ppo_mini_batch_size=2, shuffle=True, data_loader_seed=seed)
        train(policy, 1)
        return checksum(policy.tensors())

    assert run(1) == run(1) != run(2)


def test_what_stands_on_unsampled_tokens_does_not_matter(directory: Path) -> None:
    groups = make_groups(1)
    batch = make_batch(groups)
    mask_T = torch.tensor([flag for row in batch.rows for flag in row.mask], dtype=torch.bool)
    noisy = replace(batch, advantages_T=torch.where(mask_T, batch.advantages_T, nan))
    clean_policy, noisy_policy = make_policy(directory), make_policy(directory)
    clean_policy.train(batch)
    noisy_policy.train(noisy)
    assert checksum(clean_policy.tensors()) == checksum(noisy_policy.tensors())


def test_a_row_ends_for_training_at_its_last_sampled_token(directory: Path) -> None:
    """A trailing observation is read by nobody, and a row with no sampled token is left out."""
    groups = make_groups(1, num_groups=1)
    batch = make_batch(groups)

    def grow(row: Row) -> Row:
        return replace(
            row,
            ids=(*row.ids, 9, 9),
            mask=(*row.mask, 0, 0),
            logprobs=(*row.logprobs, 0, 0),
            versions=(*row.versions, -1, -1),
        )

    is_dummy = Row((5, 6), (7,), (0,), (0.0,), (-1,))
    rows = (*(grow(row) for row in batch.rows), is_dummy)
    lengths = [len(row.ids) for row in batch.rows]
    parts = [torch.cat([part, torch.zeros(2)]) for part in batch.advantages_T.split(lengths)]
    grown = TrainBatch(rows, (*batch.group_S, 0), (*batch.trajectory_S, 9), torch.cat([*parts, torch.zeros(1)]))
    plain, other = make_policy(directory), make_policy(directory)
    assert plain.train(batch)["actor/tokens"] == other.train(grown)["actor/tokens"]
    assert checksum(plain.tensors()) == checksum(other.tensors())


def test_the_difference_from_the_sampler_is_measured(directory: Path) -> None:
    policy = make_policy(directory)
    batch = make_batch(make_groups(1))
    logprobs = policy.logprobs(batch.rows).split([len(row.ids) for row in batch.rows])
    exact = tuple(replace(row, logprobs=tuple(found.tolist())) for row, found in zip(batch.rows, logprobs, strict=True))
    off = replace(exact[0], logprobs=tuple(value - 0.5 for value in exact[0].logprobs))
    metrics = policy.train(replace(batch, rows=exact))
    assert metrics["rollout_corr/logprob_abs_diff_max"] < 1e-5
    metrics = make_policy(directory).train(replace(batch, rows=(off, *exact[1:])))
    assert metrics["rollout_corr/logprob_abs_diff_max"] == pytest.approx(0.5, abs=1e-5)
    assert 0 < metrics["rollout_corr/logprob_abs_diff"] < 0.5


def test_unknown_sampler_logprobs_are_not_measured(directory: Path) -> None:
    batch = make_batch(make_groups(1))
    rows = tuple(replace(row, logprobs=(nan,) * len(row.ids)) for row in batch.rows)
    metrics = make_policy(directory).train(replace(batch, rows=rows))
    assert not any(name.startswith("rollout_corr") for name in metrics)
    cov = make_policy(directory, policy_loss=PolicyLossConfig(loss_mode="kl_cov"))
    with pytest.raises(MisuseError, match="kl_cov"):
        cov.train(replace(batch, rows=rows))


@pytest.mark.parametrize("loss_mode", POLICY_LOSSES)
def test_every_loss_trains(directory: Path, loss_mode: str) -> None:
    policy = make_policy(directory, ppo_epochs=2, policy_loss=PolicyLossConfig(loss_mode=loss_mode, kl_cov_ratio=0.1))
    before = checksum(policy.tensors())
    assert train(policy, 1)["actor/grad_norm"] > 0
    assert checksum(policy.tensors()) != before


def test_kl_to_the_reference_pulls_back(directory: Path) -> None:
    batch = make_batch(make_groups(1))
    still = replace(batch, advantages_T=torch.zeros_like(batch.advantages_T))
    policy = make_policy(directory, use_kl_loss=True, kl_loss_coef=1.0)
    shifted = replace(still, ref_logprobs_T=policy.logprobs(batch.rows) - 1)
    before = policy.logprobs(batch.rows)
    metrics = policy.train(shifted)
    assert metrics["actor/kl_loss"] > 0
    assert policy.logprobs(batch.rows).sum() < before.sum()


def test_the_entropy_bonus_raises_entropy(directory: Path) -> None:
    batch = make_batch(make_groups(1))
    still = replace(batch, advantages_T=torch.zeros_like(batch.advantages_T))
    policy = make_policy(directory, entropy_coeff=1.0)
    first = policy.train(still)["actor/entropy"]
    assert policy.train(still)["actor/entropy"] > first


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(directory: Path) -> None:
    policy = make_policy(directory, optim=OptimConfig(lr=1e-3, max_nonfinite_steps=1))
    before = checksum(policy.tensors())
    batch = make_batch(make_groups(1))
    with pytest.raises(RunError, match=r"actor: the gradient of training step 1 is nan"):
        policy.train(replace(batch, advantages_T=batch.advantages_T * torch.inf))
    assert checksum(policy.tensors()) == before and policy.version == 0


def test_large_gradients_are_clipped(directory: Path) -> None:
    """To a norm so small that Adam's epsilon outweighs it: nothing moves, and the norm is reported as it was."""
    still = OptimConfig(lr=1e-3, weight_decay=0)
    before = make_policy(directory).tensors()
    loose, tight = (make_policy(directory, grad_clip=clip, optim=still) for clip in (1e9, 1e-12))
    assert train(loose, 1)["actor/grad_norm"] == train(tight, 1)["actor/grad_norm"] > 0.1
    moved = [
        max((after[name] - before[name]).abs().max() for name in before) for after in (loose.tensors(), tight.tensors())
    ]
    assert moved[0] > 9e-4 and moved[1] < 1e-6


def test_the_learning_rate_follows_the_version(directory: Path) -> None:
    policy = make_policy(directory, optim=OptimConfig(lr=1e-3, lr_warmup_steps=2), ppo_epochs=2)
    rates = [train(policy, seed)["actor/lr"] for seed in (1, 2, 3)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3])


@pytest.mark.parametrize("model_dtype", ["fp32", "bf16"])
def test_bf16_is_near_fp32(directory: Path, model_dtype: str) -> None:
    exact, narrow = make_policy(directory), make_policy(directory, dtype="bf16", model_dtype=model_dtype)
    batch = make_batch(make_groups(1))
    assert {tensor.dtype for tensor in narrow.tensors().values()} == {torch.bfloat16}
    assert (exact.logprobs(batch.rows) - narrow.logprobs(batch.rows)).abs().max() < 0.2
    norms = [policy.train(batch)["actor/grad_norm"] for policy in (exact, narrow)]
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


def test_full_weights_keep_what_narrow_ones_would_lose(directory: Path, tmp_path: Path) -> None:
    """Steps too small for bf16 add up in fp32, are saved and restored in full, and the module holds them rounded."""
    keys = {"dtype": "bf16", "optim": OptimConfig(lr=1e-5, weight_decay=0)}
    full, narrow = make_policy(directory, **keys), make_policy(directory, model_dtype="bf16", **keys)
    train(full, 1, 2)
    train(narrow, 1, 2)
    full.save(tmp_path / "full")
    narrow.save(tmp_path / "narrow")
    name = "model.layers.0.mlp.down_proj.weight"
    before, exact, lost = (
        dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())[name]
        for path in (directory, tmp_path / "full", tmp_path / "narrow")
    )
    assert 5e-6 < (exact - before).abs().max() < 3e-5
    assert ((lost - before.bfloat16().float()).abs() < 5e-6).float().mean() > 0.9
    assert torch.equal(full.tensors()[name], exact.bfloat16())
    again = make_policy(directory, **keys)
    again.restore(tmp_path / "full")
    train(full, 3)
    train(again, 3)
    assert checksum(full.tensors()) == checksum(again.tensors())


def test_fp32_arithmetic_on_bf16_weights_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.dtype"):
        make_policy(directory, model_dtype="bf16", dtype="fp32")


def test_recomputing_leaves_the_module_as_it_was(directory: Path) -> None:
    policy = make_policy(directory, recompute=True)
    train(policy, 1)
    assert not any(part.training for part in policy.module.modules())
    assert not any(getattr(part, "gradient_checkpointing", False) for part in policy.module.modules())


def test_the_old_policy_may_be_the_samplers(directory: Path) -> None:
    bypass = RolloutCorrectionConfig(rollout_is="none", bypass_mode=True)
    metrics = train(make_policy(directory, ppo_epochs=2, correction=bypass), 1)
    assert metrics["actor/old_logprobs_computed"] == 0
    assert metrics["actor/ratio_max"] > 1.5


def test_a_row_without_a_prompt_is_refused(directory: Path) -> None:
    with pytest.raises(MisuseError, match="prompt"):
        make_policy(directory).logprobs([Row((), (5,), (1,), (-1.0,), (0,))])
