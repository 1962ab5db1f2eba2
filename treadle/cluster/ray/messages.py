"""What the driver and its actors say to each other, besides what worker processes say too."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.config import ModelConfig, RewardConfig, RolloutConfig
from treadle.engine.protocol import Engine, Gpu
from treadle.types import NOTHING, Completion, Request, Task, Trajectory


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """What a replica's actor is told first."""

    rollout: RolloutConfig
    model: ModelConfig
    name: str
    save_s: float | None
    """How often the tokens of a running request are brought to safety; None for never."""
    crowd: int = 1
    """How many actors compute on the processors there at once."""
    api_key: str | None = None
    start: "StartEngine | None" = None
    """What starts the engine in the actor, importable by name; None for the one that `rollout.name` says."""


StartEngine = Callable[[ReplicaSetup], Awaitable[Engine]]


@dataclass(frozen=True, slots=True)
class Generate:
    """A request under a number, by which its saved tokens come ahead of its answer."""

    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class Saved:
    """Tokens that a running request has so far, since the last ones."""

    number: int
    part: Completion


@dataclass(frozen=True, slots=True)
class Call:
    """Any other call of an engine, by the name of its method."""

    method: str
    arguments: tuple[Any, ...] = ()


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
    task: Task
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class GroupScoreOrder:
    task: Task
    trajectories: tuple[Trajectory, ...]
