"""Advantage estimators by name: GRPO and its variants, RLOO, OPO, ReMax, GAE, REINFORCE++, optimal token
baseline; online DPO and IPO; and on-policy distillation.

N trajectories, G groups, K turns, T tokens, as in `advantage`. Copy one to add your own, or name it by import path.

Against a group baseline: grpo, gdpo, dr_grpo, grpo_passk, rloo, opo, remax. grpo, dr_grpo and rloo can compare turn by
turn: a sample that had ended before a turn counts there with nothing to come; leaving it out would credit the choice
to go on with the others' rewards. Under all but remax, a group of one and a group of equal scores have advantage 0.

Whitened to mean 0 and deviation 1 over the batch's sampled tokens: gae, reinforce_plus_plus and its baseline variant.
A long sequence weighs more; where all tokens have the same value, every advantage is 0.

Optimal token baseline (OTB): for each sampled token, a mean of the group that weighs samples by their gradients.

    A_t = G_t - B_t      B_t = Σ_i G_t W_t / Σ_i W_t      W_t = Σ_{j ≤ t} (1 - 2π_j + Σ_v π_j(v)²)

G_t is the return of sample i from its t-th sampled token on, and W_t estimates the squared norm of its gradient so
far: B_t is the baseline of least variance. Where only one sample of the group is that long, its advantage is G_t.
Tokens of forks are compared with the first rows of the group, at the same count of sampled tokens in their own row.

Preference losses: the best sample w of a group is preferred to its worst l, by the margin between them.

    Δ = h(w) - h(l)      h = Σ log(π / π_ref) over the sampled tokens      dpo: -log σ(β Δ)      ipo: (Δ - 1 / 2β)²

The loss is a function of Δ alone, so its gradient is a number times ∇ log π(w) - ∇ log π(l): that number, taken at the
policy before the step, is the advantage of w, and its negative that of l. Other samples have none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.algorithm.advantage_inputs import (
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    add_up,
    at_tokens,
    broadcast_to_tokens,
    discounted_sum,
    is_fork,
    rewards_matrix,
    rewards_to_go,
    score,
    scores_to_go,
    to_matrix,
    to_tokens,
)
from treadle.config.plugin import find_by_name
from treadle.config.training import AlgorithmConfig
from treadle.errors import MisuseError

GROUP_STD_EPSILON = 1e-6


def group_sizes(inputs: AdvantageInputs) -> Tensor:
    """The number of trajectories in the group of each trajectory, N."""
    return torch.bincount(inputs.group_N, minlength=inputs.num_groups)[inputs.group_N]


def centre(inputs: AdvantageInputs, scores: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """Scores, N or N × K, less the (weighted) mean of their group."""
    weights_N = torch.ones(len(scores), dtype=torch.float64) if weights_N is None else weights_N.double()
    weights = weights_N.view(-1, *[1] * (scores.dim() - 1))
    total_G = add_up(scores * weights, inputs.group_N, inputs.num_groups)
    weight_G = add_up(weights, inputs.group_N, inputs.num_groups).clamp(min=GROUP_STD_EPSILON)
    return scores - (total_G / weight_G)[inputs.group_N]


def deviation(inputs: AdvantageInputs, centred: Tensor) -> Tensor:
    """The standard deviation of the group of each trajectory, N or N × 1, with Bessel's correction.

    Of all turns together, where there is a column for each: turns of a group then keep their proportions.
    """
    squares, columns_N = centred.square(), torch.ones(len(centred), dtype=torch.float64)
    if centred.dim() == 2:
        squares, columns_N = squares.sum(1), _count_turns(inputs, centred.shape[1])
    squares_G = add_up(squares, inputs.group_N, inputs.num_groups)
    deviation_N = (squares_G[inputs.group_N] / ((group_sizes(inputs) - 1).clamp(min=1) * columns_N)).sqrt()
    return deviation_N.unsqueeze(1) if centred.dim() == 2 else deviation_N


def _count_turns(inputs: AdvantageInputs, columns: int) -> Tensor:
    """The turns of the longest trajectory in the group of each trajectory, N."""
    if columns == 1 or inputs.num_turns_N is None:
        return torch.ones(inputs.num_trajectories, dtype=torch.float64)
    longest_G = torch.zeros(inputs.num_groups, dtype=torch.int64)
    return longest_G.scatter_reduce(0, inputs.group_N, inputs.num_turns_N, "amax")[inputs.group_N].double()


def batch_deviation(scores: Tensor) -> Tensor:
    """The standard deviation of all whole trajectories of the batch, whatever their group; 0 for one alone."""
    whole_N = scores if scores.dim() == 1 else scores[:, 0]
    return whole_N.std() if len(whole_N) > 1 else torch.zeros((), dtype=torch.float64)


def grpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Score less the group's mean, over the standard deviation of the group, or of the batch (`norm_adv_scope`).

    Not divided where `norm_adv_by_std_in_grpo` is false.
    """
    scores = scores_to_go(inputs, algorithm)
    centred = centre(inputs, scores)
    if algorithm.norm_adv_by_std_in_grpo:
        by_batch = algorithm.norm_adv_scope == "batch"
        centred = centred / ((batch_deviation(scores) if by_batch else deviation(inputs, centred)) + GROUP_STD_EPSILON)
    return broadcast_to_tokens(inputs, centred)


def gdpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Each part of the reward over its own deviation in the group, then their weighted sum over that of the batch.

    A part that is rare or small is not drowned by one that varies more, as it is when scores are added up first.
    """
    if inputs.parts_NF is None or inputs.part_weights_F is None:
        raise MisuseError("gdpo needs parts_NF and part_weights_F: the parts of each reward and their weights")
    whole_N = torch.zeros(inputs.num_trajectories, dtype=torch.float64)
    for part, weight in enumerate(inputs.part_weights_F.tolist()):
        centred_N = centre(inputs, inputs.parts_NF[:, part].double())
        whole_N += weight * centred_N / (deviation(inputs, centred_N) + GROUP_STD_EPSILON)
    return broadcast_to_tokens(inputs, whole_N / (batch_deviation(whole_N) + GROUP_STD_EPSILON))


def dr_grpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Score less the group's mean. Its authors sum tokens too: `actor.loss_agg_mode: seq-mean-token-sum-norm`."""
    return broadcast_to_tokens(inputs, centre(inputs, scores_to_go(inputs, algorithm)))


def grpo_passk(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Only the best of a group has an advantage: its lead over the second. For the chance that one of k is right."""
    scores_N = score(inputs)
    advantages_N = torch.zeros_like(scores_N)
    for group in range(inputs.num_groups):
        members = (inputs.group_N == group).nonzero().squeeze(1)
        if len(members) > 1:
            best, second = scores_N[members].topk(2).indices.tolist()
            advantages_N[members[best]] = scores_N[members[best]] - scores_N[members[second]]
    if algorithm.norm_adv_by_std_in_grpo:
        advantages_N = advantages_N / (deviation(inputs, centre(inputs, scores_N)) + GROUP_STD_EPSILON)
    return broadcast_to_tokens(inputs, advantages_N)


def rloo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Score less the mean of the others in the group."""
    factor_N = group_sizes(inputs) / (group_sizes(inputs) - 1).clamp(min=1)
    return broadcast_to_tokens(inputs, centre(inputs, scores_to_go(inputs, algorithm)) * factor_N.unsqueeze(1))


def opo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Score less the group's mean weighted by sampled tokens: the baseline of least variance, nearly."""
    lengths_N = add_up(inputs.mask_T, inputs.trajectory_T, inputs.num_trajectories)
    return broadcast_to_tokens(inputs, centre(inputs, score(inputs), lengths_N))


def remax(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """What is still to come at each token, less the reward of the group's greedy answer; 0 in a group that has none."""
    if inputs.baselines_G is None:
        raise MisuseError("remax needs baselines_G: the reward of one greedy answer for each group")
    baselines_T = inputs.baselines_G.double()[inputs.group_N][inputs.trajectory_T]
    compared_T = inputs.mask_T & ~baselines_T.isnan()
    advantages_T = torch.where(compared_T, rewards_to_go(inputs, 1.0, by_turn=False) - baselines_T, 0)
    return Advantages(advantages_T.to(inputs.rewards_N.dtype))


WHITEN_EPSILON = 1e-8


def whiten(values_T: Tensor, among_T: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over `among_T`, 0 elsewhere; one value alone has nothing to differ from, and is 0."""
    values = values_T[among_T].double()
    if len(values) < 2:
        return torch.zeros_like(values_T)
    whitened_T = (values_T - values.mean()) / (values.var() + WHITEN_EPSILON).sqrt()
    return torch.where(among_T, whitened_T, 0)


def gae(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Generalised advantage estimation against the value model, whitened; returns as they are."""
    if inputs.values_T is None:
        raise MisuseError("gae needs values_T: compute the value model's values first")
    values_SL = to_matrix(inputs, inputs.values_T)
    next_SL = torch.nn.functional.pad(values_SL[:, 1:], (0, 1))
    surprise_SL = rewards_matrix(inputs) + algorithm.gamma * next_SL - values_SL
    raw_SL = discounted_sum(surprise_SL, algorithm.gamma * algorithm.lam)
    raw_T, returns_T = to_tokens(inputs, raw_SL), to_tokens(inputs, raw_SL + values_SL)
    dtype = inputs.rewards_N.dtype
    return Advantages(whiten(raw_T, inputs.mask_T).to(dtype), returns_T.to(dtype))


def reinforce_plus_plus(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Discounted rewards to come, whitened. No groups: a batch compares all its tokens."""
    advantages_T = whiten(rewards_to_go(inputs, algorithm.gamma), inputs.mask_T)
    return Advantages(advantages_T.to(inputs.rewards_N.dtype))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Score less the group's mean, whitened. A group of one has advantage 0 and no part in the whitening."""
    centred_T = at_tokens(inputs, centre(inputs, scores_to_go(inputs, algorithm)))
    compared_T = inputs.mask_T & (group_sizes(inputs) > 1)[inputs.trajectory_T]
    return Advantages(whiten(centred_T, compared_T).to(inputs.rewards_N.dtype))


OTB_EPSILON = 1e-12
"""Added to every weight: where no token of any sample could have been another, the mean is a plain one."""


def optimal_token_baseline(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Rewards to come, less the weighted mean of those of the group at the same token."""
    if inputs.gradient_norms_T is None:
        raise MisuseError(
            "optimal_token_baseline needs gradient_norms_T: what Policy.gradient_norms says of each token"
        )
    group_S = inputs.group_N[inputs.trajectory_S]
    returns_SL = discounted_sum(rewards_matrix(inputs), 1.0)
    baselines_GL = _token_baselines(inputs, group_S, returns_SL)
    compared_S = torch.bincount(inputs.group_N, minlength=inputs.num_groups)[group_S] > 1
    advantages_SL = torch.where(compared_S.unsqueeze(1), returns_SL - baselines_GL[group_S], 0)
    return Advantages(to_tokens(inputs, advantages_SL).to(inputs.rewards_N.dtype))


def _token_baselines(inputs: AdvantageInputs, group_S: Tensor, returns_SL: Tensor) -> Tensor:
    """The weighted mean of each group at each token, G × L; 0 where fewer than two samples have one."""
    assert inputs.gradient_norms_T is not None
    first_S = ~is_fork(inputs)
    present_SL = to_matrix(inputs, torch.ones(len(inputs.mask_T))) * first_S.unsqueeze(1)
    weights_SL = (to_matrix(inputs, inputs.gradient_norms_T).cumsum(1) + OTB_EPSILON) * present_SL
    # Relative to the lowest, so that the mean of equal returns is exactly that return.
    lowest_GL = torch.full((inputs.num_groups, returns_SL.shape[1]), torch.inf, dtype=torch.float64)
    lowest_GL.scatter_reduce_(
        0, group_S.unsqueeze(1).expand_as(returns_SL), returns_SL.where(present_SL > 0, torch.inf), "amin"
    )
    lowest_GL = lowest_GL.nan_to_num(posinf=0.0)
    above_SL = (returns_SL - lowest_GL[group_S]) * weights_SL
    total_GL, weight_GL, count_GL = (
        add_up(values_SL, group_S, inputs.num_groups) for values_SL in (above_SL, weights_SL, present_SL)
    )
    return torch.where(count_GL > 1, lowest_GL + total_GL / weight_GL.clamp(min=OTB_EPSILON), 0)


def dpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Direct preference optimization on the policy's own samples: minus the slope of -log σ(β Δ)."""
    pairs, beta = find_pairs(inputs), algorithm.preference_beta
    return _prefer(inputs, pairs, beta * torch.sigmoid(-beta * pairs.margins_P))


def ipo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Identity preference optimization on the policy's own samples: minus the slope of (Δ - 1 / 2β)²."""
    pairs = find_pairs(inputs)
    return _prefer(inputs, pairs, 1 / algorithm.preference_beta - 2 * pairs.margins_P)


@dataclass(frozen=True, slots=True)
class PreferencePairs:
    """The best and the worst sample of each group whose scores differ; of equal ones the first. P pairs."""

    best_P: Tensor
    worst_P: Tensor
    """Trajectories, by their number in the batch."""
    margins_P: Tensor
    """Δ of each pair."""


def find_pairs(inputs: AdvantageInputs) -> PreferencePairs:
    """The pairs of a batch, with their margins before the step."""
    if inputs.log_ratios_T is None:
        raise MisuseError("dpo and ipo need log_ratios_T: log(policy / reference) of each token")
    scores_N, numbers_N = score(inputs), torch.arange(inputs.num_trajectories)

    def first_with(extreme: str) -> tuple[Tensor, Tensor]:
        """The highest or lowest score of each group, and the first trajectory that has it."""
        extreme_G = torch.zeros(inputs.num_groups, dtype=torch.float64)
        extreme_G.scatter_reduce_(0, inputs.group_N, scores_N, extreme, include_self=False)
        has_it_N = scores_N == extreme_G[inputs.group_N]
        first_G = torch.zeros(inputs.num_groups, dtype=torch.int64)
        first_G.scatter_reduce_(0, inputs.group_N[has_it_N], numbers_N[has_it_N], "amin", include_self=False)
        return extreme_G, first_G

    (highest_G, best_G), (lowest_G, worst_G) = first_with("amax"), first_with("amin")
    differs_G = highest_G > lowest_G
    best_P, worst_P = best_G[differs_G], worst_G[differs_G]
    distances_N = add_up(
        torch.where(inputs.mask_T, inputs.log_ratios_T, 0), inputs.trajectory_T, inputs.num_trajectories
    )
    return PreferencePairs(best_P, worst_P, distances_N[best_P] - distances_N[worst_P])


def _prefer(inputs: AdvantageInputs, pairs: PreferencePairs, slopes_P: Tensor) -> Advantages:
    advantages_N = torch.zeros(inputs.num_trajectories, dtype=torch.float64)
    advantages_N[pairs.best_P], advantages_N[pairs.worst_P] = slopes_P, -slopes_P
    return broadcast_to_tokens(inputs, advantages_N)


def on_policy_distill(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """No advantage from rewards: the step adds that of distillation, as to every estimator (`add_distillation`)."""
    return Advantages(torch.zeros(len(inputs.mask_T)))


def add_distillation(advantages_T: Tensor, policy_T: Tensor, teacher_T: Tensor, mask_T: Tensor, coef: float) -> Tensor:
    """On-policy distillation: log(teacher / policy) of each sampled token, weighed, on top of its advantage.

    Its mean over samples of the policy is minus the reverse KL divergence from the teacher, token by token.
    """
    return torch.where(mask_T, advantages_T + coef * (teacher_T - policy_T).to(advantages_T.dtype), advantages_T)


ESTIMATORS: Mapping[str, AdvantageEstimator] = {
    "grpo": grpo,
    "gdpo": gdpo,
    "dr_grpo": dr_grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "optimal_token_baseline": optimal_token_baseline,
    "gae": gae,
    "dpo": dpo,
    "ipo": ipo,
    "on_policy_distill": on_policy_distill,
}


def find_estimator(adv_estimator: str) -> AdvantageEstimator:
    """The estimator of that name, or at that import path."""
    return find_by_name(adv_estimator, ESTIMATORS, "algorithm.adv_estimator")


def compute_advantages(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """The advantages of a batch, by the configured estimator."""
    return find_estimator(algorithm.adv_estimator)(inputs, algorithm)
