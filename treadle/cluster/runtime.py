"""What a place to run supplies: networks, engines, and the way of the weights between them.

Every runtime (this process, Ray) gives the same record, so that everything else about a training run is written once.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from treadle.config import TrainConfig
from treadle.engine.protocol import Engine
from treadle.engine.router import Router
from treadle.rollout.service import Attendant, HiredScorer, HiredWorker
from treadle.rollout.services import Generator
from treadle.trainer.step import StepParts
from treadle.weights.push import PushReport, Receiver

StartEngines = Callable[[], Awaitable[Sequence[Engine]]]
"""Starts engines on the loop that will use them."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Started parts; whoever made it closes them."""

    step: StepParts
    engines: StartEngines
    """Those that training samples from."""
    push: Callable[[Receiver, int], Awaitable[PushReport]]
    """Gives a rollout the policy's weights, as a version."""
    validation_engines: StartEngines | None = None
    """Engines with weights of their own, for validation that goes on beside training; None where there are none."""
    workers: Callable[[Generator], Awaitable[Sequence[HiredWorker]]] | None = None
    """Starts agent workers that generate through what they are given; None: the manager's own."""
    scorer: Callable[[], Awaitable[HiredScorer]] | None = None
    """Starts the scorer; None: the manager's own."""
    attend: Callable[[Router], Awaitable[Attendant]] | None = None
    """Looks after the replicas behind a router; None: one that dies stays away."""
    watch: Callable[[], Awaitable[None]] | None = None
    """Raises when a part dies that nobody happens to call, and else waits until cancelled; None: there is none."""


def push_timeout_s(config: TrainConfig) -> float:
    """How long engines may take to confirm new weights; where these wait for open sessions, as long as sessions may."""
    limits = config.rollout.limits
    return limits.request_timeout_s + (limits.session_timeout_s if config.trainer.on_weight_update == "wait" else 0.0)
