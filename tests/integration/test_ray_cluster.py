"""Clusters that are started here, that are there already, that cannot be reached, and that lose a node."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("ray")

import ray
import torch

from tests import ray_cluster, ray_engines
from tests.configs import training_config
from tests.letters import ask
from tests.rollouts import rollout, save_model, tasks
from treadle.cli.main import main
from treadle.cluster.ray.connection import connected, find_nodes
from treadle.cluster.ray.placement import Reservation
from treadle.cluster.ray.rollout import RayRollout, planned, reserved, started_rollout
from treadle.config import ClusterConfig, Config
from treadle.config.plan import make_plan
from treadle.config.reward import RewardConfig, RewardFunctionConfig
from treadle.engine.protocol import WeightUpdate
from treadle.errors import ConfigError, RunError
from treadle.process.supervisor import Recovery, RestartPolicy
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


ALERT = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
"""Has Ray notice the loss of a node within two seconds. By default it takes up to fifteen."""


def lose(cluster, lost) -> None:
    """Kill a node of the cluster, as a machine that loses its power."""
    cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id == lost.id), False)


def test_a_plan_is_made_for_the_machines_of_the_cluster_that_is_named(model, capsys):
    with ray_cluster.ray_cluster({"num_cpus": 0}, {"num_cpus": 1, "num_gpus": 3}) as cluster:
        ray.shutdown()
        words = [f"model.path={model.path}", "rollout.n_gpus_per_node=2", "cluster.backend=ray"]
        with pytest.raises(SystemExit) as ended:
            main(["plan", *words, f"cluster.address={cluster.address}"])
        assert not ended.value.code, capsys.readouterr()
        assert "GPU 0–1" in (told := capsys.readouterr().out) and "unused     1 GPU" in told
        assert not ray.is_initialized()
        ray.init(address=cluster.address, log_to_driver=False)


def test_when_a_node_leaves_its_replica_moves_to_another_with_the_current_weights(model):
    shapes = {"num_cpus": 1}, {"num_cpus": 1}, {"num_cpus": 1}
    with ray_cluster.ray_cluster(*shapes) as cluster:
        asyncio.run(_move_a_replica(cluster, model))


async def _move_a_replica(cluster, model) -> None:
    config = rollout(nnodes=2)
    async with ray_cluster.fleet(config, model, save_s=0.3, start=ray_engines.start_letters) as fleet:
        await fleet.router.update_weights(WeightUpdate(4, "word", {"w": torch.ones(3)}))
        used = {slot.node.id for slot in fleet.slots.values()}
        (spare,) = [node for node in find_nodes() if node.id not in used]
        away = next(name for name, slot in fleet.slots.items() if slot.node.id != find_nodes()[0].id)
        turns = [asyncio.ensure_future(fleet.router.generate(ask(uid=f"t{at}", max_tokens=500))) for at in range(6)]
        await ray_cluster.until(lambda: fleet.has_saved(away))
        lost_at = time.monotonic()
        await asyncio.to_thread(lose, cluster, fleet.slots[away].node)
        answers = await asyncio.wait_for(asyncio.gather(*turns), 60)
        assert any(answer.replica == away for answer in answers)
        await fleet.recovered(timeout_s=90)
        (recovery,) = fleet.recoveries
        assert recovery.replica == away and recovery.replacement is not None
        assert recovery.place == f"{spare.machine.name}, CPU" and spare.machine.name in str(recovery)
        states = {state.name: state for state in fleet.router.snapshot()}
        assert states[recovery.replacement].healthy and states[recovery.replacement].version == 4
        assert len(states) == 2
        assert {fleet.reservation.worker_slot(at).there() for at in range(3)} == {True}
        missed = f"{recovery.seconds:.1f} s after it was missed"
        print(f"the replica of a lost node was back on another after {time.monotonic() - lost_at:.1f} s, {missed}")


def test_with_no_room_elsewhere_the_others_go_on_and_a_node_that_joins_is_used(model):
    shapes = {"num_cpus": 1, "_system_config": ALERT}, {"num_cpus": 1}
    with ray_cluster.ray_cluster(*shapes) as cluster:
        asyncio.run(_wait_for_a_node(cluster, model))


async def _wait_for_a_node(cluster, model) -> None:
    policy = RestartPolicy(place_s=1.0, first_wait_s=0.1)
    start = ray_engines.start_letters
    async with ray_cluster.fleet(rollout(nnodes=2), model, policy=policy, start=start) as fleet:
        here = next(at for at, slot in enumerate(fleet.slots.values()) if slot.node.id == find_nodes()[0].id)
        away = fleet.engines[1 - here].name
        await asyncio.to_thread(lose, cluster, fleet.slots[away].node)
        await fleet.recovered(timeout_s=60)
        told = str(fleet.recoveries[0])
        assert "has left the cluster, and no other node has 1 CPU to spare; 1 of 2 replicas go on until a node" in told
        os.kill(fleet.replica(here).pid, signal.SIGKILL)
        await fleet.recovered(2)
        assert fleet.recoveries[1].replica == fleet.engines[here].name
        assert (await fleet.router.generate(ask(uid="later"))).stop is StopReason.STOP
        cluster.add_node(object_store_memory=ray_cluster.STORE_BYTES, num_cpus=1)  # wants the main thread
        joined_at = time.monotonic()
        await fleet.recovered(3)
        assert fleet.recoveries[2].replica == away and fleet.recoveries[2].replacement is not None
        assert len([state for state in fleet.router.snapshot() if state.healthy]) == 2
        print(f"a node that joined had its replica after {time.monotonic() - joined_at:.1f} s")


def test_a_run_that_loses_its_only_rollout_node_ends_with_the_cause(model):
    with ray_cluster.ray_cluster({"num_cpus": 0, "_system_config": ALERT}, {"num_cpus": 1}) as cluster:
        asyncio.run(_lose_the_last_node(cluster, model))


async def _lose_the_last_node(cluster, model) -> None:
    policy, nodes = RestartPolicy(place_s=0.5, first_wait_s=0.1), [find_nodes()[1]]
    start = ray_engines.start_letters
    async with ray_cluster.fleet(rollout(), model, nodes, policy=policy, start=start) as fleet:
        await asyncio.to_thread(lose, cluster, nodes[0])
        with pytest.raises(RunError, match=r"no replica is left.* has left the cluster, and no other node has 1 CPU"):
            await asyncio.wait_for(fleet.supervisor.watch(), 60)
        with pytest.raises(RunError, match="every machine of the run has left the cluster"):
            fleet.reservation.worker_slot(0)


DRIVER = """
import asyncio, sys
from tests import ray_cluster, ray_engines
from tests.rollouts import rollout
from treadle.cluster.ray.connection import connected
from treadle.config import ClusterConfig, ModelConfig

async def main(model):
    async with ray_cluster.fleet(rollout(), model, start=ray_engines.start_letters) as fleet:
        print(fleet.replica().pid, flush=True)
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
            config = Config(model=model, rollout=rollout(), cluster=address)
            with planned(config) as plan:
                async with reserved(config, plan) as reservation:
                    (slot,) = reservation.replica_slots()
                    assert slot.node.num_cpus == 1.0

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
            assert isinstance(parts.backend, RayRollout)
            first = parts.backend.replicas.supervisor._replicas[0]
            await ray_cluster.until(lambda: bool(first._requests.open))
            os.kill(first._engine.pid, signal.SIGKILL)
            batch = await asyncio.wait_for(call, 60)
        assert all(item.outcome.ok and item.num_turns == 2 for item in batch.trajectories)
        assert {item.reward.value for item in batch.trajectories} == {float(len("It is 3."))}

    asyncio.run(main())
