"""Agent workers and the scorer on Ray: the same trajectories, and a death is a failed attempt, not a failed run."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("ray")


from tests import ray_cluster
from tests.gateways import trained
from tests.integration.test_gateway_agents import PROGRAM, Recording
from tests.rollouts import CALL, FINAL, engine, renderer, rollout, save_model, say, task, tasks
from treadle.cluster.ray.rollout import start_worker
from treadle.cluster.ray.scorer import RemoteScorer, ScorerSetup
from treadle.config import AgentLoopConfig, Config, FailureConfig, ScriptedConfig
from treadle.config.reward import JudgeConfig, JudgeEngineConfig, RewardConfig, RewardFunctionConfig
from treadle.engine.router import Router
from treadle.errors import ConfigError, RewardFailure
from treadle.rollout.completion_log import CompletionLog
from treadle.rollout.dispatch import Dispatcher, RolloutRequest
from treadle.rollout.worker import AgentLoopWorker
from treadle.types import Outcome, Row, SamplingParams, StopReason, Trajectory

TOOLS = {"default_agent_loop": "tool_agent", "tools": ("tests.rollouts:add",)}


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster.ray_here():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


async def generate(config, model, engines, *, remote=0, count=6, body=None):
    """A batch by workers here, or by `remote` of them on Ray; `body` runs beside it, with the workers."""
    async with AsyncExitStack() as started:
        router = Router(engines, limits=config.limits, failures=config.failures, rng=random.Random(0))
        started.push_async_callback(router.close)
        workers = []
        if remote:
            reservation = await started.enter_async_context(ray_cluster.reserved(config, model))
            for at in range(remote):
                workers.append(
                    await start_worker(
                        Config(model=model, rollout=config),
                        router,
                        partial(reservation.worker_slot, at),
                        f"agent worker {at}",
                    )
                )
                started.push_async_callback(workers[-1].close)
        else:
            workers.append(
                await AgentLoopWorker.create(rollout=config, model=model, engine=router, renderer=renderer())
            )
        order = RolloutRequest(SamplingParams(config.response_length, stop_token_ids=renderer().stop_token_ids), 1)
        async with asyncio.TaskGroup() as group:
            if body is not None:
                group.create_task(body(workers))
            return await Dispatcher(config, workers, None, completion_log=CompletionLog(router, None)).generate(
                tasks(count), order
            )


def test_workers_on_ray_make_the_same_trajectories_as_one_in_process(cluster, model):
    config, script = rollout(**TOOLS), say(CALL, CALL, FINAL)
    here, there = (
        asyncio.run(generate(config, model, [engine(script)], remote=remote)).trajectories for remote in (0, 2)
    )
    assert [(item.uid, item.rows[0].ids, item.messages) for item in here] == [
        (item.uid, item.rows[0].ids, item.messages) for item in there
    ]
    assert there[0].num_turns == 3


def test_the_sessions_of_a_killed_worker_are_issued_again(cluster, model):
    """A real kill in the middle: every sample ends well, those that were lost in a second attempt."""
    script, asked, died = say(CALL, FINAL), asyncio.Event(), []

    def answer(request, rng):
        asked.set()
        return script(request, rng)

    config, slow = rollout(**TOOLS), [engine(answer, latency_s=0.6)]

    async def kill_one(workers) -> None:
        await asyncio.wait_for(asked.wait(), 60)
        os.kill(workers[0].pid, signal.SIGKILL)
        died.append(time.monotonic())

    batch = asyncio.run(generate(config, model, slow, remote=2, count=8, body=kill_one))
    assert all(trajectory.outcome.ok for trajectory in batch.trajectories)
    assert {trajectory.attempt for trajectory in batch.trajectories} == {0, 1}
    print(f"a batch of 8 was whole {time.monotonic() - died[0]:.2f} s after one of two workers was killed")


def test_a_worker_that_always_dies_fails_its_trajectories_with_the_cause(cluster, model):
    loops = {"dead": AgentLoopConfig(path="tests.ray_engines:Dead")}
    failures = FailureConfig(session_retries=0, max_failed_fraction=1.0)
    config = rollout(default_agent_loop="dead", loops=loops, failures=failures)
    batch = asyncio.run(generate(config, model, [engine(say("x"))], remote=1, count=2))
    assert {trajectory.outcome.boundary for trajectory in batch.trajectories} == {"loop"}
    assert "agent worker 0 died: " in batch.trajectories[0].outcome.detail


def test_a_mistake_in_the_config_comes_back_from_the_actor(cluster, model):
    with pytest.raises(ConfigError, match="no agent loop is called 'nobody'"):
        asyncio.run(generate(rollout(default_agent_loop="nobody"), model, [engine()], remote=1))


def trajectory(text: str) -> Trajectory:
    row = Row((1,), (2,), (1,), (-0.5,), (0,))
    spoken = ({"role": "assistant", "content": text},)
    return Trajectory("one", 0, (row,), Outcome.ended(StopReason.STOP), messages=spoken)


def scored_on_ray(model, functions, body):
    async def main() -> None:
        config = rollout()
        reward = RewardConfig(functions=functions, num_workers=1)
        async with ray_cluster.reserved(config, model) as reservation:
            scorer = await RemoteScorer.create(ScorerSetup(reward), partial(reservation.worker_slot, 0), config.limits)
            try:
                await body(scorer)
            finally:
                await scorer.close()

    asyncio.run(main())


def test_scores_come_from_the_actor_and_its_death_is_survived(cluster, model):
    functions = {
        "answer": RewardFunctionConfig(path="exact_match"),
        "mine": RewardFunctionConfig(path="tests.ray_engines:count_letters", weight=0.5),
    }

    async def body(scorer: RemoteScorer) -> None:
        score = await scorer.score(task(ground_truth="four"), trajectory("four"))
        assert score.parts == {"answer": 1.0, "mine": 4.0} and score.value == 3.0
        os.kill(scorer.pid, signal.SIGKILL)
        assert (await scorer.score(task(ground_truth="four"), trajectory("five"))).value == 2.0

    scored_on_ray(model, functions, body)


def test_judges_work_in_the_actor_and_speak_with_the_policy_through_the_driver(cluster, model):
    """A scripted judge has its engine there; a judge that is the policy asks the driver's."""
    scripted = JudgeEngineConfig(name="scripted", scripted=ScriptedConfig(script="tests.ray_engines:rate"))
    engines = {"own": scripted, "policy": JudgeEngineConfig(name="policy")}
    judges = {name: JudgeConfig(prompt="Rate {{ response }}", engine=made) for name, made in engines.items()}

    async def main() -> None:
        config = rollout()
        setup = ScorerSetup(RewardConfig(judges=judges), model)
        async with ray_cluster.reserved(config, model) as reservation:
            policy = engine(say("Score: 5"))
            scorer = await RemoteScorer.create(setup, partial(reservation.scorer_slot, 0), config.limits, policy)
            try:
                score = await scorer.score(task(), trajectory("four"))
                assert score.parts == {"own": 2.0, "policy": 5.0}
            finally:
                await scorer.close()

    asyncio.run(main())


