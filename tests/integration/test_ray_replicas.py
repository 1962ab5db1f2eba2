"""Replicas on Ray die by real kills: their sessions go on elsewhere with their tokens, and they come back."""

import asyncio
import os
import signal
import time

import pytest

pytest.importorskip("ray")

import torch

from tests import ray_cluster, ray_engines
from tests.effects.models import chat_model
from tests.letters import ask, go_on
from tests.rollouts import rollout, save_model
from tests.tiny import tiny
from treadle.config import FailureConfig, LimitsConfig, ModelConfig
from treadle.engine.protocol import WeightUpdate
from treadle.engine.router import Router
from treadle.errors import EngineFailure, RunError
from treadle.model.checksum import checksum
from treadle.process.supervisor import RestartPolicy
from treadle.types import Completion, Request, SamplingParams, StopReason

TOKENS = 201
"""Of a long answer, its stop token included."""


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster.ray_here():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def kill(replica) -> None:
    os.kill(replica.pid, signal.SIGKILL)


async def whole_turn(router: Router, request: Request) -> list[Completion]:
    """What a session does: it asks again, from where it was interrupted, until the answer ends."""
    parts = [await router.generate(request)]
    while parts[-1].stop is StopReason.ABORT:
        request = go_on(request, parts[-1].ids)
        parts.append(await router.generate(request))
    return parts


def test_a_killed_replica_loses_no_session_and_no_saved_token_and_comes_back(cluster, model, capsys):
    config = rollout(replicas_per_node=2)

    async def main() -> None:
        async with ray_cluster.fleet(config, model, save_s=0.3, start=ray_engines.start_letters) as fleet:
            router = fleet.router
            assert (await router.update_weights(WeightUpdate(4, "word", {"w": torch.ones(3)}))).checksum == "word"
            requests = [ask(uid=f"t{at}", max_tokens=500) for at in range(8)]
            turns = [asyncio.ensure_future(whole_turn(router, request)) for request in requests]
            victim = fleet.replica()
            await ray_cluster.until(lambda: fleet.has_saved(victim.name))
            kill(victim)
            killed_at = time.monotonic()
            answers = await asyncio.wait_for(asyncio.gather(*turns), 60)
            await fleet.recovered()
            moved = [parts for parts in answers if len(parts) > 1]
            assert moved, "somebody was interrupted by the death"
            for parts in moved:
                assert parts[0].replica == victim.name and parts[0].ids, "what was saved is kept"
                assert parts[1].replica != victim.name
            for parts in answers:
                assert parts[-1].stop is StopReason.STOP
                assert {version for part in parts for version in part.versions} == {4}
            (recovery,) = fleet.recoveries
            assert recovery.replica == victim.name and recovery.replacement == victim.name
            assert fleet.replica().pid != victim.pid
            states = {state.name: state for state in router.snapshot()}
            assert set(states) == {"scripted-1", "scripted-0"}
            assert states["scripted-0"].healthy and states["scripted-0"].version == 4
            print(f"replica back after {recovery.seconds:.2f} s; sessions done {time.monotonic() - killed_at:.2f} s on")

    asyncio.run(main())


def test_requests_wait_while_the_only_replica_comes_back(cluster, model):
    config = rollout(failures=FailureConfig(request_retries=1))

    async def main() -> None:
        async with ray_cluster.fleet(config, model, start=ray_engines.start_letters) as fleet:
            running = asyncio.ensure_future(fleet.router.generate(ask(max_tokens=500)))
            await ray_cluster.until(lambda: bool(fleet.engines[0]._requests.open))
            kill(fleet.replica())
            late = await asyncio.wait_for(fleet.router.generate(ask(uid="late")), 60)
            assert late.replica == "scripted-0" and late.stop is StopReason.STOP
            assert len((await asyncio.wait_for(running, 60)).ids) == TOKENS
            assert await asyncio.wait_for(fleet.router.generate(ask(uid="later")), 60)

    asyncio.run(main())


