"""Policy and value losses against formulas written out again here, in numpy, one sequence at a time.

`now` is the logprob a gradient flows through; `still` is its value where the formula says that none does.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from treadle.algorithm.loss import LOSSES, ValueBatch, compute_policy_loss, compute_value_loss
from treadle.algorithm.metrics import merge_metrics, read_metrics
from treadle.algorithm.micro_batch import Denominator, LossOutput, MicroBatch
from treadle.algorithm.policy_losses import select_tokens
from treadle.config.training import (
    SEQUENCE_MEAN_LOSSES,
    ActorConfig,
    CriticConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
)

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOW, HIGH, BOUND, SCALE = 0.2, 0.3, 1.8, 12.0
NO_CORRECTION = RolloutCorrectionConfig()


@dataclass
class Sequence:
    now: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray
    entropy: np.ndarray
    mask: np.ndarray
    selected: np.ndarray


def make(seed: int, lengths: tuple[int, ...] = (6, 1, 9, 3, 4, 2)) -> list[Sequence]:
    """Ratios well beyond the clip range on both sides; observations; one sequence with no sampled token."""
    rng = np.random.default_rng(seed)
    sequences = []
    for at, length in enumerate(lengths):
        now = -rng.exponential(2.0, size=length)
        mask = rng.random(length) < 0.75
        mask[0] = at != 3
        if at == 3:
            mask[:] = False
        near = [now + rng.normal(size=length) * size for size in (0.7, 0.5, 0.4)]
        advantages = rng.normal() + rng.normal(size=length) * 0.3
        sequences.append(Sequence(now, *near, advantages, rng.random(length) * 3, mask, rng.random(length) < 0.3))
    return sequences


def pack(sequences: list[Sequence]) -> MicroBatch:
    def flat(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(sequence, name) for sequence in sequences]))

    return MicroBatch(
        logprobs_T=flat("now").requires_grad_(),
        advantages_T=flat("advantages"),
        mask_T=flat("mask"),
        sequence_T=torch.tensor([at for at, sequence in enumerate(sequences) for _ in sequence.mask]),
        num_sequences=len(sequences),
        old_logprobs_T=flat("old"),
        rollout_logprobs_T=flat("rollout"),
        ref_logprobs_T=flat("ref"),
        entropy_T=flat("entropy").requires_grad_(),
        selected_T=flat("selected") & flat("mask"),
    )


def denominator(sequences: list[Sequence]) -> Denominator:
    return Denominator.of((int(sequence.mask.sum()) for sequence in sequences), SCALE)


def config(loss_mode: str, loss_agg_mode: str, **keys: float | bool | str) -> ActorConfig:
    return ActorConfig(
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=BOUND,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode, ppo_kl_coef=0.7, tau_pos=1.1, tau_neg=1.6),
        loss_agg_mode=loss_agg_mode,
        **keys,
    )


def aggregate(rows: list[np.ndarray], mode: str) -> float:
    """Each row holds the losses of one sequence's sampled tokens; empty rows are no sequences."""
    rows = [row for row in rows if len(row)]
    if mode == "token-mean":
        return np.concatenate(rows).sum() / sum(len(row) for row in rows)
    if mode == "seq-mean-token-mean":
        return float(np.mean([row.mean() for row in rows]))
    return float(np.mean([row.sum() for row in rows])) / (SCALE if mode.endswith("norm") else 1.0)


