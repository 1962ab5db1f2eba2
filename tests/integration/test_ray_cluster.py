"""Clusters that are started here, that are there already, that cannot be reached, and that lose a node."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray

from tests import ray_cluster, ray_engines
from tests.configs import training_config
from tests.letters import ask
from tests.rollouts import rollout, save_model, tasks
from treadle.cluster.ray.connection import connected, find_nodes
from treadle.cluster.ray.guard import descendants
from treadle.cluster.ray.placement import Reservation
from treadle.cluster.ray.rollout import reserved, started_rollout
from treadle.cluster.ray.supervisor import Recovery
from treadle.config import ClusterConfig, Config
from treadle.config.plan import make_plan
from treadle.config.reward import RewardConfig, RewardFunctionConfig
from treadle.errors import ConfigError
from treadle.rollout import AgentLoopManager
from treadle.types import StopReason


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


CORRECTION = "algorithm.rollout_correction.rollout_is=token"


def machines(nodes):
    return [node.machine for node in nodes]


def test_more_roles_than_processors_are_refused_at_once(model):
    with ray_cluster.ray_here(num_cpus=1) as nodes:
        config = training_config("rollout.nnodes=1", "trainer.mode=one_step_off", CORRECTION)
        plan = make_plan(config, machines(nodes))
        with pytest.raises(ConfigError, match=r"2 roles want one CPU each on .*, Ray has 1 there"):
            asyncio.run(Reservation.reserve(plan, nodes, timeout_s=10))


def test_an_address_where_nobody_listens_is_refused_soon():
    began = time.monotonic()
    with (
        pytest.raises(ConfigError, match=r"no Ray cluster answers at 127.0.0.1:9"),
        connected(ClusterConfig(backend="ray", address="127.0.0.1:9")),
    ):
        pass
    assert time.monotonic() - began < 15


def test_a_mistake_in_ray_init_is_named():
    with (
        pytest.raises(ConfigError, match=r"cluster.ray_init: Ray did not start"),
        connected(ClusterConfig(backend="ray", ray_init={"num_cpu": 2})),
    ):
        pass


def test_an_existing_cluster_is_used_and_left_as_it_was(model):
    with ray_cluster.ray_cluster({"num_cpus": 1}) as cluster:
        ray.shutdown()
        with connected(ClusterConfig(backend="ray", address=cluster.address)) as nodes:
            assert [node.num_cpus for node in nodes] == [1.0]
        assert not ray.is_initialized()
        ray.init(address=cluster.address, log_to_driver=False)
        assert ray.cluster_resources()["CPU"] == 1.0


def test_when_a_node_leaves_its_sessions_go_on_and_its_replica_is_given_up(model):
    shapes = {"num_cpus": 1}, {"num_cpus": 1}
    with ray_cluster.ray_cluster(*shapes) as cluster:
        asyncio.run(_lose_a_node(cluster, model))


async def _lose_a_node(cluster, model) -> None:
    config = rollout(nnodes=2)
    async with ray_cluster.fleet(config, model, save_s=0.3, start=ray_engines.start_letters) as fleet:
        away = next(post for post in fleet.pool.posts if post.seat.node.id != find_nodes()[0].id)
        requests = [ask(uid=f"t{at}", max_tokens=500) for at in range(6)]
        turns = [asyncio.ensure_future(fleet.router.generate(request)) for request in requests]
        await asyncio.sleep(0.8)
        node = next(node for node in cluster.worker_nodes if node.unique_id and node.node_id == away.seat.node.id)
        began = time.monotonic()
        await asyncio.to_thread(cluster.remove_node, node, False)
        answers = await asyncio.wait_for(asyncio.gather(*turns), 60)
        assert any(answer.replica == away.setup.name for answer in answers)
        await fleet.recovered(timeout_s=90)
        (recovery,) = fleet.recoveries
        assert recovery.replica == away.setup.name and recovery.successor is None
        assert "has left the cluster" in recovery.reason
        assert (await fleet.router.generate(ask(uid="later"))).stop is StopReason.STOP
        print(f"a lost node was given up after {time.monotonic() - began:.2f} s")


DRIVER = """
import asyncio, sys
from tests import ray_cluster, ray_engines
from tests.rollouts import rollout
from treadle.cluster.ray.connection import connected
from treadle.config import ClusterConfig, ModelConfig

