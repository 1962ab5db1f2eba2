"""Training with shared prefixes against the flat form, where every row is read by itself: the same to 1e-5."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from tests.policies import CPU, VOCABULARY, make_actor, make_policy, save_tiny_model
from treadle.config.rollout import ModelConfig
from treadle.config.training import CriticConfig, LoraConfig, OptimConfig, RefConfig
from treadle.model.causal_lm import prepare_module
from treadle.policy.critic import SingleCritic
from treadle.policy.network import DecoderNetwork
from treadle.policy.packed_inputs import Sequences
from treadle.policy.policy import SinglePolicy
from treadle.policy.protocol import TrainBatch
from treadle.policy.reference import SingleReference
from treadle.types import Row

CLOSE = 1e-5


def make_ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, VOCABULARY) for _ in range(count))


def make_row(rng: random.Random, prompt: tuple[int, ...], ids: tuple[int, ...], sampled: Sequence[int]) -> Row:
    logprobs = tuple(-rng.random() - 3.0 if flag else 0.0 for flag in sampled)
    return Row(prompt, ids, tuple(sampled), logprobs, tuple(0 if flag else -1 for flag in sampled))


def make_rows(seed: int = 0) -> list[Row]:
    """Groups with prompts of several lengths; observations in the middle; forks that share more than the prompt;
    a row of one token; two rows that are the same; rows with nothing in common."""
    rng = random.Random(seed)
    rows = []
    for length, count in ((17, 4), (40, 3), (25, 5)):
        prompt = make_ids(rng, length)
        for _ in range(count):
            mask = [1] * rng.randint(2, 8) + [0] * rng.randint(1, 6) + [1] * rng.randint(1, 9)
            rows.append(make_row(rng, prompt, make_ids(rng, len(mask)), mask))
        rows.append(make_row(rng, prompt, make_ids(rng, 1), [1]))
        common = make_ids(rng, 20)
        for size in (6, 20):  # forks: the first turn and its observation are theirs in common
            mask = [1] * 12 + [0] * 8 + [1] * size
            rows.append(make_row(rng, prompt, common + make_ids(rng, size), mask))
        rows.append(rows[-1])
    rows += [make_row(rng, make_ids(rng, 21), make_ids(rng, 7), [1] * 7) for _ in range(3)]
    return rows


def make_batch(rows: Sequence[Row]) -> TrainBatch:
    rng = random.Random(5)
    prompts = {prompt: at for at, prompt in enumerate(dict.fromkeys(row.prompt_ids for row in rows))}
    advantages = [rng.gauss(0, 1) for row in rows for _ in row.ids]
    groups = tuple(prompts[row.prompt_ids] for row in rows)
    return TrainBatch(tuple(rows), groups, tuple(range(len(rows))), torch.tensor(advantages))


def make_pair(directory: Path, **keys: object) -> tuple[SinglePolicy, SinglePolicy]:
    shared, flat = (make_policy(directory, **keys) for _ in range(2))
    flat._network.shares_prefixes = False
    return shared, flat


def relative_gap(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-3))


def gradients(network: DecoderNetwork, rows: Sequence[Row], *, shared: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs, and the gradients of a sum in which every token has another weight; entropy is in it as well."""
    network.module.zero_grad()
    packed = Sequences(rows).pack(range(len(rows)), CPU, shared=shared)
    found = network.logprobs(packed, 0.7)
    weights = torch.linspace(-1, 2, len(found.logprobs_T))
    ((found.logprobs_T * weights).sum() + 0.1 * (found.entropy_T * weights.flip(0)).sum()).backward()
    return found.logprobs_T.detach(), {
        name: parameter.grad.clone()
        for name, parameter in network.module.named_parameters()
        if parameter.grad is not None
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path)


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "sliding windows": MistralConfig(**SIZES, sliding_window=11),
    "windows, soft caps": Gemma2Config(**SIZES, sliding_window=11, query_pre_attn_scalar=8),
    "windows, sinks, experts": GptOssConfig(**SIZES, sliding_window=11, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True])
