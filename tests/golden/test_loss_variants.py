"""Variants of losses against formulas written out again here, and what must hold for every loss whatever it is fed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden.test_losses import (
    BOUND,
    HIGH,
    LOW,
    MODES,
    Sequence,
    aggregate,
    config,
    denominator,
    gradient,
    make,
    pack,
    share,
    slopes,
)
from treadle.algorithm.loss import LOSSES, compute_policy_loss
from treadle.algorithm.metrics import read_metrics
from treadle.algorithm.micro_batch import Denominator
from treadle.algorithm.rollout_correction import correct_rollout, off_policy_mask
from treadle.config.training import SEQUENCE_MEAN_LOSSES, ActorConfig, PolicyLossConfig, RolloutCorrectionConfig

LEVELS = ["none", "token", "sequence", "geometric"]


def rows_of(sequences: list[Sequence], values: list[np.ndarray]) -> list[np.ndarray]:
    return [value[sequence.mask] for sequence, value in zip(sequences, values, strict=True)]


def test_the_bound_of_dual_clipping_is_the_delta_of_two_sided_clipping() -> None:
    """TRL: min(min(ratio, delta) A, clip(ratio) A), for delta above the clip range, loss and gradient."""
    sequences = make(4, lengths=(30, 20, 25))

    def two_sided(moved: list[np.ndarray]) -> float:
        rows = []
        for sequence, logprobs in zip(sequences, moved, strict=True):
            ratio, a = np.exp(logprobs - sequence.old), sequence.advantages
            rows.append(-np.minimum(np.minimum(ratio, BOUND) * a, np.clip(ratio, 1 - LOW, 1 + HIGH) * a))
        return aggregate(rows_of(sequences, rows), "token-mean")

    now = [sequence.now for sequence in sequences]
    output, batch = share(sequences, denominator(sequences), config("vanilla", "token-mean"))
    assert output.loss.item() == pytest.approx(two_sided(now), abs=1e-12)
    np.testing.assert_allclose(gradient(batch.logprobs_T), slopes(two_sided, now), atol=1e-7)
    assert read_metrics(output.metrics)["actor/pg_clipfrac_lower"] > 0


def test_dual_clipping_can_be_left_out() -> None:
    sequences = make(4, lengths=(30, 20, 25))
    actor = ActorConfig(clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=None)
    rows = []
    for sequence in sequences:
        ratio, a = np.exp(sequence.now - sequence.old), sequence.advantages
        rows.append(-np.minimum(ratio * a, np.clip(ratio, 1 - LOW, 1 + HIGH) * a))
    output, _ = share(sequences, denominator(sequences), actor)
    assert output.loss.item() == pytest.approx(aggregate(rows_of(sequences, rows), "token-mean"), abs=1e-12)
    assert (
        output.loss.item() != share(sequences, denominator(sequences), config("vanilla", "token-mean"))[0].loss.item()
    )


@pytest.mark.parametrize("largest", [0.9, 1.5, 5.0])
def test_cispo_with_an_absolute_bound_clips_from_above_alone(largest: float) -> None:
    """MiniMax-M1 and ScaleRL: sg(min(ratio, bound)) A log p, over all tokens."""
    sequences = make(12, lengths=(30, 20))
    policy_loss = PolicyLossConfig(loss_mode="cispo", cispo_max_ratio=largest)
    output, batch = share(sequences, denominator(sequences), ActorConfig(policy_loss=policy_loss))
    weights = [np.minimum(np.exp(sequence.now - sequence.old), largest) for sequence in sequences]
    pairs = list(zip(sequences, weights, strict=True))
    losses = [-weight * sequence.advantages * sequence.now for sequence, weight in pairs]
    assert output.loss.item() == pytest.approx(aggregate(rows_of(sequences, losses), "token-mean"), abs=1e-12)
    num_tokens = sum(int(sequence.mask.sum()) for sequence in sequences)
    expected = np.concatenate([-weight * sequence.advantages * sequence.mask for sequence, weight in pairs])
    np.testing.assert_allclose(gradient(batch.logprobs_T), expected / num_tokens, atol=1e-12)


def test_sapo_closes_its_gate_faster_for_negative_advantages() -> None:
    """The slope is 4 s (1 - s) of the sigmoid s: 1 at ratio 1, below it elsewhere."""
    ratio = np.array([0.25, 1.0, 4.0])
    for sign, tau in ((1.0, 1.0), (-1.0, 1.05)):
        now = np.log(ratio) - 3
        one = replace(make(0, lengths=(3,))[0], now=now, old=np.full(3, -3.0), advantages=np.full(3, sign))
        one = replace(one, mask=np.ones(3, dtype=bool))
        batch = share([one], denominator([one]), ActorConfig(policy_loss=PolicyLossConfig(loss_mode="sapo")))[1]
        s = 1 / (1 + np.exp(-tau * (ratio - 1)))
        np.testing.assert_allclose(gradient(batch.logprobs_T), -sign * ratio * 4 * s * (1 - s) / 3, atol=1e-12)


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("name", ["vanilla", "gpg"])
def test_the_off_policy_sequence_mask_equals_its_formula(name: str, bypass: bool) -> None:
    """DeepSeek-V3.2: no policy term where A < 0 and the sequence's mean log(sampler / policy) is above a threshold."""
    sequences = make(13, lengths=(8, 5, 9, 3, 7, 6, 8, 4))
    for at, sequence in enumerate(sequences):
        sequence.advantages = np.full(len(sequence.now), (-1.0) ** (at // 2))
        sequence.rollout = sequence.now + (0.4 if at % 2 else -0.4)
    keys = {"use_kl_loss": True, "kl_loss_coef": 0.5}
    chosen = RolloutCorrectionConfig(off_policy_mask_threshold=0.3, bypass_mode=bypass)
    actor = config(name, "token-mean", **keys)
    output, _ = share(sequences, denominator(sequences), actor, chosen)
    silent = []
    for sequence in sequences:
        gap = (sequence.rollout - sequence.now)[sequence.mask].mean() if sequence.mask.any() else 0.0
        masked = sequence.advantages[0] < 0 and gap > 0.3
        silent.append(replace(sequence, advantages=sequence.advantages * (not masked)))
    plain, _ = share(silent, denominator(sequences), actor, RolloutCorrectionConfig(bypass_mode=bypass))
    assert output.loss.item() == pytest.approx(plain.loss.item(), abs=1e-12)
    fraction = sequences[7].mask.sum() / sum(sequence.mask.sum() for sequence in sequences)
    assert read_metrics(output.metrics)["rollout_corr/off_policy_masked_fraction"] == pytest.approx(fraction)
    assert fraction > 0


@pytest.mark.parametrize("name", SEQUENCE_MEAN_LOSSES)
@pytest.mark.parametrize("mode", MODES)
def test_losses_of_sequences_weigh_a_short_one_as_much_as_a_long_one(name: str, mode: str) -> None:
    short, long = make(14, lengths=(10, 990))
    parts = [replace(part, mask=np.ones(len(part.now), dtype=bool), old=part.now) for part in (short, long)]
    parts = [replace(part, advantages=np.ones(len(part.now))) for part in parts]
    batch = share(parts, denominator(parts), config(name, mode))[1]
    slope = gradient(batch.logprobs_T)
    assert slope[:10].sum() == pytest.approx(-0.5) and slope[10:].sum() == pytest.approx(-0.5)


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_a_rejected_token_has_no_part_in_the_ratio_of_its_sequence(name: str) -> None:
    """Whatever its own ratio is, and what others get is what they would without it."""
    one = make(15, lengths=(9,))[0]
    one = replace(one, mask=np.ones(9, dtype=bool), rollout=one.old.copy())
    one.rollout[4] -= 3
    chosen = RolloutCorrectionConfig(rollout_rs="token")
    slopes_of = []
    for moved in (0.0, 0.9):
        other = replace(one, now=np.where(np.arange(9) == 4, one.now + moved, one.now))
        slopes_of.append(
            gradient(share([other], denominator([other]), config(name, "token-mean"), chosen)[1].logprobs_T)
        )
    np.testing.assert_array_equal(slopes_of[0], slopes_of[1])
    assert slopes_of[0][4] == 0 and (np.delete(slopes_of[0], 4) != 0).any()


corrections = st.builds(
    RolloutCorrectionConfig,
    rollout_is=st.sampled_from(["none", "token", "sequence"]),
    rollout_rs=st.sampled_from(LEVELS),
    rollout_rs_threshold=st.floats(1.01, 2.0),
    off_policy_mask_threshold=st.none() | st.floats(0.001, 0.3),
    bypass_mode=st.booleans(),
)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), mode=st.sampled_from(MODES), chosen=corrections)
def test_rejected_and_masked_tokens_have_no_gradient(
    name: str, seed: int, mode: str, chosen: RolloutCorrectionConfig
) -> None:
    sequences = make(seed)
    batch = pack(sequences)
    actor = config(name, mode, use_kl_loss=True, kl_loss_coef=0.3, entropy_coeff=0.1)
    compute_policy_loss(batch, denominator(sequences), actor, chosen).loss.backward()
    assert batch.old_logprobs_T is not None and batch.rollout_logprobs_T is not None and batch.entropy_T is not None
    before_T = batch.logprobs_T.detach() if chosen.bypass_mode else batch.old_logprobs_T
    kept_T = correct_rollout(
        before_T, batch.rollout_logprobs_T, batch.mask_T, batch.sequence_T, batch.num_sequences, chosen
    ).keep_T
    for slope in (gradient(batch.logprobs_T), gradient(batch.entropy_T)):
        assert np.isfinite(slope).all() and (slope[~kept_T.numpy()] == 0).all()
    if chosen.off_policy_mask_threshold is not None:
        masked_T = off_policy_mask(
            batch.logprobs_T.detach(),
            batch.rollout_logprobs_T,
            batch.advantages_T,
            batch.mask_T,
            batch.sequence_T,
            batch.num_sequences,
            chosen.off_policy_mask_threshold,
        )
        alone = pack(sequences)
        compute_policy_loss(alone, denominator(sequences), config(name, mode), chosen).loss.backward()
        assert (gradient(alone.logprobs_T)[masked_T.numpy()] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    mode=st.sampled_from(MODES),
    chosen=corrections,
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=6),
    data=st.data(),
)
def test_splitting_a_micro_batch_changes_nothing_beyond_rounding(
    name: str, seed: int, mode: str, chosen: RolloutCorrectionConfig, lengths: list[int], data: st.DataObject
) -> None:
    sequences = make(seed, tuple(lengths))
    over: Denominator = denominator(sequences)
    cut = data.draw(st.integers(1, len(sequences) - 1))
    actor = config(name, mode, use_kl_loss=True, kl_loss_coef=0.3, entropy_coeff=0.1)
    whole, batch = share(sequences, over, actor, chosen)
    parts = [share(part, over, actor, chosen) for part in (sequences[:cut], sequences[cut:])]
    assert sum(output.loss.item() for output, _ in parts) == pytest.approx(whole.loss.item(), rel=1e-12, abs=1e-12)
    slope = np.concatenate([gradient(part.logprobs_T) for _, part in parts])
    np.testing.assert_allclose(slope, gradient(batch.logprobs_T), rtol=1e-12, atol=1e-14)


def test_a_certain_token_has_a_finite_divergence() -> None:
    """dppo_kl divides by the probability of all other tokens, which is 0 here."""
    sequences = [replace(sequence, now=np.zeros(len(sequence.now))) for sequence in make(16)]
    output, batch = share(sequences, denominator(sequences), config("dppo_kl", "token-mean"))
    assert output.loss.isfinite() and np.isfinite(gradient(batch.logprobs_T)).all()
