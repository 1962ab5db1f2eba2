"""Failures that have nothing to do with the answers, and what they do to the statistics of groups: nothing but noise.

    PYTHONPATH=. python bench/injected_failures.py --tasks 400 --n 8 --seed 0

The scripted engine answers right with a probability of the task's own. A share of all attempts breaks: a tool that
fails, after the answer is known, whatever it is. No attempt is made again. Compared with a run without failures: the
mean reward of the survivors, the mean over groups of its spread, and GRPO's advantages, by mean, spread and by answer.
"""

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev

from tests.rollouts import engine, rollout, save_model
from treadle.algorithm.advantage_inputs import AdvantageInputs
from treadle.algorithm.estimators import compute_advantages
from treadle.config import AlgorithmConfig, FailureConfig
from treadle.errors import ToolFailure
from treadle.rollout.agent_loop import AgentLoopBase
from treadle.rollout.manager import AgentLoopManager
from treadle.rollout.service import RolloutParts
from treadle.rollout.session import Session
from treadle.types import Group, Request, Score, Task, Trajectory

RATES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5)


class BreaksSometimes(AgentLoopBase):
    """One turn, and then a failure with the probability `rate`, drawn apart from the answer."""

    rate = 0.0

    async def run(self, session: Session) -> None:
        await session.generate()
        if random.Random(f"{session.task.uid} {session.sample}").random() < self.rate:
            raise ToolFailure("injected")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of the survivors of a run."""

    failed: float
    groups: int
    """With at least two survivors: the others have no advantage."""
    reward: float
    spread: float
    advantage: float
    advantage_spread: float
    right: float
    wrong: float
    """The mean advantage of right and of wrong answers."""


def answer(request: Request, rng: random.Random) -> str:
    """Right with a probability that is the task's own."""
    return "yes" if rng.random() < random.Random(request.uid).random() else "no"


def measure(rate: float, num_tasks: int, n: int, seed: int, model_dir: Path) -> Statistics:
    """Run once with that share of failures."""
    BreaksSometimes.rate = rate
    config = rollout(
        n=n,
        seed=seed,
        default_agent_loop=f"{__name__}:BreaksSometimes",
        failures=FailureConfig(session_retries=0, max_failed_fraction=1.0, min_group_size=1),
    )
    tasks = [Task(f"{seed}-{at}", ({"role": "user", "content": f"Task {at}"},)) for at in range(num_tasks)]
    parts = RolloutParts(engines=[engine(answer)])
    with AgentLoopManager.create_blocking(rollout=config, model=save_model(model_dir), parts=parts) as manager:
        batch = manager.generate_sequences_blocking(tasks)
    groups = [_scored(group) for group in batch.groups if len(group.survivors) > 1]  # those that failed are in them
    return _statistics(groups, 1 - sum(len(group.survivors) for group in batch.groups) / (num_tasks * n))


def _scored(group: Group) -> Group:
    return Group(group.task, tuple(_score(one) if one.outcome.ok else one for one in group.trajectories))


def _score(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, reward=Score(float(trajectory.response_text == "yes")))


def _statistics(groups: list[Group], failed: float) -> Statistics:
    rewards = [[one.reward.value for one in group.trajectories if one.reward] for group in groups]
    inputs = AdvantageInputs.of(groups)
    found = compute_advantages(inputs, AlgorithmConfig(adv_estimator="grpo")).advantages_T
    first = [int((inputs.trajectory_T == at).nonzero()[0]) for at in range(inputs.num_trajectories)]
    advantages = found[first].tolist()
    flat = [reward for group in rewards for reward in group]
    by_answer = {
        value: [one for one, reward in zip(advantages, flat, strict=True) if reward == value] for value in (0.0, 1.0)
    }
    return Statistics(
        failed=failed,
        groups=len(groups),
        reward=fmean(map(fmean, rewards)),
        spread=fmean(map(pstdev, rewards)),
        advantage=fmean(advantages),
        advantage_spread=pstdev(advantages),
        right=fmean(by_answer[1.0]),
        wrong=fmean(by_answer[0.0]),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=400)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(
        "| failures | failed | groups | reward | spread | advantage | its spread | of right answers | of wrong ones |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for rate in RATES:
            found = measure(rate, arguments.tasks, arguments.n, arguments.seed, Path(scratch) / str(rate))
            print(
                f"| {rate:.0%} | {found.failed:.1%} | {found.groups} | {found.reward:.3f} | {found.spread:.3f} "
                f"| {found.advantage:+.4f} | {found.advantage_spread:.3f} | {found.right:+.3f} | {found.wrong:+.3f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