def test_logprobs_and_gradients_are_those_of_the_flat_form(family: str, recompute: bool) -> None:
    torch.manual_seed(3)
    network = DecoderNetwork(prepare_module(AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32)))
    rows = make_rows()
    with network.recomputing(recompute):
        found, mine = gradients(network, rows, shared=True)
        wanted, theirs = gradients(network, rows, shared=False)
    torch.testing.assert_close(found, wanted, atol=CLOSE, rtol=CLOSE)
    assert mine.keys() == theirs.keys()
    assert max(relative_gap(mine[name], theirs[name]) for name in theirs) < CLOSE


def test_a_shared_prefix_is_read_once() -> None:
    rows = make_rows()
    sequences = Sequences(rows)
    shared, flat = (sequences.pack(range(len(rows)), CPU, shared=wanted) for wanted in (True, False))
    prompts, forks, same = 17 * 7 + 40 * 6 + 25 * 8, 3 * 2 * 20, 3 * 19
    assert len(flat.ids_L) - len(shared.ids_L) == prompts + forks + same


@pytest.mark.parametrize("budget", [90, 150, 4096])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_training_step_is_that_of_the_flat_form(directory: Path, budget: int, mode: str) -> None:
    shared, flat = make_pair(directory, ppo_max_token_len_per_gpu=budget, loss_agg_mode=mode, ppo_mini_batch_size=2)
    batch = make_batch(make_rows())
    mine, theirs = shared.train(batch), flat.train(batch)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl"):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=CLOSE)
    assert mine["actor/tokens"] + mine["actor/shared_prefix_tokens"] == theirs["actor/tokens"]
    assert mine["actor/shared_prefix_tokens"] > 0 == theirs["actor/shared_prefix_tokens"]
    assert mine["actor/micro_batches"] <= theirs["actor/micro_batches"]
    torch.testing.assert_close(shared.logprobs(batch.rows), flat.logprobs(batch.rows), atol=2e-4, rtol=0)


def test_adapters_and_the_frozen_model_beside_them_share_prefixes(directory: Path) -> None:
    shared, flat = make_pair(directory, lora=LoraConfig(r=2), optim=OptimConfig(lr=1e-2))
    batch = make_batch(make_rows())
    mine, theirs = [[policy.train(batch)["actor/grad_norm"] for _ in range(2)] for policy in (shared, flat)]
    assert mine == pytest.approx(theirs, rel=1e-4)
    found, wanted = (policy.frozen_reference(RefConfig(dtype="fp32")) for policy in (shared, flat))
    assert found is not None and wanted is not None
    torch.testing.assert_close(found.logprobs(batch.rows), wanted.logprobs(batch.rows), atol=CLOSE, rtol=CLOSE)


def test_a_reference_shares_prefixes(directory: Path) -> None:
    ref, rows = RefConfig(dtype="fp32", log_prob_max_token_len_per_gpu=120), make_rows()
    shared, flat = (
        SingleReference.create(
            model=ModelConfig(path=str(directory), shared_prefix=mode), ref=ref, temperature=1.0, device=CPU
        )
        for mode in ("auto", "off")
    )
    assert shared._network.shares_prefixes and not flat._network.shares_prefixes
    torch.testing.assert_close(shared.logprobs(rows), flat.logprobs(rows), atol=CLOSE, rtol=CLOSE)


def test_a_critic_shares_prefixes(directory: Path) -> None:
    rows = make_rows()
    batch = make_batch(rows)
    results = []
    for mode in ("auto", "off"):
        critic = SingleCritic.create(
            model=ModelConfig(path=str(directory), shared_prefix=mode),
            critic=CriticConfig(dtype="fp32", optim=OptimConfig(lr=1e-2), ppo_max_token_len_per_gpu=200),
            actor=make_actor(),
            response_length=16,
            total_steps=10,
            device=CPU,
        )
        given = replace(batch, values_T=critic.values(rows), returns_T=batch.advantages_T)
        results.append([critic.train(given) for _ in range(3)])
    for mine, theirs in zip(*results, strict=True):
        for name in ("critic/vf_loss", "critic/grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4)
        assert mine["critic/tokens"] < theirs["critic/tokens"]


def test_a_model_that_was_not_checked_computes_every_row_by_itself(directory: Path) -> None:
    model = ModelConfig(path=str(directory), parity_check=False)
    reference = SingleReference.create(model=model, ref=RefConfig(dtype="fp32"), temperature=1.0, device=CPU)
    assert not reference._network.shares_prefixes
