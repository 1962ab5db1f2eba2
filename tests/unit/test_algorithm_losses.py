from dataclasses import replace

import pytest
import torch

from treadle.algorithm.loss import LOSSES, compute_policy_loss, find_loss
from treadle.algorithm.metrics import MaxMetric, MeanMetric, merge_metrics, read_metrics
from treadle.algorithm.micro_batch import Denominator, LossInputs, MicroBatch, TokenLosses
from treadle.algorithm.policy_losses import select_tokens
from treadle.config.training import POLICY_LOSSES, ActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from treadle.errors import ConfigError, MisuseError

NONE = RolloutCorrectionConfig()
RATIOS = sorted(LOSSES.keys() - {"gpg", "cispo", "dppo_tv", "dppo_kl", "sapo"})
"""Losses whose value at ratio 1 is minus the advantage."""


def batch(**changes: torch.Tensor | None) -> MicroBatch:
    """Two sequences of two tokens each, all sampled."""
    made = MicroBatch(
        logprobs_T=torch.tensor([-1.0, -2.0, -0.5, -1.5], requires_grad=True),
        advantages_T=torch.tensor([1.0, 1.0, -2.0, -2.0]),
        mask_T=torch.ones(4, dtype=torch.bool),
        sequence_T=torch.tensor([0, 0, 1, 1]),
        num_sequences=2,
        selected_T=torch.zeros(4, dtype=torch.bool),
    )
    return replace(made, **changes)


def loss(made: MicroBatch, name: str = "vanilla", correction: RolloutCorrectionConfig = NONE, **keys: object) -> float:
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name), **keys)
    return compute_policy_loss(made, Denominator.of([2, 2]), actor, correction).loss.item()


def nothing(inputs: LossInputs, actor: ActorConfig) -> TokenLosses:
    return TokenLosses(torch.full_like(inputs.logprobs_T, actor.clip_ratio), {})


def test_the_names_in_the_config_are_the_losses() -> None:
    assert set(POLICY_LOSSES) == set(LOSSES)


def test_a_loss_is_found_by_import_path() -> None:
    assert loss(batch(), "tests.unit.test_algorithm_losses:nothing", clip_ratio=0.4) == pytest.approx(0.4)


@pytest.mark.parametrize("name", ["vanila", "no.such.module:f", "json:__name__"])
def test_an_unknown_loss_names_the_key(name: str) -> None:
    with pytest.raises(ConfigError, match=r"actor\.policy_loss\.loss_mode"):
        find_loss(name)


@pytest.mark.parametrize("name", RATIOS)
def test_without_old_logprobs_the_old_policy_is_the_current_one(name: str) -> None:
    """Every ratio is 1, so the loss is minus the mean advantage, and its gradient is the policy gradient."""
    made = batch()
    assert loss(made, name) == pytest.approx(0.5)
    assert loss(made, name) == loss(batch(old_logprobs_T=made.logprobs_T.detach()), name)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    made = batch()
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name), loss_agg_mode="seq-mean-token-mean")
    compute_policy_loss(made, Denominator.of([2, 2]), actor, NONE).loss.backward()
    assert made.logprobs_T.grad is not None
    assert made.logprobs_T.grad.tolist() == pytest.approx([-0.25, -0.25, 0.5, 0.5])


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"gpg", "sapo", "kl_cov"}))
def test_every_loss_that_clips_says_which_tokens(name: str) -> None:
    """As many as its metrics count. The old policy is far away on the first token, and near on the others."""
    old_T = torch.tensor([-4.0, -2.0, -0.5, -1.5])
    made = batch(old_logprobs_T=old_T, selected_T=torch.tensor([False, False, False, name == "clip_cov"]))
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name))
    output = compute_policy_loss(made, Denominator.of([2, 2]), actor, NONE)
    assert output.tokens is not None and output.tokens.clipped_T is not None
    metrics = read_metrics(output.metrics)
    counted = metrics["actor/pg_clipfrac"] + metrics.get("actor/pg_clipfrac_lower", 0.0)
    assert output.tokens.clipped_T[0]
    assert output.tokens.clipped_T.float().mean().item() == pytest.approx(counted)


def test_dual_clipping_counts_as_clipped() -> None:
    made = batch(old_logprobs_T=torch.tensor([-1.0, -2.0, -9.0, -1.5]))
    output = compute_policy_loss(made, Denominator.of([2, 2]), ActorConfig(clip_ratio_c=3.0), NONE)
    assert output.tokens is not None and output.tokens.clipped_T is not None
    assert output.tokens.clipped_T.tolist() == [False, False, True, False]


def test_a_rejected_token_is_silent_in_every_term_and_still_counts() -> None:
    made = batch(
        rollout_logprobs_T=torch.tensor([-1.0, -2.0, -0.5, -9.0]),
        ref_logprobs_T=torch.tensor([-1.0, -2.0, -0.5, -9.0]),
        entropy_T=torch.ones(4, requires_grad=True),
    )
    chosen = RolloutCorrectionConfig(rollout_rs="token")
    actor = ActorConfig(use_kl_loss=True, kl_loss_coef=1.0, entropy_coeff=1.0)
    output = compute_policy_loss(made, Denominator.of([2, 2]), actor, chosen)
    output.loss.backward()
    assert output.loss.item() == pytest.approx((-1.0 - 1.0 + 2.0 - 3.0) / 4)
    assert made.logprobs_T.grad is not None and made.logprobs_T.grad[3] == 0
    assert made.entropy_T is not None and made.entropy_T.grad is not None and made.entropy_T.grad[3] == 0


