"""An agent worker on the cluster, as the dispatcher sees it.

Owns where its actor sits: in the first of its seats whose machine is there. What it does with jobs, and when an actor
is replaced, is the same as for a worker process.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Self

from treadle.cluster.ray.actors import AgentActor
from treadle.cluster.ray.life import Life
from treadle.cluster.ray.placement import Seat
from treadle.config import ModelConfig, RolloutConfig
from treadle.errors import Failure, RunError
from treadle.rollout.distant import DistantWorker
from treadle.rollout.process import Setup
from treadle.rollout.services import Generator


class RemoteWorker(DistantWorker):
    """A worker in an actor."""

    @classmethod
    async def create(
        cls, *, rollout: RolloutConfig, model: ModelConfig, engine: Generator, seats: Sequence[Seat], name: str
    ) -> Self:
        """A worker whose actor has answered, or an error."""
        setup = Setup(rollout, model, tuple(sys.path))
        return await cls.started(name, partial(_start, setup, engine, seats, name))


async def _start(setup: Setup, engine: Generator, seats: Sequence[Seat], name: str) -> Life:
    seat = next((seat for seat in seats if seat.there()), None)
    if seat is None:
        raise RunError(f"{name} has nowhere to run: every machine of the rollout has left the cluster")
    return await Life.start(
        AgentActor,
        seat,
        setup,
        name=name,
        answer=engine.generate,
        expected=Failure,
        timeout_s=setup.rollout.limits.launch_timeout_s,
    )
