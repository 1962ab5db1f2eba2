"""Advantages against formulas written out again here, in numpy, one sequence at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from treadle.algorithm.advantage import AdvantageInputs, Advantages
from treadle.algorithm.estimators import ESTIMATORS, find_estimator
from treadle.config.algorithm import AlgorithmConfig

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
    )


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


OURS: dict[str, Callable[[Case, bool, float, float], Rows]] = {
    "grpo": lambda case, use, gamma, lam: by_group(case, use, grpo),
    "dr_grpo": lambda case, use, gamma, lam: by_group(case, use, dr_grpo),
    "grpo_passk": lambda case, use, gamma, lam: by_group(case, use, passk),
    "rloo": lambda case, use, gamma, lam: by_group(case, use, rloo),
    "opo": lambda case, use, gamma, lam: by_group(case, use, opo),
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gae": lambda case, use, gamma, lam: gae_and_returns(case, use, gamma, lam)[0],
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
