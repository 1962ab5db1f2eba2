"""Environment steps in threads: how long sessions take whose environment blocks, beside one that blocks alone.

    PYTHONPATH=. python bench/environments.py [--sessions 256] [--sleep 0.5]

Each session opens an environment, is answered once by a step that sleeps, and ends. The engine is instant. Prints the
time of all sessions together (limit: 2 s for 256 × 0.5 s).
"""

import argparse
import asyncio
import time

from tests import rollouts
from treadle.config import ModelConfig
from treadle.rollout import Action, Opening, Step
from treadle.rollout.protocol import Job
from treadle.rollout.worker import AgentLoopWorker
from treadle.types import SamplingParams, Task, Trajectory


class Sleeper:
    """Blocks its thread in its only step."""

    def __init__(self, sleep_s: float) -> None:
        self._sleep_s = sleep_s

    def reset(self, task: Task) -> Opening:
        return Opening(f"{task.uid}?")

    def step(self, action: Action) -> Step:
        time.sleep(self._sleep_s)
        return Step(reward=1.0, done=True)


async def measure(sessions: int, sleep_s: float) -> float:
    """Seconds from the first session's start to the last one's end."""
    config = rollouts.rollout(
        default_agent_loop="environment_agent",
        environment="bench.environments:Sleeper",
        environment_kwargs={"sleep_s": sleep_s},
    )
    renderer = rollouts.renderer()
    worker = await AgentLoopWorker.create(
        rollout=config, model=ModelConfig(path="unused"), engine=rollouts.engine(rollouts.say("x")), renderer=renderer
    )
    sampling = SamplingParams(config.response_length, stop_token_ids=renderer.stop_token_ids)
    began = time.perf_counter()
    ended = await asyncio.gather(*(worker.run(Job(task, 0, sampling)) for task in rollouts.tasks(sessions)))
    took = time.perf_counter() - began
    await worker.close()
    assert all(isinstance(item, Trajectory) and item.outcome.ok for item in ended)
    return took


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--sessions", type=int, default=256)
    arguments.add_argument("--sleep", type=float, default=0.5)
    given = arguments.parse_args()
    took = asyncio.run(measure(given.sessions, given.sleep))
    print(f"{given.sessions} sessions × {given.sleep:g} s in a step: {took:.2f} s")


if __name__ == "__main__":
    main()
