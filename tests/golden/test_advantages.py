"""Advantages against formulas written out again here, in numpy, one sequence at a time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch

from treadle.algorithm.advantage_inputs import AdvantageInputs, Advantages
from treadle.algorithm.estimators import ESTIMATORS, find_estimator
from treadle.config.training import AlgorithmConfig
from treadle.types import Group, Outcome, Row, Score, StopReason, Task, Trajectory, Turn

Rows = list[np.ndarray]


@dataclass
class Sequence:
    mask: np.ndarray
    token_rewards: np.ndarray
    values: np.ndarray


@dataclass
class Sample:
    reward: float
    sequences: list[Sequence]


@dataclass
class Case:
    groups: list[list[Sample]]
    greedy: list[float]


def make(seed: int) -> Case:
    """Groups of different sizes, one of them alone, one with equal rewards; forks; observations; an empty response."""
    rng = np.random.default_rng(seed)

    def sequence() -> Sequence:
        length = int(rng.integers(1, 9))
        mask = rng.random(length) < 0.7
        return Sequence(mask, rng.normal(size=length) * 0.1, rng.normal(size=length))

    sizes, rewards = [1, 3, 2, 5, 4], rng.normal(size=15)
    rewards[4:6] = 0.1
    groups, at = [], 0
    for size in sizes:
        forks = rng.integers(1, 4, size=size)
        groups.append([Sample(rewards[at + i], [sequence() for _ in range(forks[i])]) for i in range(size)])
        at += size
    groups[4][0].sequences[0].mask[:] = False
    return Case(groups, list(rng.normal(size=len(sizes))))


def to_inputs(case: Case, token_rewards: bool) -> AdvantageInputs:
    samples = [(g, sample) for g, group in enumerate(case.groups) for sample in group]
    rows = [(n, row) for n, (_, sample) in enumerate(samples) for row in sample.sequences]

    def flat(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(row, name) for _, row in rows]))

    return AdvantageInputs(
        rewards_N=torch.tensor([sample.reward for _, sample in samples], dtype=torch.float64),
        group_N=torch.tensor([g for g, _ in samples]),
        num_groups=len(case.groups),
        trajectory_S=torch.tensor([n for n, _ in rows]),
        sequence_T=torch.tensor([s for s, (_, row) in enumerate(rows) for _ in row.mask]),
        mask_T=flat("mask"),
        token_rewards_T=flat("token_rewards") if token_rewards else None,
        values_T=flat("values"),
        baselines_G=torch.tensor(case.greedy, dtype=torch.float64),
        gradient_norms_T=flat("values").abs() + 0.05,
        log_ratios_T=flat("values"),
        parts_NF=torch.tensor([parts(sample) for _, sample in samples], dtype=torch.float64),
        part_weights_F=torch.tensor(WEIGHTS, dtype=torch.float64),
    )


WEIGHTS = (0.7, -0.3)


def parts(sample: Sample) -> tuple[float, float]:
    """Two rewards that a sample got, of different size."""
    return sample.reward, 50 * np.sin(7 * sample.reward)


def gains(row: Sequence, use: bool) -> np.ndarray:
    return row.token_rewards * row.mask if use else np.zeros(len(row.mask))


def total(sample: Sample, use: bool) -> float:
    return sample.reward + sum(gains(row, use).sum() for row in sample.sequences)


def by_group(case: Case, use: bool, rule: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Rows:
    """Rows of an estimator that turns a group's scores and lengths into advantages."""
    rows = []
    for group in case.groups:
        scores = np.array([total(sample, use) for sample in group])
        lengths = np.array([sum(row.mask.sum() for row in sample.sequences) for sample in group])
        for advantage, sample in zip(rule(scores, lengths), group, strict=True):
            rows += [advantage * row.mask for row in sample.sequences]
    return rows


