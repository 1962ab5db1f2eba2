"""What a place to run supplies: networks, engines, and the way of the weights between them.

Every runtime (this process, Ray) gives the same record, so that everything else about a training run is written once.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from treadle.cluster.stillness import Stillness
from treadle.config import TrainConfig
from treadle.rollout import Parts as RolloutParts
from treadle.trainer.step import StepParts
from treadle.weights.push import PushReport, Receiver


@dataclass(frozen=True, slots=True)
class Runtime:
    """Started networks, and what a rollout builds its own parts from; whoever made it closes them."""

    step: StepParts
    rollout: RolloutParts
    """Engines, and who else works for the rollout that training samples from."""
    push: Callable[[Receiver, int], Awaitable[PushReport]]
    """Gives a rollout the policy's weights, as a version."""
    validation: RolloutParts | None = None
    """Engines with weights of their own, for validation that goes on beside training; None where there are none."""
    watch: Callable[[], Awaitable[None]] | None = None
    """Raises when a part dies that nobody happens to call, and else waits until cancelled; None: there is none."""

    stillness: Stillness = field(default_factory=Stillness)
    """Told when training changes the weights, and when the rollout has them."""


def push_timeout_s(config: TrainConfig) -> float:
    """How long engines may take to confirm new weights; where these wait for open sessions, as long as sessions may."""
    limits = config.rollout.limits
    return limits.request_timeout_s + (limits.session_timeout_s if config.trainer.on_weight_update == "wait" else 0.0)
