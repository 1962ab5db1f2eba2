"""An agent worker on the cluster, as the dispatcher sees it.

Owns the start of its actor, wherever there is a seat then. What it does with jobs, and when an actor is replaced, is
the same as for a worker process.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Self

from treadle.cluster.ray.actors import AgentActor
from treadle.cluster.ray.life import Life
from treadle.cluster.ray.seat import Seat
from treadle.config import ModelConfig, RolloutConfig
from treadle.errors import Failure
from treadle.rollout.distant import Answer, DistantWorker
from treadle.rollout.process import Setup
from treadle.rollout.serialization import DRIVER_END
from treadle.rollout.services import Generator


class RemoteWorker(DistantWorker):
    """A worker in an actor."""

    @classmethod
    async def create(
        cls, *, rollout: RolloutConfig, model: ModelConfig, engine: Generator, seat: Callable[[], Seat], name: str
    ) -> Self:
        """A worker whose actor has answered, or an error. `seat` says where, whenever one is started."""
        setup = Setup(rollout, model, tuple(sys.path))
        return await cls.started(name, partial(_start, setup, seat, name), rollout, engine)


async def _start(setup: Setup, seat: Callable[[], Seat], name: str, answer: Answer) -> Life:
    return await Life.start(
        AgentActor,
        seat(),
        setup,
        name=name,
        answer=answer,
        expected=Failure,
        timeout_s=setup.rollout.limits.launch_timeout_s,
        form=DRIVER_END,
    )
