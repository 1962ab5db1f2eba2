"""The scorer on the cluster, as the dispatcher sees it: reward functions run on the rollout's nodes, not the driver's.

Owns the scores that are open. One actor hosts the one scorer, with its worker processes, so its rate limit holds for
all. An actor that dies is replaced when the next score is asked for; the open ones fail, each as a RewardFailure.
"""

from collections.abc import Callable, Sequence
from typing import Any

from treadle.cluster.ray.actors import ScorerActor
from treadle.cluster.ray.life import Life
from treadle.cluster.ray.messages import GroupScoreOrder, ScoreOrder, ScorerSetup
from treadle.cluster.ray.seat import Seat
from treadle.config import RewardConfig
from treadle.config.rollout import LimitsConfig
from treadle.engine.channel import ChannelClosed
from treadle.errors import Failure, RewardFailure
from treadle.rollout.distant import Succession
from treadle.rollout.services import Generator
from treadle.types import Score, Task, Trajectory


class RemoteScorer:
    """A `Scoring`. Built by `create`, on the loop that uses it."""

    def __init__(
        self, setup: ScorerSetup, seat: Callable[[], Seat], limits: LimitsConfig, policy: Generator | None
    ) -> None:
        self._setup = setup
        self._seat = seat
        self._limits = limits
        self._policy = policy
        self._lives = Succession(self._start)

    @classmethod
    async def create(
        cls, setup: ScorerSetup, seat: Callable[[], Seat], limits: LimitsConfig, policy: Generator | None = None
    ) -> "RemoteScorer":
        """A scorer whose functions and models are loaded, or an error. `seat` says where, whenever it is started.

        `policy` answers judges that speak with the weights in training.
        """
        scorer = cls(setup, seat, limits, policy)
        await scorer._lives.present()
        return scorer

    async def score(self, task: Task, trajectory: Trajectory) -> Score | None:
        """The score of a finished trajectory. Raises RewardFailure where there is none."""
        score: Score | None = await self._ask(ScoreOrder(task, trajectory))
        return score

    @property
    def scores_groups(self) -> bool:
        return self._setup.reward.scores_groups()

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Score]:
        """The whole score of each sample of a task. Raises RewardFailure where there are none."""
        scores: list[Score] = await self._ask(GroupScoreOrder(task, tuple(trajectories)))
        return scores

    async def _ask(self, order: ScoreOrder | GroupScoreOrder) -> Any:
        last: RewardFailure | None = None
        for _ in range(self._setup.reward.retries + 1):
            life = await self._lives.present()
            try:
                return await life.peer.ask(order)
            except ChannelClosed:
                last = RewardFailure(f"crash: the scorer died: {await life.cause()}")
        assert last is not None, "every attempt returns or fails"
        raise last

    async def _start(self) -> Life:
        return await Life.start(
            ScorerActor,
            self._seat(),
            self._setup,
            name="the scorer",
            answer=_refuse if self._policy is None else self._policy.generate,
            expected=Failure,
            timeout_s=_launch_timeout_s(self._setup.reward, self._limits),
        )

    async def close(self) -> None:
        """End the actor, and with it its processes."""
        await self._lives.end()


def _launch_timeout_s(reward: RewardConfig, limits: LimitsConfig) -> float:
    """Models are loaded one after the other, each within its own deadline."""
    models = [judge.engine.launch_timeout_s for judge in reward.judges.values()]
    models += [classifier.launch_timeout_s for classifier in reward.classifiers.values()]
    return limits.launch_timeout_s + sum(models)


async def _refuse(question: Any) -> Any:
    raise AssertionError(f"a scorer asks nothing: {question}")
