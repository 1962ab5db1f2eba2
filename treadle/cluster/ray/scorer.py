"""Scorer on the cluster, as the dispatcher sees it: reward functions run on the rollout's nodes, not the driver's.

Owns the scores that are open. One actor hosts the one scorer, with its worker processes, so its rate limit holds for
all. An actor that dies is replaced when the next score is asked for; the open ones fail, each as a RewardFailure. What
the actor sends is read by `SCORER_CODEC` and never as a pickle: reward functions may have run in it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from treadle.cluster.ray.launcher import RayLauncher
from treadle.cluster.ray.placement import ActorSlot
from treadle.config import ModelConfig, RewardConfig
from treadle.config.rollout import LimitsConfig
from treadle.data.renderer import Renderer
from treadle.engine.protocol import Gpu, TokenGenerator
from treadle.errors import Failure, RewardFailure
from treadle.process.channel import ChannelClosed, ChannelCodec
from treadle.process.child_handle import ProcessSpec
from treadle.process.child_main import ParentConnection
from treadle.process.codec import RecordCodec
from treadle.process.launcher import RemoteProcess
from treadle.process.supervisor import RestartPolicy, Supervisor
from treadle.reward.context import RewardContext
from treadle.reward.scorer import Scorer
from treadle.rollout.engines import start_engines
from treadle.rollout.worker_process import UpstreamEngine
from treadle.types import NOTHING, Request, Score, Task, Trajectory

RESTART = RestartPolicy(attempts=3, first_wait_s=0.5)


@dataclass(frozen=True, slots=True)
class ScorerSetup:
    """What a scorer's actor is told first."""

    reward: RewardConfig
    model: ModelConfig | None = None
    """The policy's, for judges that speak with it."""
    api_keys: Mapping[str, str] = NOTHING
    gpus: Mapping[str, tuple[Gpu, ...]] = NOTHING
    """Those of each reward model that has some, as the actor counts them."""


@dataclass(frozen=True, slots=True)
class ScoreOrder:
    """A trajectory to be scored."""

    task: Task
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class GroupScoreOrder:
    """All samples of a task, to be scored together."""

    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class GroupScores:
    """The scores of a group."""

    scores: tuple[Score, ...]


SCORER_CODEC = RecordCodec(
    requests=(Request,), replies=(Score, GroupScores, NoneType), errors=(RewardFailure.__name__,)
)
"""What a scorer sends."""


async def serve_scorer(parent: ParentConnection, setup: ScorerSetup) -> None:
    """Reward functions, with the sandboxed processes that untrusted ones run in, and reward models."""
    policy = UpstreamEngine()
    scorer = await _start_scorer(setup, policy)

    async def score(order: ScoreOrder | GroupScoreOrder) -> Score | GroupScores | None:
        if isinstance(order, GroupScoreOrder):
            return GroupScores(tuple(await scorer.score_group(order.task, order.trajectories)))
        return await scorer.score(order.task, order.trajectory)

    policy.peer = parent.peer(score, RewardFailure)
    async with scorer:
        parent.started()
        await policy.peer.serve()


async def _start_scorer(setup: ScorerSetup, policy: UpstreamEngine) -> Scorer:
    reward, model = setup.reward, setup.model
    if not reward.judges or model is None:
        return await Scorer.create(reward, RewardContext(api_keys=setup.api_keys, gpus=setup.gpus))
    renderer = await asyncio.to_thread(Renderer.create, model)
    context = RewardContext(model, renderer, policy, start_engines, setup.api_keys, setup.gpus)
    return await Scorer.create(reward, context)


class RemoteScorer:
    """A scorer in an actor. Built by `create`, on the loop that uses it."""

    def __init__(
        self, setup: ScorerSetup, slot: Callable[[], ActorSlot], limits: LimitsConfig, policy: TokenGenerator | None
    ) -> None:
        self._setup = setup
        self._slot = slot
        self._limits = limits
        self._policy = policy
        self._supervisor = Supervisor(self._start, RESTART)

    @classmethod
    async def create(
        cls,
        setup: ScorerSetup,
        slot: Callable[[], ActorSlot],
        limits: LimitsConfig,
        policy: TokenGenerator | None = None,
    ) -> "RemoteScorer":
        """A scorer whose functions and models are loaded, or an error. `slot` says where, whenever it is started.

        `policy` answers judges that speak with the weights in training.
        """
        scorer = cls(setup, slot, limits, policy)
        await scorer._supervisor.current()
        return scorer

    @property
    def pid(self) -> int:
        """The id of the scorer's process."""
        assert self._supervisor.process is not None
        return self._supervisor.process.pid

    async def score(self, task: Task, trajectory: Trajectory) -> Score | None:
        """The score of a finished trajectory. Raises RewardFailure where there is none."""
        score: Score | None = await self._ask(ScoreOrder(task, trajectory))
        return score

    @property
    def scores_groups(self) -> bool:
        return self._setup.reward.scores_groups()

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Score]:
        """The whole score of each sample of a task. Raises RewardFailure where there are none."""
        answer: GroupScores = await self._ask(GroupScoreOrder(task, tuple(trajectories)))
        return list(answer.scores)

    async def _ask(self, order: ScoreOrder | GroupScoreOrder) -> Any:
        last: RewardFailure | None = None
        for _ in range(self._setup.reward.retries + 1):
            process = await self._supervisor.current()
            try:
                return await process.peer.request(order)
            except ChannelClosed:
                last = RewardFailure(f"crash: the scorer died: {await process.cause()}")
        assert last is not None, "every attempt returns or fails"
        raise last

    async def _start(self) -> RemoteProcess:
        spec = ProcessSpec(
            "the scorer",
            f"{__name__}:{serve_scorer.__name__}",
            self._setup,
            _launch_timeout_s(self._setup.reward, self._limits),
            codec=ChannelCodec(to_parent=SCORER_CODEC.frames()),
            kill_with_parent=bool(self._setup.gpus),  # they hold memory that a replacement needs
        )
        handle = _refuse if self._policy is None else self._policy.generate
        return await RayLauncher(self._slot()).launch(spec, handle, Failure)

    async def close(self) -> None:
        """End the actor, and with it its processes."""
        await self._supervisor.end()


def _launch_timeout_s(reward: RewardConfig, limits: LimitsConfig) -> float:
    """Models are loaded one after the other, each within its own deadline."""
    models = [judge.engine.launch_timeout_s for judge in reward.judges.values()]
    models += [classifier.launch_timeout_s for classifier in reward.classifiers.values()]
    return limits.launch_timeout_s + sum(models)


async def _refuse(question: Any) -> Any:
    raise AssertionError(f"a scorer asks nothing: {question}")