def grpo(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    if len(scores) == 1 or np.ptp(scores) == 0:
        return np.zeros(len(scores))
    return (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)


def dr_grpo(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.array([0.0]) if len(scores) == 1 else scores - scores.mean()


def passk(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    advantages = np.zeros(len(scores))
    if len(scores) > 1 and np.ptp(scores) > 0:
        second, best = np.sort(scores)[-2:]
        advantages[scores.argmax()] = (best - second) / (scores.std(ddof=1) + 1e-6)
    return advantages


def rloo(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    if len(scores) == 1:
        return np.array([0.0])
    return np.array([score - np.delete(scores, i).mean() for i, score in enumerate(scores)])


def opo(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return scores - np.average(scores, weights=lengths)


def gdpo(case: Case) -> Rows:
    """Written out from the paper: every reward normalised in its group, their weighted sum over the whole batch."""
    sums = []
    for group in case.groups:
        found = np.array([parts(sample) for sample in group])
        spread = found.std(axis=0, ddof=1) if len(group) > 1 else np.zeros(2)
        sums.append(((found - found.mean(axis=0)) / (spread + 1e-6)) @ np.array(WEIGHTS))
    deviation = np.concatenate(sums).std(ddof=1) + 1e-6
    pairs = [pair for group, found in zip(case.groups, sums, strict=True) for pair in zip(group, found, strict=True)]
    return [value / deviation * row.mask for sample, value in pairs for row in sample.sequences]


def token_gains(sample: Sample, row: Sequence, use: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where a row was sampled, and what each of those tokens got."""
    where = np.flatnonzero(row.mask)
    got = gains(row, use)[where]
    if len(where):
        got[-1] += sample.reward
    return where, got


def to_go(sample: Sample, row: Sequence, use: bool, gamma: float) -> np.ndarray:
    where, got = token_gains(sample, row, use)
    out = np.zeros(len(row.mask))
    for i, position in enumerate(where):
        out[position] = sum(gamma ** (j - i) * got[j] for j in range(i, len(where)))
    return out


def whiten(rows: Rows, masks: Rows) -> Rows:
    everything = np.concatenate([row[mask] for row, mask in zip(rows, masks, strict=True)])
    mean, deviation = everything.mean(), np.sqrt(everything.var(ddof=1) + 1e-8)
    return [(row - mean) / deviation * mask for row, mask in zip(rows, masks, strict=True)]


def every_row(case: Case) -> list[tuple[int, Sample, Sequence]]:
    return [(g, sample, row) for g, group in enumerate(case.groups) for sample in group for row in sample.sequences]


def masks(case: Case) -> Rows:
    return [row.mask for _, _, row in every_row(case)]


def remax(case: Case, use: bool, gamma: float, lam: float) -> Rows:
    return [(to_go(sample, row, use, 1.0) - case.greedy[g]) * row.mask for g, sample, row in every_row(case)]


def reinforce_plus_plus(case: Case, use: bool, gamma: float, lam: float) -> Rows:
    return whiten([to_go(sample, row, use, gamma) for _, sample, row in every_row(case)], masks(case))


def reinforce_plus_plus_baseline(case: Case, use: bool, gamma: float, lam: float) -> Rows:
    compared = [row.mask & (len(case.groups[g]) > 1) for g, _, row in every_row(case)]
    return whiten(by_group(case, use, dr_grpo), compared)


def gae_and_returns(case: Case, use: bool, gamma: float, lam: float) -> tuple[Rows, Rows]:
    raw, returns = [], []
    for _, sample, row in every_row(case):
        where, got = token_gains(sample, row, use)
        values = row.values[where]
        advantage, out, back = 0.0, np.zeros(len(row.mask)), np.zeros(len(row.mask))
        for i in reversed(range(len(where))):
            following = values[i + 1] if i + 1 < len(where) else 0.0
            advantage = got[i] + gamma * following - values[i] + gamma * lam * advantage
            out[where[i]], back[where[i]] = advantage, advantage + values[i]
        raw.append(out)
        returns.append(back)
    return whiten(raw, masks(case)), returns


def optimal_token_baseline(case: Case, use: bool, gamma: float, lam: float) -> Rows:
    """Token by token: of the samples whose main row is that long, the mean of their returns by the energy so far."""
    rows = []
    for group in case.groups:
        known = []
        for sample in group:
            row = sample.sequences[0]
            energies = [abs(value) + 0.05 for value, kept in zip(row.values, row.mask, strict=True) if kept]
            known.append((to_come(sample, row, use), [sum(energies[: at + 1]) for at in range(len(energies))]))
        for sample in group:
            for row in sample.sequences:
                advantages = to_come(sample, row, use)
                for at in range(len(advantages)):
                    there = [(returns[at], energy[at]) for returns, energy in known if len(returns) > at]
                    if len(group) == 1:
                        advantages[at] = 0.0
                    elif len(there) > 1:
                        advantages[at] -= sum(g * w for g, w in there) / sum(w for _, w in there)
                placed = np.zeros(len(row.mask))
                placed[row.mask] = advantages
                rows.append(placed)
    return rows


def to_come(sample: Sample, row: Sequence, use: bool) -> list[float]:
    """What the sampled tokens of a row still get, from each on."""
    given = list(gains(row, use)[row.mask])
    return [sum(given[at:]) + sample.reward for at in range(len(given))]


def preferred(case: Case, use: bool, slope: Callable[[float], float]) -> Rows:
    """Rows of the best and the worst sample of each group; `values` stand for log(policy / reference)."""
    rows = []
    for group in case.groups:
        scores = [total(sample, use) for sample in group]
        distances = [sum((row.values * row.mask).sum() for row in sample.sequences) for sample in group]
        signs = np.zeros(len(group))
        if max(scores) > min(scores):
            best, worst = scores.index(max(scores)), scores.index(min(scores))
            signs[best] = slope(distances[best] - distances[worst])
            signs[worst] = -signs[best]
        rows += [sign * row.mask for sign, sample in zip(signs, group, strict=True) for row in sample.sequences]
    return rows


OURS: dict[str, Callable[[Case, bool, float, float], Rows]] = {
    "grpo": lambda case, use, gamma, lam: by_group(case, use, grpo),
    "gdpo": lambda case, use, gamma, lam: gdpo(case),
    "dr_grpo": lambda case, use, gamma, lam: by_group(case, use, dr_grpo),
    "grpo_passk": lambda case, use, gamma, lam: by_group(case, use, passk),
    "rloo": lambda case, use, gamma, lam: by_group(case, use, rloo),
    "opo": lambda case, use, gamma, lam: by_group(case, use, opo),
    "optimal_token_baseline": optimal_token_baseline,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gae": lambda case, use, gamma, lam: gae_and_returns(case, use, gamma, lam)[0],
    "dpo": lambda case, use, gamma, lam: preferred(case, use, lambda gap: 0.1 / (1 + np.exp(0.1 * gap))),
    "ipo": lambda case, use, gamma, lam: preferred(case, use, lambda gap: -2 * (gap - 1 / (2 * 0.1))),
    "on_policy_distill": lambda case, use, gamma, lam: [
        np.zeros(len(row.mask)) for group in case.groups for sample in group for row in sample.sequences
    ],
}


def compute(name: str, case: Case, use: bool, **keys: float | bool) -> Advantages:
    return find_estimator(name)(to_inputs(case, use), AlgorithmConfig(**keys))


@pytest.mark.parametrize("token_rewards", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_equals_its_formula(name: str, seed: int, token_rewards: bool) -> None:
    case = make(seed)
    found = compute(name, case, token_rewards, gamma=0.9, lam=0.8).advantages_T.numpy()
    np.testing.assert_allclose(found, np.concatenate(OURS[name](case, token_rewards, 0.9, 0.8)), atol=1e-9)


def test_grpo_over_the_deviation_of_the_batch() -> None:
    """Every group has its own mean, and all have one scale: that of all rewards."""
    case = make(2)
    everything = np.array([sample.reward for group in case.groups for sample in group])
    expected = by_group(case, False, lambda scores, _: (scores - scores.mean()) / (everything.std(ddof=1) + 1e-6))
    found = compute("grpo", case, False, norm_adv_scope="batch").advantages_T.numpy()
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-9)


@dataclass
class Playthrough:
    """One sample: what each turn got, then what its end got, and how many tokens each turn has."""

    turns: list[float]
    end: float
    tokens: list[int]


def play(seed: int) -> list[list[Playthrough]]:
    rng = np.random.default_rng(seed)

    def one() -> Playthrough:
        count = int(rng.integers(1, 5))
        return Playthrough(list(rng.normal(size=count).round(1)), rng.normal(), list(rng.integers(1, 4, size=count)))

    return [[one() for _ in range(size)] for size in (3, 4, 2)]


def to_groups(groups: list[list[Playthrough]]) -> list[Group]:
    """As a session records them: each turn followed by an observation of one token."""

    def trajectory(played: Playthrough) -> Trajectory:
        mask, turns = [], []
        for reward, count in zip(played.turns, played.tokens, strict=True):
            start = len(mask)
            mask += [1] * count + [0]
            turns.append(Turn(start, start + count, len(mask), StopReason.STOP, reward=reward))
        length = len(mask)
        row = Row((1,), (5,) * length, tuple(mask), (-1.0,) * length, (0,) * length, tuple(turns))
        total = played.end + sum(played.turns)
        return Trajectory(
            "t", 0, (row,), Outcome.ended(StopReason.STOP), Score(total, {"environment": sum(played.turns)})
        )

    return [Group(Task("t", ()), tuple(map(trajectory, group))) for group in groups]


def still_to_come(played: Playthrough, turn: int) -> float:
    return sum(played.turns[turn:]) + played.end if turn < len(played.turns) else 0.0


def by_turn(groups: list[list[Playthrough]], scale: bool, alone: bool) -> np.ndarray:
    """Each turn against the same turn of all samples of the group, those that had ended counted as 0."""
    out = []
    for group in groups:
        longest = max(len(played.turns) for played in group)
        to_come = np.array([[still_to_come(played, turn) for turn in range(longest)] for played in group])
        less = to_come - to_come.mean(axis=0)
        if alone:
            less *= len(group) / (len(group) - 1)
        if scale:
            less /= np.sqrt((less**2).sum() / ((len(group) - 1) * longest)) + 1e-6
        for found, played in zip(less, group, strict=True):
            for turn, count in enumerate(played.tokens):
                out += [found[turn]] * count + [0.0]
    return np.array(out)


@pytest.mark.parametrize(
    ("name", "scale", "alone"), [("grpo", True, False), ("dr_grpo", False, False), ("rloo", False, True)]
)
@pytest.mark.parametrize("seed", range(3))
def test_turns_are_compared_with_all_samples_also_those_that_had_ended(
    name: str, scale: bool, alone: bool, seed: int
) -> None:
    played = play(seed)
    inputs = AdvantageInputs.of(to_groups(played))
    found = find_estimator(name)(inputs, AlgorithmConfig(advantage_level="turn")).advantages_T.numpy()
    np.testing.assert_allclose(found, by_turn(played, scale, alone), atol=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_rewards_of_turns_stand_on_their_turns_in_gae_and_reinforce_plus_plus(gamma: float) -> None:
    played = play(3)
    to_go = []
    for sample in (sample for group in played for sample in group):
        got: list[float] = []
        for reward, count in zip(sample.turns, sample.tokens, strict=True):
            got += [0.0] * (count - 1) + [reward]
        got[-1] += sample.end
        returns = [sum(gamma ** (j - i) * got[j] for j in range(i, len(got))) for i in range(len(got))]
        for count in sample.tokens:
            to_go += [*returns[:count], 0.0]
            returns = returns[count:]
    inputs = AdvantageInputs.of(to_groups(played))
    zeros = torch.zeros(len(inputs.mask_T))
    keys = AlgorithmConfig(gamma=gamma, lam=1.0)
    gae = find_estimator("gae")(replace(inputs, values_T=zeros), keys).returns_T
    assert gae is not None
    np.testing.assert_allclose(gae.numpy(), to_go, atol=1e-5)
    mask = inputs.mask_T.numpy()
    whitened = whiten([np.array(to_go)], [mask])[0]
    found = find_estimator("reinforce_plus_plus")(inputs, keys).advantages_T.numpy()
    np.testing.assert_allclose(found, whitened, atol=1e-5)


def test_comparing_turns_is_without_bias_where_the_policy_chooses_when_to_stop() -> None:
    """All groups of two that a small policy can draw, each with its probability, against the true gradient.

    It stops at once for 1.0, or goes on for 0.5 and then gets 2.0 or nothing.
    """
    go, right = 0.3, 0.6
    ways = [
        (1 - go, Playthrough([1.0], 0.0, [1]), [-go]),
        (go * right, Playthrough([0.5, 2.0], 0.0, [1, 1]), [1 - go, 1 - right]),
        (go * (1 - right), Playthrough([0.5, 0.0], 0.0, [1, 1]), [1 - go, -right]),
    ]
    gradient = np.zeros(2)
    for (p, first, steps), (q, second, others) in product(ways, ways):
        inputs = AdvantageInputs.of(to_groups([[first, second]]))
        found = find_estimator("rloo")(inputs, AlgorithmConfig(advantage_level="turn")).advantages_T[inputs.mask_T]
        slopes = np.array([*steps, *others])
        turns = np.array([*range(len(steps)), *range(len(others))])
        for turn in range(2):
            gradient[turn] += p * q * (found.numpy() * slopes)[turns == turn].sum() / 2
    on = 0.5 + 2.0 * right
    true = [go * (1 - go) * (on - 1.0), go * right * (1 - right) * 2.0]
    np.testing.assert_allclose(gradient, true, atol=1e-6)


def test_gae_returns_are_not_whitened() -> None:
    case = make(0)
    found = compute("gae", case, True, gamma=0.9, lam=0.8).returns_T
    assert found is not None
    np.testing.assert_allclose(found.numpy(), np.concatenate(gae_and_returns(case, True, 0.9, 0.8)[1]), atol=1e-12)


def test_grpo_without_deviation_is_dr_grpo() -> None:
    case = make(1)
    found = compute("grpo", case, False, norm_adv_by_std_in_grpo=False).advantages_T.numpy()
    np.testing.assert_allclose(found, np.concatenate(by_group(case, False, dr_grpo)), atol=1e-12)


def test_grpo_of_two_is_plus_and_minus_one_over_root_two() -> None:
    """By hand: two scores a and b lie |a - b| / 2 from their mean, and their deviation is |a - b| / √2."""
    one = Sequence(np.array([True]), np.zeros(1), np.zeros(1))
    case = Case([[Sample(1.0, [one]), Sample(0.0, [one])]], [0.0])
    found = compute("grpo", case, False).advantages_T.tolist()
    assert found == pytest.approx([2**-0.5, -(2**-0.5)], abs=1e-5)


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_advantages_of_preferences_are_the_gradient_of_their_loss(name: str) -> None:
    """Of the loss as it is written, by autograd; each group is a pair of samples, or teaches nothing."""
    case, beta = make(2), 0.3
    inputs = to_inputs(case, False)
    assert inputs.log_ratios_T is not None
    logprobs_T = inputs.log_ratios_T.clone().requires_grad_()  # of the policy, where the reference has 0 everywhere
    losses, at = [], 0
    for group in case.groups:
        summed = [(logprobs_T * inputs.mask_T)[inputs.trajectory_T == at + i].sum() for i in range(len(group))]
        at += len(group)
        scores = [sample.reward for sample in group]
        if len(set(scores)) > 1:
            gap = summed[scores.index(max(scores))] - summed[scores.index(min(scores))]
            losses.append(-torch.nn.functional.logsigmoid(beta * gap) if name == "dpo" else (gap - 1 / (2 * beta)) ** 2)
    (gradient_T,) = torch.autograd.grad(torch.stack(losses).sum(), logprobs_T)
    found = find_estimator(name)(inputs, AlgorithmConfig(adv_estimator=name, preference_beta=beta)).advantages_T
    np.testing.assert_allclose(found.numpy(), -gradient_T.numpy(), atol=1e-9)
    assert found.count_nonzero() > 0
