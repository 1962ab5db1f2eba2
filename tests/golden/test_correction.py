"""Off-policy correction against formulas written out again here, in numpy, one sequence at a time."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from treadle.algorithm.loss import compute_policy_loss
from treadle.algorithm.metrics import merge_metrics, read_metrics
from treadle.algorithm.micro_batch import Denominator, LossOutput, MicroBatch
from treadle.algorithm.rollout_correction import RolloutCorrection, correct_rollout
from treadle.config.training import ActorConfig, PolicyLossConfig, RolloutCorrectionConfig


@dataclass
class Sequence:
    now: np.ndarray
    old: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray


def make(seed: int = 0) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    sequences = []
    for length in (4, 9, 1, 6, 12, 3, 2):
        old = -rng.exponential(2.0, size=length)
        rollout, now = old + rng.normal(size=length) * 0.5, old + rng.normal(size=length) * 0.3
        mask = rng.random(length) < 0.8
        mask[-1] = length != 3
        sequences.append(Sequence(now, old, rollout, np.full(length, rng.normal()), mask & (length != 3)))
    return sequences


def flat(sequences: list[Sequence], name: str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([getattr(sequence, name) for sequence in sequences]))


def index(sequences: list[Sequence]) -> torch.Tensor:
    return torch.tensor([at for at, sequence in enumerate(sequences) for _ in sequence.mask])


def run(sequences: list[Sequence], rollout_correction: RolloutCorrectionConfig) -> RolloutCorrection:
    old, rollout, mask = (flat(sequences, name) for name in ("old", "rollout", "mask"))
    return correct_rollout(old, rollout, mask, index(sequences), len(sequences), rollout_correction)


@pytest.mark.parametrize("level", ["token", "sequence", "none", None])
def test_weights_are_truncated_ratios(level: str | None) -> None:
    sequences = make()
    expected = []
    for sequence in sequences:
        ratio = np.exp(sequence.old - sequence.rollout)
        if level == "sequence":
            ratio = np.full(len(ratio), np.prod(ratio[sequence.mask]))
        expected.append(np.minimum(ratio, 1.3) if level in ("token", "sequence") else np.ones(len(ratio)))
    found = run(sequences, RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=1.3))
    mask = flat(sequences, "mask").numpy()
    np.testing.assert_allclose(found.weights_T.numpy()[mask], np.concatenate(expected)[mask], atol=1e-12)
    assert found.keep_T.equal(flat(sequences, "mask"))


def keeps(sequence: Sequence, level: str, lower: float, upper: float) -> np.ndarray:
    ratio = np.exp(sequence.old - sequence.rollout)
    sampled = ratio[sequence.mask]
    if level == "sequence":
        ratio = np.full(len(ratio), np.prod(sampled))
    elif level == "geometric" and len(sampled):
        ratio = np.full(len(ratio), np.prod(sampled) ** (1 / len(sampled)))
    return sequence.mask & (ratio >= lower) & (ratio <= upper)


@pytest.mark.parametrize("lower", [None, 0.9])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_rejection_has_two_bounds(level: str, lower: float | None) -> None:
    sequences = make(1)
    chosen = RolloutCorrectionConfig(rollout_rs=level, rollout_rs_threshold=1.25, rollout_rs_threshold_lower=lower)
    expected = [keeps(sequence, level, lower or 0.8, 1.25) for sequence in sequences]
    found = run(sequences, chosen)
    np.testing.assert_array_equal(found.keep_T.numpy(), np.concatenate(expected))
    measured = read_metrics(found.metrics)
    gone = [sequence.mask & ~keep for sequence, keep in zip(sequences, expected, strict=True)]
    tokens = sum(sequence.mask.sum() for sequence in sequences)
    assert 0 < sum(row.sum() for row in gone) < tokens
    assert measured["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(sum(r.sum() for r in gone) / tokens)
    hit = [row.any() for row, sequence in zip(gone, sequences, strict=True) if sequence.mask.any()]
    assert measured["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(np.mean(hit))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_show_how_far_apart_the_policies_are(level: str) -> None:
    sequences = make(2)
    found = read_metrics(run(sequences, RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=1.2)).metrics)
    logs = [(sequence.old - sequence.rollout)[sequence.mask] for sequence in sequences if sequence.mask.any()]
    tokens = np.concatenate(logs)
    ratios = np.exp(tokens if level == "token" else np.array([log.sum() for log in logs]))
    weights = np.minimum(ratios, 1.2)
    expected = {
        "kl": -tokens.mean(),
        "k3_kl": (np.exp(tokens) - 1 - tokens).mean(),
        "logprob_abs_diff": np.abs(tokens).mean(),
        "logprob_abs_diff_max": np.abs(tokens).max(),
        "rollout_is_mean": weights.mean(),
        "rollout_is_max": ratios.max(),
        "rollout_is_eff_sample_size": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
        "rollout_is_ratio_fraction_high": (ratios > 1.2).mean(),
        "rollout_is_ratio_fraction_low": (ratios < 1 / 1.2).mean(),
        "rollout_rs_masked_fraction": 0.0,
        "rollout_rs_seq_masked_fraction": 0.0,
    }
    assert found == pytest.approx({f"rollout_corr/{name}": value for name, value in expected.items()})
    assert expected["rollout_is_ratio_fraction_high"] > 0 and expected["rollout_is_ratio_fraction_low"] > 0


def test_every_asynchronous_choice_reports_divergence_effective_samples_and_clip_fractions() -> None:
    """Also where nothing is corrected, so that a person sees whether it should be."""
    wanted = {
        "kl",
        "k3_kl",
        "rollout_is_eff_sample_size",
        "rollout_is_ratio_fraction_high",
        "rollout_rs_masked_fraction",
    }
    for chosen in (
        RolloutCorrectionConfig(rollout_is="none"),
        RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="geometric", rollout_rs_threshold=1.2),
        RolloutCorrectionConfig(rollout_is="token", bypass_mode=True),
    ):
        measured = read_metrics(output_of(make(8), "vanilla", chosen).metrics)
        assert {f"rollout_corr/{name}" for name in wanted} <= measured.keys()
        assert {"actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"} <= measured.keys()
        assert 0 < measured["rollout_corr/rollout_is_eff_sample_size"] < 1
        assert measured["actor/pg_clipfrac"] > 0


def test_samples_of_the_policy_itself_are_worth_all_of_themselves() -> None:
    sequences = [replace(sequence, rollout=sequence.old) for sequence in make(9)]
    measured = read_metrics(run(sequences, RolloutCorrectionConfig(rollout_is="token")).metrics)
    assert measured["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1)
    assert measured["rollout_corr/k3_kl"] == pytest.approx(0, abs=1e-12)


def test_rejected_samples_are_worth_nothing() -> None:
    sequences = make(3)
    chosen = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token", rollout_rs_threshold=1.25)
    weights = []
    for sequence in sequences:
        ratio = np.exp(sequence.old - sequence.rollout)
        weights.append((np.minimum(ratio, 2.0) * keeps(sequence, "token", 0.8, 1.25))[sequence.mask])
    flat_weights = np.concatenate(weights)
    worth = flat_weights.sum() ** 2 / (len(flat_weights) * (flat_weights**2).sum())
    assert read_metrics(run(sequences, chosen).metrics)["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(
        worth
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_of_micro_batches_merge_to_those_of_the_batch(level: str) -> None:
    sequences = make(4)
    chosen = RolloutCorrectionConfig(rollout_is=level, rollout_rs="geometric", rollout_rs_threshold=1.1)
    parts = [run(part, chosen).metrics for part in (sequences[:1], sequences[1:4], sequences[4:])]
    assert read_metrics(merge_metrics(parts)) == pytest.approx(read_metrics(run(sequences, chosen).metrics))


def ppo(ratio: np.ndarray, a: np.ndarray) -> np.ndarray:
    loss = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
    return np.where(a < 0, np.minimum(loss, -3 * a), loss)


def loss_of(sequences: list[Sequence], loss_mode: str, rollout_correction: RolloutCorrectionConfig) -> float:
    return output_of(sequences, loss_mode, rollout_correction).loss.item()


def output_of(sequences: list[Sequence], loss_mode: str, rollout_correction: RolloutCorrectionConfig) -> LossOutput:
    batch = MicroBatch(
        logprobs_T=flat(sequences, "now"),
        advantages_T=flat(sequences, "advantages"),
        mask_T=flat(sequences, "mask"),
        sequence_T=index(sequences),
        num_sequences=len(sequences),
        old_logprobs_T=None if rollout_correction.bypass_mode else flat(sequences, "old"),
        rollout_logprobs_T=flat(sequences, "rollout"),
    )
    over = Denominator.of(int(sequence.mask.sum()) for sequence in sequences)
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode))
    return compute_policy_loss(batch, over, actor, rollout_correction)


def test_decoupled_ppo_clips_against_the_proximal_policy_and_weighs_by_the_behaviour_policy() -> None:
    sequences = make(5)
    chosen = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=1.4, rollout_rs="geometric", rollout_rs_threshold=1.3
    )
    total, tokens = 0.0, 0
    for sequence in sequences:
        m = keeps(sequence, "geometric", 1 / 1.3, 1.3)
        weight = np.minimum(np.exp(sequence.old - sequence.rollout), 1.4)
        total += (weight * ppo(np.exp(sequence.now - sequence.old), sequence.advantages))[m].sum()
        tokens += sequence.mask.sum()
    assert loss_of(sequences, "vanilla", chosen) == pytest.approx(total / tokens, abs=1e-12)


def test_bypass_clips_against_the_behaviour_policy_and_weighs_nothing_twice() -> None:
    sequences = make(6)
    total, tokens = 0.0, 0
    for sequence in sequences:
        ratio = np.exp(sequence.now - sequence.rollout)
        m = sequence.mask & (ratio >= 1 / 1.5) & (ratio <= 1.5)
        total += ppo(ratio, sequence.advantages)[m].sum()
        tokens += sequence.mask.sum()
    chosen = RolloutCorrectionConfig(bypass_mode=True, rollout_is="token", rollout_rs="token", rollout_rs_threshold=1.5)
    assert loss_of(sequences, "vanilla", chosen) == pytest.approx(total / tokens, abs=1e-12)


def test_bypass_weighs_a_loss_that_has_no_ratio() -> None:
    sequences = make(7)
    total, tokens = 0.0, 0
    for sequence in sequences:
        weight = np.minimum(np.exp(sequence.now - sequence.rollout), 1.4)
        total += (-weight * sequence.advantages * sequence.now)[sequence.mask].sum()
        tokens += sequence.mask.sum()
    chosen = RolloutCorrectionConfig(bypass_mode=True, rollout_is="token", rollout_is_threshold=1.4)
    assert loss_of(sequences, "gpg", chosen) == pytest.approx(total / tokens, abs=1e-12)


def test_weights_divide_by_the_distribution_sampled_from_and_differences_compare_the_whole_softmax() -> None:
    """By enumeration: under top-p, the weighted mean of any function is the policy's over what may be sampled."""
    policy = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.double)
    kept = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.double)
    drawn = policy * kept / (policy * kept).sum()
    tokens = torch.tensor([0, 1])
    logs = policy.log()[tokens]
    found = correct_rollout(
        logs,
        logs,
        torch.ones(2, dtype=torch.bool),
        torch.tensor([0, 1]),
        2,
        RolloutCorrectionConfig(rollout_is="token", rollout_rs="token", rollout_rs_threshold=1.01),
        processed_logprobs_T=drawn.log()[tokens],
    )
    value = torch.tensor([3.0, -1.0], dtype=torch.double)
    expected = (policy[tokens] * value).sum()
    assert (drawn[tokens] * found.weights_T * value).sum().item() == pytest.approx(expected.item())
    assert found.keep_T.all(), "what truncation does is no reason to reject"
    figures = read_metrics(found.metrics)
    assert figures["rollout_corr/k3_kl"] == 0.0
    assert figures["rollout_corr/processed_kl"] == pytest.approx(-np.log(0.8))