def test_everything_rejected_is_a_loss_of_zero() -> None:
    made = batch(rollout_logprobs_T=torch.full((4,), -9.0))
    assert loss(made, correction=RolloutCorrectionConfig(rollout_rs="sequence")) == 0.0


def test_the_mismatch_is_measured_whenever_the_sampler_reported_logprobs() -> None:
    made = batch(rollout_logprobs_T=torch.tensor([-1.0, -2.0, -0.5, -1.7]))
    output = compute_policy_loss(made, Denominator.of([2, 2]), ActorConfig(), NONE)
    assert read_metrics(output.metrics)["rollout_corr/logprob_abs_diff_max"] == pytest.approx(0.2)
    assert output.loss.item() == loss(batch())


@pytest.mark.parametrize(
    ("keys", "correction", "needs"),
    [
        ({"use_kl_loss": True}, NONE, "ref_logprobs_T"),
        ({"entropy_coeff": 0.1}, NONE, "entropy_T"),
        ({}, RolloutCorrectionConfig(rollout_is="token"), "rollout_logprobs_T"),
        ({}, RolloutCorrectionConfig(rollout_rs="token"), "rollout_logprobs_T"),
        ({}, RolloutCorrectionConfig(bypass_mode=True), "rollout_logprobs_T"),
    ],
)
def test_what_the_config_asks_for_must_be_given(
    keys: dict[str, object], correction: RolloutCorrectionConfig, needs: str
) -> None:
    with pytest.raises(MisuseError, match=needs):
        loss(batch(), correction=correction, **keys)


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_covariance_losses_need_their_selection(name: str) -> None:
    with pytest.raises(MisuseError, match="select_tokens"):
        loss(batch(selected_T=None), name)


def test_other_losses_select_nothing() -> None:
    made = batch()
    assert select_tokens(made.logprobs_T, made.advantages_T, made.mask_T, PolicyLossConfig(), 0) is None


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
@pytest.mark.parametrize(("ratio", "most"), [(0.0, 0), (1e-9, 1), (1.0, 4)])
def test_a_ratio_above_zero_selects_at_least_one(name: str, ratio: float, most: int) -> None:
    made = batch()
    keys = {"kl_cov_ratio": ratio, "clip_cov_ratio": ratio, "clip_cov_lb": -99.0, "clip_cov_ub": 99.0}
    policy_loss = PolicyLossConfig(loss_mode=name, **keys)
    found = select_tokens(made.logprobs_T.detach(), made.advantages_T, made.mask_T, policy_loss, 0)
    assert found is not None and int(found.sum()) == most


def test_extreme_ratios_stay_finite() -> None:
    made = batch(old_logprobs_T=torch.tensor([-1e4, -0.1, -1e4, -0.1]))
    for name in LOSSES:
        made.logprobs_T.grad = None
        actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name))
        output = compute_policy_loss(made, Denominator.of([2, 2]), actor, NONE)
        output.loss.backward()
        assert output.loss.isfinite() and made.logprobs_T.grad is not None and made.logprobs_T.grad.isfinite().all()


def test_a_micro_batch_without_sampled_tokens_adds_nothing() -> None:
    made = batch(mask_T=torch.zeros(4, dtype=torch.bool))
    for name in LOSSES:
        assert loss(made, name) == 0.0


def test_sequences_without_sampled_tokens_do_not_count() -> None:
    assert Denominator.of([3, 0, 2], 7.0) == Denominator(5, 2, 7.0)


def test_single_precision_losses_have_single_precision_gradients() -> None:
    made = batch()
    compute_policy_loss(made, Denominator.of([2, 2]), ActorConfig(), NONE).loss.backward()
    assert made.logprobs_T.grad is not None and made.logprobs_T.grad.dtype is torch.float32


def test_metrics_merge_before_they_divide() -> None:
    one, two = torch.tensor([True]), torch.tensor([True, True])
    parts = [
        {"mean": MeanMetric.of(torch.tensor([3.0]), one), "peak": MaxMetric.of(torch.tensor([3.0]), one)},
        {"mean": MeanMetric.of(torch.tensor([0.0, 0.0]), two), "peak": MaxMetric.of(torch.tensor([0.0, 5.0]), two)},
    ]
    assert read_metrics(merge_metrics(parts)) == {"mean": 1.0, "peak": 5.0}


def test_nothing_measured_reads_as_nothing() -> None:
    assert read_metrics(merge_metrics([])) == {}
    nobody = torch.zeros(0, dtype=torch.bool)
    assert read_metrics(
        {"mean": MeanMetric.of(torch.zeros(0), nobody), "peak": MaxMetric.of(torch.zeros(0), nobody)}
    ) == {
        "mean": 0.0,
        "peak": 0.0,
    }
