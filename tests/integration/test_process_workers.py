"""Agent workers in processes of their own: the same trajectories, and a death is a failed attempt, not a failed run."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from random import Random

import pytest

from tests.rollouts import CALL, FINAL, engine, rollout, save_model, say, tasks
from treadle.config import AgentLoopConfig, FailureConfig, LimitsConfig
from treadle.errors import ConfigError
from treadle.rollout.agent_loop import AgentLoopBase
from treadle.rollout.manager import AgentLoopManager
from treadle.rollout.service import RolloutParts
from treadle.rollout.session import Session
from treadle.types import Request

TOOLS = {"default_agent_loop": "tool_agent", "tools": ("tests.rollouts:add",)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def generate(config, model, script, count=6):
    with AgentLoopManager.create_blocking(
        rollout=config, model=model, parts=RolloutParts(engines=[engine(script)])
    ) as made:
        return made.generate_sequences_blocking(tasks(count))


def test_processes_make_the_same_trajectories_as_one_worker_in_process(model):
    here, there = (
        generate(rollout(num_workers=workers, **TOOLS), model, say(CALL, CALL, FINAL)).trajectories
        for workers in (0, 2)
    )
    assert [(item.uid, item.rows[0].ids, item.messages) for item in here] == [
        (item.uid, item.rows[0].ids, item.messages) for item in there
    ]


class Suicidal(AgentLoopBase):
    """Kills its process the first time; a marker in the working directory says that it was done."""

    def __init__(self, rollout, marker: str) -> None:
        super().__init__(rollout)
        self.marker = Path(marker)

    async def run(self, session: Session) -> None:
        await session.generate()
        if session.task.uid == "task3" and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_replaced_and_its_attempts_are_made_again(model, tmp_path):
    loops = {"suicidal": AgentLoopConfig(path=f"{__name__}:Suicidal", kwargs={"marker": str(tmp_path / "done")})}
    config = rollout(num_workers=2, default_agent_loop="suicidal", loops=loops)
    batch = generate(config, model, say(FINAL))
    assert all(trajectory.outcome.ok for trajectory in batch.trajectories)
    assert any(trajectory.attempt == 1 for trajectory in batch.trajectories)


def test_a_worker_that_always_dies_fails_its_trajectories_with_the_status(model):
    loops = {"dead": AgentLoopConfig(path=f"{__name__}:Dead")}
    failures = FailureConfig(session_retries=0, max_failed_fraction=1.0)
    batch = generate(
        rollout(num_workers=2, default_agent_loop="dead", loops=loops, failures=failures), model, say("x"), 2
    )
    assert {trajectory.outcome.boundary for trajectory in batch.trajectories} == {"loop"}
    assert "killed by SIGKILL" in batch.trajectories[0].outcome.detail


class Dead(AgentLoopBase):
    async def run(self, session: Session) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_mistake_in_the_config_comes_back_from_the_process(model):
    with pytest.raises(ConfigError, match="no agent loop is called 'nobody'"):
        generate(rollout(num_workers=2, default_agent_loop="nobody"), model, say(FINAL))


def test_cancelling_a_call_cancels_the_sessions_in_the_processes(model):
    async def main() -> None:
        config = rollout(num_workers=2, limits=LimitsConfig(close_timeout_s=5.0))
        asked = threading.Semaphore(0)

        def hang(request: Request, rng: Random) -> str:
            asked.release()
            return "never told"

        parts = RolloutParts(engines=[engine(hang, hang_rate=1.0)])
        async with await AgentLoopManager.create(rollout=config, model=model, parts=parts) as made:
            call = asyncio.ensure_future(made.generate_sequences(tasks(4)))
            for _ in range(4):
                assert await asyncio.to_thread(asked.acquire, timeout=60)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(asyncio.wait_for(main(), 60))
