"""KL estimators against exact divergences, and KL control against its formula, written out again here."""

import numpy as np
import pytest
import torch

from treadle.algorithm.kl import Estimator, KLControl, estimate_kl, kl_loss, penalise_kl
from treadle.config.training import AlgorithmConfig, KLControlConfig, KLLossType

ESTIMATORS: list[Estimator] = ["k1", "k2", "k3"]
KINDS: list[KLLossType] = ["k1", "k1+", "k2", "k3", "k3+"]


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum()


def pair(seed: int = 0, apart: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """The logits of a policy and a reference over a small vocabulary."""
    rng = np.random.default_rng(seed)
    policy = rng.normal(size=7)
    return policy, policy + rng.normal(size=7) * apart


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_estimator_equals_its_formula(estimator: Estimator) -> None:
    rng = np.random.default_rng(1)
    new, ref = -rng.exponential(size=50), -rng.exponential(size=50)
    expected = {
        "k1": [n - r for n, r in zip(new, ref, strict=True)],
        "k2": [(n - r) ** 2 / 2 for n, r in zip(new, ref, strict=True)],
        "k3": [min(10.0, np.exp(r - n) - (r - n) - 1) for n, r in zip(new, ref, strict=True)],
    }[estimator]
    found = estimate_kl(torch.from_numpy(new), torch.from_numpy(ref), estimator)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    np.testing.assert_array_equal(kl_loss(torch.from_numpy(new), torch.from_numpy(ref), estimator).numpy(), found)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_divergence_as_their_mean(estimator: Estimator) -> None:
    policy, reference = pair()
    p, q = softmax(policy), softmax(reference)
    found = estimate_kl(torch.from_numpy(np.log(p)), torch.from_numpy(np.log(q)), estimator)
    assert (torch.from_numpy(p) * found).sum().item() == pytest.approx((p * np.log(p / q)).sum())


def test_k2_is_near_the_divergence_for_policies_that_are_near() -> None:
    policy, reference = pair(apart=0.05)
    p, q = softmax(policy), softmax(reference)
    found = estimate_kl(torch.from_numpy(np.log(p)), torch.from_numpy(np.log(q)), "k2")
    assert (torch.from_numpy(p) * found).sum().item() == pytest.approx((p * np.log(p / q)).sum(), rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_gradient_of_each_kind_in_the_loss(kind: KLLossType) -> None:
    """Over all tokens, each with its own probability: what sampling would find on average, without its noise."""
    policy, reference = pair(2)
    p, q = softmax(policy), softmax(reference)
    logits = torch.from_numpy(policy).requires_grad_()
    loss_V = kl_loss(logits.log_softmax(0), torch.from_numpy(np.log(q)), kind)
    (torch.from_numpy(p) * loss_V).sum().backward()
    divergence = (p * np.log(p / q)).sum()
    own = p * (np.log(p / q) - divergence)
    expected = {"k1": np.zeros(7), "k3": p - q}.get(kind, own)  # that of k3 is of KL(reference || policy)
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_with_a_plus_has_the_value_of_its_estimator(kind: KLLossType) -> None:
    policy, reference = (torch.from_numpy(np.log(softmax(logits))) for logits in pair(4))
    estimator: Estimator = {"k1+": "k1", "k3+": "k3"}.get(kind, kind)  # type: ignore[assignment]
    assert torch.equal(kl_loss(policy, reference, kind), estimate_kl(policy, reference, estimator))


@pytest.mark.parametrize("kind", KINDS)
def test_absurd_tokens_stay_finite(kind: KLLossType) -> None:
    new = torch.tensor([-0.1, -500.0], requires_grad=True)
    loss = kl_loss(new, torch.tensor([-500.0, -0.1]), kind)
    loss.sum().backward()
    assert loss.isfinite().all() and new.grad is not None and new.grad.isfinite().all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_penalty_in_the_reward_and_its_mean_over_sequences(estimator: Estimator) -> None:
    rng = np.random.default_rng(3)
    rows = [(-rng.exponential(size=n), -rng.exponential(size=n), rng.random(n) < 0.6) for n in (5, 8, 3, 4)]
    rows[2][2][:] = False
    rows[3][0][~rows[3][2]] = np.nan
    penalties, means = [], []
    for new, ref, mask in rows:
        d = np.where(mask, new - ref, 0.0)
        kl = {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[estimator]
        penalties.append(-0.3 * kl * mask)
        means += [kl[mask].mean()] if mask.any() else []
    new, ref, mask = (torch.from_numpy(np.concatenate([row[i] for row in rows])) for i in range(3))
    sequence = torch.tensor([at for at, row in enumerate(rows) for _ in row[0]])
    found = penalise_kl(new, ref, mask, sequence, len(rows), AlgorithmConfig(kl_penalty=estimator), 0.3)
    np.testing.assert_allclose(found.token_rewards_T.numpy(), np.concatenate(penalties), atol=1e-12)
    assert found.kl == pytest.approx(np.mean(means))


def test_adaptive_control_follows_its_formula() -> None:
    control = KLControl.start(KLControlConfig(type="adaptive", kl_coef=0.2, target_kl=0.1, horizon=1000))
    expected = 0.2
    for kl in (0.5, 0.11, 0.1, 0.0, 0.095):
        control = control.after(kl, 64)
        expected *= 1 + float(np.clip(kl / 0.1 - 1, -0.2, 0.2)) * 64 / 1000
        assert control.coefficient == pytest.approx(expected)


def test_adaptive_control_goes_on_from_its_coefficient() -> None:
    kl_ctrl = KLControlConfig(type="adaptive", kl_coef=0.2)
    control = KLControl.start(kl_ctrl).after(0.7, 128)
    assert KLControl(kl_ctrl, control.coefficient).after(0.3, 128) == control.after(0.3, 128)


def test_no_batch_is_large_enough_to_turn_the_weight_negative() -> None:
    control = KLControl.start(KLControlConfig(type="adaptive", kl_coef=0.2, horizon=1))
    assert control.after(0.0, 4096).coefficient == pytest.approx(0.16)


def test_fixed_control_stays() -> None:
    control = KLControl.start(KLControlConfig(kl_coef=0.2))
    assert control.after(100.0, 64) == control