def test_a_reward_function_that_breaks_is_a_failure_of_its_own_kind(cluster, model):
    functions = {"mine": RewardFunctionConfig(path="tests.ray_engines:count_letters", kwargs={"broken": True})}

    async def body(scorer: RemoteScorer) -> None:
        with pytest.raises(RewardFailure, match="told to break"):
            await scorer.score(task(), trajectory("four"))

    scored_on_ray(model, functions, body)


def test_a_reward_function_that_is_not_there_is_a_mistake_in_the_config(cluster, model):
    with pytest.raises(ConfigError, match="nowhere"):
        scored_on_ray(model, {"mine": RewardFunctionConfig(path="tests.ray_engines:nowhere")}, Path)


PROGRAM_AGENT = {"argv": ["python", "-c", PROGRAM, "{{prompt}}"], "files": {"settings.json": ""}}
AGENTS = {
    "function_agent": ({"function": "tests.integration.test_gateway_recall:two_at_once"}, 10),
    "program_agent": (PROGRAM_AGENT, 3),
}
"""What agents of each loop are, and how many turns they take."""


def agents(loop: str):
    loops = {loop: AgentLoopConfig(kwargs=AGENTS[loop][0])}
    return rollout(default_agent_loop=loop, loops=loops, response_length=4000, num_workers=2)


def all_trained(batch) -> Counter:
    assert all(item.outcome.ok for item in batch.trajectories), [item.outcome for item in batch.trajectories]
    return sum((trained(item.rows) for item in batch.trajectories), Counter())


@pytest.mark.parametrize("loop", AGENTS)
def test_agents_talk_to_the_gateway_of_their_worker_on_its_node(loop, cluster, model):
    recording = Recording(engine(say(FINAL)))
    batch = asyncio.run(generate(agents(loop), model, [recording], remote=2, count=4))
    assert all_trained(batch) == Counter(recording.sampled), "each sampled token once, in its own context"
    assert all(item.num_turns == AGENTS[loop][1] for item in batch.trajectories)


@pytest.mark.parametrize("loop", AGENTS)
def test_a_worker_that_is_killed_with_agents_open_costs_nothing_but_their_time(loop, cluster, model):
    recording = Recording(engine(say(FINAL), latency_s=0.2))

    async def kill_one(workers) -> None:
        async with asyncio.timeout(120):
            while len(recording.sampled) < 6:  # noqa: ASYNC110  agents of both workers are open then
                await asyncio.sleep(0.01)
        os.kill(workers[0].pid, signal.SIGKILL)

    batch = asyncio.run(generate(agents(loop), model, [recording], remote=2, count=4, body=kill_one))
    assert {item.attempt for item in batch.trajectories} == {0, 1}
    found = all_trained(batch)
    assert found <= Counter(recording.sampled) and len(recording.sampled) > found.total()
    assert all(item.num_turns == AGENTS[loop][1] for item in batch.trajectories)