def vanilla(now: np.ndarray, still: np.ndarray, old: np.ndarray, a: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    out = np.empty(len(now))
    for t in range(len(now)):
        ratio = np.exp(now[t] - old[t])
        out[t] = -min(ratio * a[t], np.clip(ratio, 1 - LOW, 1 + HIGH) * a[t])
        if a[t] < 0:
            out[t] = min(out[t], -BOUND * a[t])
    return out


def gspo(now: np.ndarray, still: np.ndarray, old: np.ndarray, a: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    ratio = np.prod(np.exp(still - old)) ** (1 / max(1, len(now))) * np.exp(now - still)
    return -np.minimum(ratio * a, np.clip(ratio, 1 - LOW, 1 + HIGH) * a)


def cispo(now: np.ndarray, still: np.ndarray, old: np.ndarray, a: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return -np.clip(np.exp(still - old), 1 - LOW, 1 + HIGH) * a * now


def sapo(now: np.ndarray, still: np.ndarray, old: np.ndarray, a: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    out = np.empty(len(now))
    for t in range(len(now)):
        tau = 1.1 if a[t] > 0 else 1.6
        out[t] = -a[t] * (4 / tau) / (1 + np.exp(-tau * (np.exp(now[t] - old[t]) - 1)))
    return out


def dppo_tv(now: np.ndarray, still: np.ndarray, old: np.ndarray, a: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    out = np.zeros(len(now))
    for t in range(len(now)):
        moved = np.exp(still[t]) - np.exp(old[t])
        if not (moved > HIGH if a[t] > 0 else -moved > LOW):
            out[t] = -a[t] * min(np.exp(still[t] - old[t]), BOUND) * now[t]
    return out


def dppo_kl(now: np.ndarray, still: np.ndarray, old: np.ndarray, a: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    out = np.zeros(len(now))
    for t in range(len(now)):
        p, q = np.exp(still[t]), np.exp(old[t])
        divergence = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
        away = (p > q and divergence > HIGH) if a[t] > 0 else (p < q and divergence > LOW)
        out[t] = 0.0 if away else -a[t] * min(p / q, BOUND) * now[t]
    return out


def gpg(now: np.ndarray, still: np.ndarray, old: np.ndarray, a: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return -a * now


def geo_mean(now: np.ndarray, still: np.ndarray, old: np.ndarray, a: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    logs = []
    for t in range(len(now)):
        log = now[t] - old[t]
        logs.append(min(log, HIGH) if a[t] >= 0 else max(log, -LOW))
    return -a * np.exp(np.mean(logs)) if logs else np.empty(0)


def kl_cov(now: np.ndarray, still: np.ndarray, old: np.ndarray, a: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return -np.exp(now - old) * a + 0.7 * chosen * np.abs(now - old)


def clip_cov(now: np.ndarray, still: np.ndarray, old: np.ndarray, a: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    ratio = np.exp(now - old)
    return np.where(chosen, 0.0, -np.minimum(ratio * a, np.clip(ratio, 1 - LOW, 1 + HIGH) * a))


FORMULAS = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "gpg": gpg,
    "geo_mean": geo_mean,
    "kl_cov": kl_cov,
    "clip_cov": clip_cov,
}


def reference(name: str, sequences: list[Sequence], mode: str, now: list[np.ndarray]) -> float:
    rows = []
    for sequence, moved in zip(sequences, now, strict=True):
        m = sequence.mask
        parts = (moved, sequence.now, sequence.old, sequence.advantages, sequence.selected)
        rows.append(FORMULAS[name](*(part[m] for part in parts)))
    return aggregate(rows, "seq-mean-token-mean" if name in SEQUENCE_MEAN_LOSSES else mode)


def slopes(function: Callable[[list[np.ndarray]], float], at: list[np.ndarray]) -> np.ndarray:
    """Central differences by every token."""
    out, step = [], 1e-6
    for s, row in enumerate(at):
        for t in range(len(row)):
            ends = []
            for sign in (1, -1):
                moved = [values.copy() for values in at]
                moved[s][t] += sign * step
                ends.append(function(moved))
            out.append((ends[0] - ends[1]) / (2 * step))
    return np.array(out)


def gradient(of: torch.Tensor) -> np.ndarray:
    assert of.grad is not None
    return of.grad.numpy()


def share(
    sequences: list[Sequence],
    over: Denominator,
    actor: ActorConfig,
    correction: RolloutCorrectionConfig = NO_CORRECTION,
) -> tuple[LossOutput, MicroBatch]:
    batch = pack(sequences)
    output = compute_policy_loss(batch, over, actor, correction)
    output.loss.backward()
    return output, batch


def test_every_loss_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(LOSSES)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_equal_the_formula(name: str, mode: str) -> None:
    sequences = make(1)
    output, batch = share(sequences, denominator(sequences), config(name, mode))
    now = [sequence.now for sequence in sequences]
    assert output.loss.item() == pytest.approx(reference(name, sequences, mode, now), abs=1e-12)
    expected = slopes(lambda moved: reference(name, sequences, mode, moved), now)
    np.testing.assert_allclose(gradient(batch.logprobs_T), expected, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_of_a_mini_batch_gives_the_same_loss_gradient_and_metrics(name: str, mode: str) -> None:
    sequences = make(2)
    actor = config(name, mode, use_kl_loss=True, kl_loss_coef=0.3, entropy_coeff=0.1)
    correction = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="token", rollout_rs_threshold=1.9)
    whole, batch = share(sequences, denominator(sequences), actor, correction)
    for cuts in ([1], [2, 5], [1, 2, 3, 4, 5], [3, 4]):
        parts = [sequences[a:b] for a, b in zip([0, *cuts], [*cuts, len(sequences)], strict=True)]
        shares = [share(part, denominator(sequences), actor, correction) for part in parts]
        assert sum(output.loss.item() for output, _ in shares) == pytest.approx(whole.loss.item(), rel=1e-13, abs=1e-14)
        gradients = np.concatenate([gradient(part.logprobs_T) for _, part in shares])
        np.testing.assert_allclose(gradients, gradient(batch.logprobs_T), rtol=1e-13, atol=1e-15)
        together = read_metrics(merge_metrics([output.metrics for output, _ in shares]))
        assert together == pytest.approx(read_metrics(whole.metrics), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("estimator", ["k1", "k1+", "k2", "k3", "k3+"])
def test_kl_and_entropy_are_added_to_the_loss(estimator: str, mode: str) -> None:
    sequences = make(3)
    terms = {"use_kl_loss": True, "kl_loss_type": estimator, "kl_loss_coef": 0.5, "entropy_coeff": 0.25}
    output, batch = share(sequences, denominator(sequences), config("vanilla", mode, **terms))
    kl = []
    for sequence in sequences:
        d = (sequence.now - sequence.ref)[sequence.mask]
        kl.append({"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[estimator.removesuffix("+")])
    entropy = aggregate([sequence.entropy[sequence.mask] for sequence in sequences], mode)
    plain = reference("vanilla", sequences, mode, [sequence.now for sequence in sequences])
    expected = plain + 0.5 * aggregate(kl, mode) - 0.25 * entropy
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)
    assert batch.entropy_T is not None
    weights = aggregate([np.ones(int(sequence.mask.sum())) for sequence in sequences], mode)
    assert gradient(batch.entropy_T).sum() == pytest.approx(-0.25 * weights)


def test_metrics_say_how_far_the_policy_moved_and_how_much_was_clipped() -> None:
    sequences = make(4)
    measured = read_metrics(share(sequences, denominator(sequences), config("vanilla", "token-mean"))[0].metrics)
    log = np.concatenate([(sequence.now - sequence.old)[sequence.mask] for sequence in sequences])
    a = np.concatenate([sequence.advantages[sequence.mask] for sequence in sequences])
    entropy = np.concatenate([sequence.entropy[sequence.mask] for sequence in sequences])
    ratio = np.exp(log)
    clipped = np.where(a > 0, ratio > 1 + HIGH, ratio < 1 - LOW)
    assert measured["actor/pg_clipfrac"] == pytest.approx(clipped.mean())
    assert measured["actor/pg_clipfrac_lower"] == pytest.approx(((a < 0) & (ratio > BOUND)).mean())
    assert measured["actor/ppo_kl"] == pytest.approx(-log.mean())
    assert measured["actor/ratio_mean"] == pytest.approx(ratio.mean())
    assert measured["actor/ratio_max"] == pytest.approx(ratio.max())
    assert measured["actor/entropy"] == pytest.approx(entropy.mean())


def chosen_of(sequences: list[Sequence], policy_loss: PolicyLossConfig, seed: int = 0) -> np.ndarray:
    batch = pack(sequences)
    assert batch.old_logprobs_T is not None
    found = select_tokens(batch.old_logprobs_T, batch.advantages_T, batch.mask_T, policy_loss, seed)
    assert found is not None and not (found & ~batch.mask_T).any()
    return np.flatnonzero(found.numpy())


def covariances(sequences: list[Sequence]) -> np.ndarray:
    """Of every token of the mini batch, -inf where it was not sampled."""
    mask = np.concatenate([sequence.mask for sequence in sequences])
    old = np.concatenate([sequence.old for sequence in sequences])
    a = np.concatenate([sequence.advantages for sequence in sequences])
    return np.where(mask, (old - old[mask].mean()) * (a - a[mask].mean()), -np.inf)


def test_kl_cov_selects_the_largest_covariances_of_the_mini_batch() -> None:
    sequences = make(5)
    covariance = covariances(sequences)
    count = int(0.3 * np.isfinite(covariance).sum())
    chosen = chosen_of(sequences, PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.3))
    assert set(chosen) == set(np.argsort(covariance)[::-1][:count])


def test_clip_cov_draws_by_seed_from_the_covariances_within_bounds() -> None:
    sequences = make(6, lengths=(40, 50, 60))
    policy_loss = PolicyLossConfig(loss_mode="clip_cov", clip_cov_ratio=0.1, clip_cov_lb=0.1, clip_cov_ub=3.0)
    covariance = covariances(sequences)
    candidates = set(np.flatnonzero((covariance > 0.1) & (covariance < 3.0)))
    first, again, other = (set(chosen_of(sequences, policy_loss, seed)) for seed in (0, 0, 1))
    assert len(first) == int(0.1 * np.isfinite(covariance).sum()) < len(candidates)
    assert first == again and first != other
    assert first | other <= candidates


@pytest.mark.parametrize("mode", MODES)
def test_the_value_loss_equals_its_formula_in_any_split(mode: str) -> None:
    sequences, critic = make(7), CriticConfig(cliprange_value=0.3, loss_agg_mode=mode)
    rows, clipped = [], []
    for sequence in sequences:
        v, old, back = (part[sequence.mask] for part in (sequence.now, sequence.old, sequence.ref))
        plain, near = (v - back) ** 2, (np.clip(v, old - 0.3, old + 0.3) - back) ** 2
        rows.append(np.maximum(plain, near) / 2)
        clipped.append(near > plain)

    def value_share(part: list[Sequence]) -> LossOutput:
        batch = pack(part)
        assert batch.old_logprobs_T is not None and batch.ref_logprobs_T is not None
        values = ValueBatch(
            batch.logprobs_T,
            batch.old_logprobs_T,
            batch.ref_logprobs_T,
            batch.mask_T,
            batch.sequence_T,
            batch.num_sequences,
        )
        return compute_value_loss(values, denominator(sequences), critic)

    shares = [value_share(sequences[:2]), value_share(sequences[2:])]
    assert value_share(sequences).loss.item() == pytest.approx(aggregate(rows, mode), abs=1e-12)
    assert sum(output.loss.item() for output in shares) == pytest.approx(aggregate(rows, mode), abs=1e-12)
    measured = read_metrics(merge_metrics([output.metrics for output in shares]))
    assert measured["critic/vf_clipfrac"] == pytest.approx(np.concatenate(clipped).mean())


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_on_unsampled_tokens_never_matters(name: str) -> None:
    sequences = make(8)
    actor = config(name, "token-mean", use_kl_loss=True, entropy_coeff=0.1)
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_rs="geometric")
    clean = share(sequences, denominator(sequences), actor, correction)
    spoilt = [
        replace(
            sequence,
            **{
                part.name: np.where(sequence.mask, getattr(sequence, part.name), np.nan)
                for part in fields(sequence)
                if part.name not in ("mask", "selected")
            },
        )
        for sequence in sequences
    ]
    dirty = share(spoilt, denominator(sequences), actor, correction)
    assert dirty[0].loss.item() == clean[0].loss.item()
    np.testing.assert_array_equal(gradient(dirty[1].logprobs_T), gradient(clean[1].logprobs_T))
    assert read_metrics(dirty[0].metrics) == read_metrics(clean[0].metrics)
