"""One step of the policy against a plain one: padded, unpacked, whole logits, written out with none of our parts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.policies import make_groups, make_policy, save_tiny_model
from treadle.algorithm.advantage_inputs import rows_of
from treadle.config.training import AlgorithmConfig, OptimConfig, TrainerConfig
from treadle.trainer.step import StepParts, train_step
from treadle.types import Group, Outcome, StopReason

LR = 1e-3
CLIP = 0.7


@dataclass(frozen=True)
class Padded:
    ids: Tensor
    attention: Tensor
    mask: Tensor
    """1 on sampled tokens."""
    advantages: Tensor


def pad(groups: Sequence[Group]) -> Padded:
    """Right-padded, with each row's advantage from its group's mean and deviation."""
    samples = [
        (group, trajectory, row) for group in groups for trajectory in group.trajectories for row in trajectory.rows
    ]
    width = max(len(row.prompt_ids) + len(row.ids) for _, _, row in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    attention, mask, advantages = torch.zeros_like(ids), torch.zeros(ids.shape), torch.zeros(len(samples), 1)
    for at, (group, trajectory, row) in enumerate(samples):
        tokens, prompt = [*row.prompt_ids, *row.ids], len(row.prompt_ids)
        ids[at, : len(tokens)] = torch.tensor(tokens)
        attention[at, : len(tokens)] = 1
        mask[at, prompt : len(tokens)] = torch.tensor(row.mask, dtype=torch.float32)
        rewards = torch.tensor([sibling.reward.value for sibling in group.trajectories])
        advantages[at] = (trajectory.reward.value - rewards.mean()) / (rewards.std() + 1e-6)
    return Padded(ids, attention, mask, advantages)


def plain_loss(model: LlamaForCausalLM, batch: Padded, mode: str, temperature: float) -> Tensor:
    logits = model(input_ids=batch.ids, attention_mask=batch.attention).logits[:, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(2, batch.ids[:, 1:, None])[:, :, 0]
    mask = batch.mask[:, 1:]
    ratio = (logprobs - logprobs.detach()).exp()
    losses = -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    if mode == "token-mean":
        return (losses * mask).sum() / mask.sum()
    return (losses * mask).sum(1).mean()


def plain_step(directory: Path, batch: Padded, mode: str, temperature: float) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient norm and weights after one step."""
    model = LlamaForCausalLM.from_pretrained(directory, attn_implementation="eager")
    loss = plain_loss(model, batch, mode, temperature)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, foreach=False).step()
    return loss.item(), norm.item(), {name: weight.detach() for name, weight in model.named_parameters()}


def treadle_step(
    directory: Path, groups: Sequence[Group], mode: str, algorithm: AlgorithmConfig | None = None, **keys: object
) -> tuple[float, float, dict[str, Tensor]]:
    optim = OptimConfig(lr=LR, weight_decay=0.01)
    policy = make_policy(directory, loss_agg_mode=mode, grad_clip=CLIP, optim=optim, **keys)
    parts = StepParts(policy, policy._actor, algorithm or AlgorithmConfig(), TrainerConfig())
    metrics = train_step(parts, groups, step=1).metrics
    return metrics["actor/pg_loss"], metrics["actor/grad_norm"], dict(policy.tensors())


def largest_gap(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max((mine[name] - theirs[name]).abs().max().item() for name in mine)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=request.param)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_a_step_equals_a_plain_padded_one(directory: Path, mode: str, temperature: float) -> None:
    groups = make_groups(3, num_groups=3, forks=2)
    loss, norm, weights = treadle_step(directory, groups, mode, temperature=temperature)
    plain = plain_step(directory, pad(groups), mode, temperature)
    assert loss == pytest.approx(plain[0], abs=1e-6)
    assert norm == pytest.approx(plain[1], rel=1e-5)
    assert largest_gap(weights, plain[2]) < 1e-6


def cut_off(group: Group, samples: Sequence[int]) -> Group:
    ended = Outcome.ended(StopReason.LENGTH)
    return replace(
        group,
        trajectories=tuple(replace(t, outcome=ended) if t.sample in samples else t for t in group.trajectories),
    )


@pytest.mark.parametrize("budget", [10_000, 45])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_masked_truncated_answers_count_in_the_baseline_and_in_no_mean_of_the_loss(
    directory: Path, mode: str, budget: int
) -> None:
    """DAPO's overlong filtering: advantages of whole groups, then a batch in which the cut answers do not occur."""
    first, second, third = make_groups(3, num_groups=3, forks=2)
    groups = [cut_off(first, [0, 2]), cut_off(second, [0, 1, 2, 3]), third]  # rows: five, five and five
    batch = pad(groups)
    kept = torch.tensor(
        [t.outcome.reason is not StopReason.LENGTH for group in groups for t in group.trajectories for _ in t.rows]
    )
    batch = Padded(*(getattr(batch, field.name)[kept] for field in fields(batch)))
    plain = plain_step(directory, batch, mode, 1.0)
    algorithm = AlgorithmConfig(mask_truncated=True)
    loss, norm, weights = treadle_step(directory, groups, mode, algorithm, ppo_max_token_len_per_gpu=budget)
    assert loss == pytest.approx(plain[0], abs=1e-6)
    assert norm == pytest.approx(plain[1], rel=1e-5)
    assert largest_gap(weights, plain[2]) < 1e-6
    assert largest_gap(weights, treadle_step(directory, groups, mode)[2]) > 1e-5, "without it, they would train"


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("budget", [24, 45, 100])
def test_micro_batches_change_nothing(directory: Path, mode: str, budget: int) -> None:
    groups = make_groups(4, num_groups=3, forks=2)
    whole = treadle_step(directory, groups, mode)
    split = treadle_step(directory, groups, mode, ppo_max_token_len_per_gpu=budget)
    assert sum(len(row.prompt_ids) + len(row.ids) for row in rows_of(groups)) > budget
    assert split[0] == pytest.approx(whole[0], abs=1e-7)
    assert largest_gap(split[2], whole[2]) < 1e-6


def test_recomputing_activations_changes_nothing(directory: Path) -> None:
    groups = make_groups(5)
    stored = treadle_step(directory, groups, "token-mean")
    again = treadle_step(directory, groups, "token-mean", recompute=True)
    assert again[0] == stored[0]
    assert largest_gap(again[2], stored[2]) == 0