async def main(model):
    async with ray_cluster.fleet(rollout(), model, start=ray_engines.start_letters) as fleet:
        print(fleet.pool.replicas[0].life.pid, flush=True)
        await asyncio.sleep(600)

with connected(ClusterConfig(backend="ray", address=sys.argv[1])):
    asyncio.run(main(ModelConfig(path=sys.argv[2])))
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_a_driver_that_ends_gives_a_shared_cluster_everything_back(model, sign):
    with ray_cluster.ray_cluster({"num_cpus": 2}) as cluster:
        command = [sys.executable, "-c", DRIVER, cluster.address, model.path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
            assert driver.stdout is not None
            pid = int(driver.stdout.readline())
            assert ray.available_resources()["CPU"] == 1.0
            driver.send_signal(sign)
            ended_at = time.monotonic()
        assert ray_cluster.gone_within([pid], 20) == []
        while ray.available_resources().get("CPU") != 2.0:
            assert time.monotonic() - ended_at < 30, ray.available_resources()
            time.sleep(0.1)
        print(f"a shared cluster was whole {time.monotonic() - ended_at:.1f} s after its driver's {sign.name}")


LONER = """
from treadle.cluster.ray.connection import connected
from treadle.config import ClusterConfig

with connected(ClusterConfig(backend="ray", ray_init={"num_cpus": 3, "log_to_driver": False})) as nodes:
    print([node.num_cpus for node in nodes])
"""


def test_a_run_without_an_address_starts_a_cluster_of_its_own_beside_others():
    with ray_cluster.ray_cluster({"num_cpus": 2}):
        command = [sys.executable, "-c", LONER]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "[3.0]\n", done.stderr


def test_a_head_that_takes_no_work_gets_none(model):
    with ray_cluster.ray_cluster({"num_cpus": 0}, {"num_cpus": 1}) as cluster:
        ray.shutdown()
        address = ClusterConfig(backend="ray", address=cluster.address)

        async def main() -> None:
            async with reserved(Config(model=model, rollout=rollout(), cluster=address)) as reservation:
                (seat,) = reservation.replica_seats()
                assert seat.node.num_cpus == 1.0

        asyncio.run(main())
        ray.init(address=cluster.address, log_to_driver=False)


def test_a_rollout_that_stands_alone_runs_on_ray_and_survives_a_kill(model):
    """Replicas, agent workers and the scorer on Ray, behind the same manager as ever."""
    ray_init = {"num_cpus": 2, "object_store_memory": ray_cluster.STORE_BYTES, "log_to_driver": False}
    reward = RewardConfig(functions={"length": RewardFunctionConfig(path="tests.ray_engines:count_letters")})
    tools = {"default_agent_loop": "tool_agent", "tools": ("tests.rollouts:add",), "num_workers": 2}
    config = Config(
        model=model,
        rollout=rollout(replicas_per_node=2, script="tests.ray_engines:answer", latency_s=0.5, **tools),
        reward=reward,
        cluster=ClusterConfig(backend="ray", ray_init=ray_init),
    )
    recoveries: list[Recovery] = []

    async def main() -> None:
        async with (
            started_rollout(config, report=recoveries.append) as parts,
            await AgentLoopManager.create(rollout=config.rollout, model=model, reward=reward, parts=parts) as manager,
        ):
            call = asyncio.ensure_future(manager.generate_sequences(tasks(12)))
            await asyncio.sleep(0.7)
            os.kill(next(pid for pid in descendants(os.getpid()) if _is_replica(pid)), signal.SIGKILL)
            batch = await asyncio.wait_for(call, 60)
        assert all(item.outcome.ok and item.num_turns == 2 for item in batch.trajectories)
        assert {item.reward.value for item in batch.trajectories} == {float(len("It is 3."))}

    asyncio.run(main())


def _is_replica(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_text().startswith("ray::ReplicaActor")
