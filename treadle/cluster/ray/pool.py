"""The replicas of a run, started side by side.

Owns the posts: which replica sits where, under which name, in its how-manieth life. See `supervisor` for what happens
when one dies.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from treadle.cluster.ray.messages import ReplicaSetup, StartEngine
from treadle.cluster.ray.replica import RemoteReplica
from treadle.cluster.ray.roster import Roster
from treadle.cluster.ray.seat import Seat
from treadle.config import ModelConfig, RolloutConfig
from treadle.engine.partial import SAVE_S
from treadle.engine.protocol import Engine
from treadle.rollout.dispatch import first_error


@dataclass(frozen=True, slots=True)
class Post:
    """A place for a replica, which may be filled several times over."""

    seat: Seat
    setup: ReplicaSetup

    def again(self, life: int) -> ReplicaSetup:
        """The setup of a later life; a router wants another name for another engine."""
        return replace(self.setup, name=f"{self.setup.name}.{life}")

    def moved(self, seat: Seat) -> "Post":
        """The same post in another place."""
        return Post(seat, replace(self.setup, crowd=seat.crowd))


Move = Callable[[Seat], Awaitable[Seat]]
"""Finds another place such as one whose machine has left; waits until there is one."""


class ReplicaPool:
    """See the module. `start` is what a rollout calls for its engines; made and used on the rollout's loop."""

    def __init__(
        self,
        rollout: RolloutConfig,
        model: ModelConfig,
        seats: Sequence[Seat],
        *,
        name: str | None = None,
        save_s: float | None = SAVE_S,
        api_key: str | None = None,
        start: StartEngine | None = None,
        move: Move | None = None,
    ) -> None:
        if rollout.name == "openai":
            save_s = None  # an endpoint keeps no tokens of what is interrupted
        self.roster = Roster()
        self.move = move
        """None: a replica is given up with its machine."""
        self.posts = tuple(
            Post(seat, ReplicaSetup(rollout, model, f"{name or rollout.name}-{at}", save_s, seat.crowd, api_key, start))
            for at, seat in enumerate(seats)
        )
        self.replicas: tuple[RemoteReplica, ...] = ()

    async def start(self) -> Sequence[Engine]:
        """Every replica, or none and an error."""
        starting: list[asyncio.Task[RemoteReplica]] = []
        try:
            with first_error():
                async with asyncio.TaskGroup() as group:
                    for post in self.posts:
                        start = RemoteReplica.start(post.setup, post.seat, self.roster)
                        starting.append(group.create_task(start))
        except BaseException:
            await _close([task.result() for task in starting if task.done() and not _failed(task)])
            raise
        self.replicas = tuple(task.result() for task in starting)
        for replica in self.replicas:
            self.roster.join(replica)
        return self.replicas


def _failed(task: "asyncio.Task[RemoteReplica]") -> bool:
    return task.cancelled() or task.exception() is not None


async def _close(replicas: Sequence[RemoteReplica]) -> None:
    await asyncio.gather(*(replica.close() for replica in replicas))
