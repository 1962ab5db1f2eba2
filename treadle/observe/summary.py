"""Rollout summary: rewards, pass@k, how trajectories ended, and where the time went.

Owns the arithmetic and the records. Knows no terminal; `rich_output` draws what is here.
Invariant: a failed trajectory counts as failed and nowhere else: not in a reward, not in pass@k. One that was not
scored is told apart from one that was scored 0. One pass over the trajectories, in any order.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb, fsum, sqrt

from treadle.config.reward import SESSION_PARTS
from treadle.errors import Boundary
from treadle.observe.progress import FinishedTrajectory, StageTime
from treadle.types import StopReason


@dataclass(frozen=True, slots=True)
class PassAtK:
    """The chance that at least one of k samples succeeds, estimated without bias from groups of at least k."""

    k: int
    value: float
    num_groups: int


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """The trajectories of one data source."""

    data_source: str
    num_trajectories: int
    num_scored: int
    num_failed: int
    reward_mean: float | None
    reward_std: float | None
    """Over all scored samples, dividing by their number less one; None below two."""
    pass_at_k: tuple[PassAtK, ...]
    parts: Mapping[str, float] = field(default_factory=dict)
    """The mean of each part of the reward, before its weight; what a session was not given counts as 0."""
    all_equal: bool = False
    """Whether several samples were scored, and all alike: there is nothing to learn from them, or to tell apart."""


@dataclass(frozen=True, slots=True)
class FailureSummary:
    """The failures of one boundary, and the detail of the first."""

    boundary: Boundary
    count: int
    example: str
    example_uid: str


@dataclass(frozen=True, slots=True)
class StageSummary:
    """Time spent in one stage, per trajectory that spent any there."""

    name: str
    mean_s: float
    max_s: float
    slowest: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a rollout."""

    num_tasks: int
    num_trajectories: int
    num_dropped: int
    """Tasks whose prompts were too long, and that were left out."""
    num_cut: int
    """Tasks whose prompts were too long, and were cut."""
    success_threshold: float
    sources: tuple[SourceSummary, ...]
    stop_reasons: Mapping[StopReason, int]
    failures: tuple[FailureSummary, ...]
    stages: tuple[StageSummary, ...]
    sampled_tokens: int
    num_forks: int
    """Rows beyond the first of their trajectory."""
    wall_s: float

    @property
    def num_failed(self) -> int:
        return sum(failure.count for failure in self.failures)

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about the result."""
        return tuple(
            f"every reward{f' of {source.data_source}' if source.data_source else ''} is {source.reward_mean:g}: "
            "samples that all score the same teach nothing"
            for source in self.sources
            if source.all_equal
        )

    @property
    def tokens_per_s(self) -> float:
        return self.sampled_tokens / self.wall_s if self.wall_s > 0 else 0.0

    def to_json(self) -> str:
        """The summary as JSON text."""
        derived = {"num_failed": self.num_failed, "tokens_per_s": self.tokens_per_s, "notes": self.notes}
        return json.dumps({**asdict(self), **derived}, indent=2)


def summarize(
    trajectories: Iterable[FinishedTrajectory],
    *,
    success_threshold: float = 1.0,
    wall_s: float = 0.0,
    num_dropped: int = 0,
    num_cut: int = 0,
) -> Summary:
    """Summarize trajectories, each (uid, sample) given once; a reward of `success_threshold` or more is a success."""
    gathered = _Gathered()
    for finished in trajectories:
        gathered.add(finished)
    return Summary(
        num_tasks=len(gathered.tasks),
        num_trajectories=sum(gathered.reasons.values()),
        num_dropped=num_dropped,
        num_cut=num_cut,
        success_threshold=success_threshold,
        sources=tuple(gathered.source(name, success_threshold) for name in sorted(gathered.counts)),
        stop_reasons=dict(gathered.reasons.most_common()),
        failures=tuple(gathered.failures()),
        stages=tuple(
            StageSummary(name, stage.mean_s, stage.max_s, stage.slowest) for name, stage in gathered.stages.items()
        ),
        sampled_tokens=gathered.tokens,
        num_forks=gathered.forks,
        wall_s=wall_s,
    )


def estimate_pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """1 minus the share of k-subsets with no success; needs num_samples ≥ k."""
    assert 0 <= num_successes <= num_samples and 1 <= k <= num_samples
    return 1.0 - comb(num_samples - num_successes, k) / comb(num_samples, k)


@dataclass(slots=True)
class _Gathered:
    """What one pass keeps: a reward for each sample, and counts."""

    tasks: set[str] = field(default_factory=set)
    rewards: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    parts: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    counts: Counter[str] = field(default_factory=Counter)
    failed_by_source: Counter[str] = field(default_factory=Counter)
    reasons: Counter[StopReason] = field(default_factory=Counter)
    boundaries: Counter[Boundary] = field(default_factory=Counter)
    examples: dict[Boundary, tuple[str, str]] = field(default_factory=dict)
    stages: dict[str, StageTime] = field(
        default_factory=lambda: {"generate": StageTime(), "tool": StageTime(), "score": StageTime()}
    )
    tokens: int = 0
    forks: int = 0

    def add(self, finished: FinishedTrajectory) -> None:
        self.tasks.add(finished.uid)
        self.counts[finished.data_source] += 1
        self.reasons[finished.outcome.reason] += 1
        self.tokens += finished.num_sampled
        self.forks += max(0, finished.num_rows - 1)
        if not finished.outcome.ok:
            self._add_failure(finished)
        elif finished.reward is not None:
            self.rewards[finished.data_source][finished.uid].append(finished.reward.value)
            for name, value in finished.reward.parts.items():
                self.parts[finished.data_source][name].append(value)
        timing = finished.timing
        self.stages["generate"].add(timing.generate_s, finished)
        self.stages["tool"].add(timing.tool_s, finished)
        self.stages["score"].add(timing.score_s, finished)

    def _add_failure(self, finished: FinishedTrajectory) -> None:
        self.failed_by_source[finished.data_source] += 1
        boundary = finished.outcome.boundary
        if boundary is not None:
            self.boundaries[boundary] += 1
            self.examples.setdefault(boundary, (finished.outcome.detail, f"{finished.uid}/{finished.sample}"))

    def failures(self) -> Iterable[FailureSummary]:
        for boundary, count in self.boundaries.most_common():
            yield FailureSummary(boundary, count, *self.examples[boundary])

    def source(self, name: str, success_threshold: float) -> SourceSummary:
        groups = list(self.rewards[name].values())
        rewards = [reward for group in groups for reward in group]
        mean = fsum(rewards) / len(rewards) if rewards else None
        return SourceSummary(
            data_source=name,
            num_trajectories=self.counts[name],
            num_scored=len(rewards),
            num_failed=self.failed_by_source[name],
            reward_mean=mean,
            reward_std=None
            if mean is None or len(rewards) < 2
            else sqrt(fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)),
            pass_at_k=tuple(_pass_at_k(groups, success_threshold)),
            parts={
                part: fsum(values) / (len(rewards) if part in SESSION_PARTS else len(values))
                for part, values in self.parts[name].items()
            },
            all_equal=len(rewards) > 1 and min(rewards) == max(rewards),
        )


def _pass_at_k(groups: Sequence[Sequence[float]], success_threshold: float) -> Iterable[PassAtK]:
    """For k = 1, 2, 4, … up to the largest group."""
    outcomes = Counter((len(group), sum(reward >= success_threshold for reward in group)) for group in groups)
    k = 1
    while large := {outcome: count for outcome, count in outcomes.items() if outcome[0] >= k}:
        num_groups = sum(large.values())
        total = fsum(count * estimate_pass_at_k(*outcome, k) for outcome, count in large.items())
        yield PassAtK(k, total / num_groups, num_groups)
        k *= 2