def test_weights_for_the_only_replica_reach_its_replacement_when_it_is_killed(cluster, model):
    """Before the push, or in the middle of it: the push is confirmed, by the one that took its place."""

    async def main() -> None:
        async with ray_cluster.fleet(rollout(), model, start=ray_engines.start_letters) as fleet:
            kill(fleet.replica())
            update = WeightUpdate(3, "word", {"w": torch.ones(3)})
            assert (await asyncio.wait_for(fleet.router.update_weights(update), 60)).checksum == "word"
            completion = await asyncio.wait_for(fleet.router.generate(ask()), 60)
            assert completion.replica == "scripted-0" and set(completion.versions) == {3}
            fleet.router.forget("task/0")
            await fleet.router.sleep()
            assert (await fleet.router.generate(ask(uid="more"))).stop is StopReason.STOP

    asyncio.run(main())


def test_a_run_whose_last_replica_cannot_come_back_ends_with_the_cause(cluster, model):
    policy = RestartPolicy(attempts=2, first_wait_s=0.1)

    async def main() -> None:
        async with ray_cluster.fleet(rollout(), model, policy=policy, start=ray_engines.start_dying) as fleet:
            waiting = asyncio.ensure_future(fleet.router.generate(ask(max_tokens=500)))
            await ray_cluster.until(lambda: bool(fleet.engines[0]._requests.open))
            kill(fleet.replica())
            with pytest.raises(RunError, match=r"no replica is left.*died while it started"):
                await asyncio.wait_for(fleet.supervisor.watch(), 60)
            assert not waiting.done(), "it ends with the run, and is no failure of its own"
            waiting.cancel()
            assert [recovery.replacement for recovery in fleet.recoveries] == [None]

    asyncio.run(main())


def test_an_engine_that_broke_inside_its_process_is_replaced_too(cluster, model):
    config = rollout(replicas_per_node=2, failures=FailureConfig(request_retries=0))

    async def main() -> None:
        async with ray_cluster.fleet(config, model, start=ray_engines.start_failing) as fleet:
            with pytest.raises(EngineFailure, match="illegal memory access"):
                await fleet.router.generate(ask(uid="poison"))
            await fleet.recovered()
            (recovery,) = fleet.recoveries
            assert "the engine can serve no more" in recovery.cause and recovery.replacement is not None

    asyncio.run(main())


def test_real_weights_arrive_bit_for_bit_and_a_returned_replica_has_them(cluster, model):
    """The embedded engine confirms the checksum of what it then holds."""
    wanted = tiny("llama", seed=2)
    tensors = {name: value.detach() for name, value in wanted.named_parameters()}
    limits = LimitsConfig(launch_timeout_s=120.0)
    config = rollout(name="native", prompt_length=16, response_length=16, limits=limits)
    update = WeightUpdate(7, checksum(tensors), tensors)

    async def main() -> None:
        async with ray_cluster.fleet(config, model, start=ray_engines.start_tiny) as fleet:
            assert (await fleet.router.update_weights(update)).checksum == update.checksum
            before = await fleet.router.generate(Request("a", 0, (5, 6, 7), ask(max_tokens=8).sampling))
            kill(fleet.replica())
            after = await asyncio.wait_for(
                fleet.router.generate(Request("a", 0, (5, 6, 7), ask(max_tokens=8).sampling)), 120
            )
            assert after.replica == "native-0" and set(after.versions) == {7}
            assert (after.ids, after.logprobs) == (before.ids, before.logprobs)

    asyncio.run(main())


def test_damaged_weights_are_refused_by_name(cluster, model):
    async def main() -> None:
        async with ray_cluster.fleet(
            rollout(name="native", prompt_length=16, response_length=16), model, start=ray_engines.start_tiny
        ) as fleet:
            tensors = {name: value.detach() for name, value in tiny("llama", seed=2).named_parameters()}
            with pytest.raises(EngineFailure, match="did not arrive: native-0: sent checksum wrong"):
                await fleet.router.update_weights(WeightUpdate(1, "wrong", tensors))

    asyncio.run(main())


def test_a_native_replica_ends_responses_at_the_stop_strings(cluster):
    letters = tuple("abcdefghijklmnopqrstuvwxyz")
    config = rollout(name="native", prompt_length=16, response_length=64, limits=LimitsConfig(launch_timeout_s=120.0))
    sampling = SamplingParams(64, stop=letters, seed=1)

    async def main() -> Completion:
        async with ray_cluster.fleet(config, ModelConfig(path=str(chat_model()))) as fleet:
            return await asyncio.wait_for(fleet.router.generate(Request("a", 0, (5, 6, 7), sampling)), 120)

    completion = asyncio.run(main())
    assert completion.stop is StopReason.STOP and len(completion.ids) < 64
